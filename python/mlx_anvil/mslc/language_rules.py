"""Finds C++ that Metal 3.1 lacks, as far as the text alone shows it."""

from __future__ import annotations

from collections.abc import Iterator

from .lexer import TokenStream
from .structure import NAMESPACE, Structure

Violation = tuple[tuple[int, int], str]  # (line, column) in the preprocessed text, message

NOT_IN_METAL = {
    **dict.fromkeys(("virtual", "dynamic_cast", "typeid"), "Metal has no run-time types"),
    **dict.fromkeys(("throw", "try", "catch"), "Metal has no exceptions"),
    **dict.fromkeys(("new", "delete"), "Metal has no heap"),
    "register": "Metal does not have it",
    **dict.fromkeys(("double", "wchar_t", "char8_t", "char16_t", "char32_t"), "Metal does not have this type"),
    **dict.fromkeys(
        ("concept", "requires", "consteval", "constinit", "co_await", "co_yield", "co_return"),
        "Metal does not have C++20",
    ),
    "std": "Metal's standard library is the namespace metal",
}
LAMBDAS_SINCE = 320
# Metal keywords that the shim does not define, so that upstream clang would accept them as names.
RESERVED = frozenset(("vertex", "fragment", "ray_data", "object_data", "threadgroup_imageblock"))
# First words of declarations that declare no variable.
_NOT_VARIABLES = frozenset(
    [
        "using",
        "typedef",
        "template",
        "struct",
        "class",
        "union",
        "enum",
        "namespace",
        "static_assert",
        "friend",
        "extern",
    ]
)


def violations(stream: TokenStream, version: int) -> Iterator[Violation]:
    structure = Structure(stream)
    for i, text in enumerate(stream.text):
        outside = structure.kind[structure.enclosing[i]] == NAMESPACE
        if stream.kind[i] == "name":
            if (reason := NOT_IN_METAL.get(text)) and not _is_member(stream, i):
                yield stream.position(i), f"'{text}': {reason}"
            elif text == "long" and stream.at(i + 1) == "long":
                yield stream.position(i), "'long long': Metal does not have this type; long has 64 bits"
            elif text in RESERVED and not _in_attribute(stream, i):
                yield stream.position(i), f"'{text}' is a Metal keyword, not a name"
            elif text == "static" and not outside and _lacks_address_space(stream, i):
                yield stream.position(i), "a static variable must be 'constant'"
        elif stream.kind[i] == "number" and (reason := _number(text)):
            yield stream.position(i), f"'{text}': {reason}"
        elif text == "..." and stream.at(i - 1) in ("(", ",") and stream.at(i + 1) == ")":
            yield stream.position(i), "Metal has no functions with a variable number of arguments"
        elif version < LAMBDAS_SINCE and text == "[" and _opens_lambda(stream, i):
            yield stream.position(i), "Metal has lambdas only since version 3.2"
        elif text in (";", "{") and outside:
            first = stream.statement_start(i)
            if i > first and _lacks_address_space(stream, first):
                yield stream.position(first), "a variable outside functions must be 'constant'"


def _number(text: str) -> str:
    """Returns the error in a numeric literal, or ""."""
    suffix = text.lower().lstrip("0123456789.'") if not text.lower().startswith("0x") else ""
    if suffix in ("ll", "ull", "llu") or text.lower().endswith(("ll", "llu")):
        return "Metal does not have this type; long has 64 bits"
    if text.lower().endswith("l") and "." in text:
        return "Metal does not have this type"
    return ""


def _is_member(stream: TokenStream, i: int) -> bool:
    return stream.at(i - 1) in (".", "->")


def _in_attribute(stream: TokenStream, i: int) -> bool:
    """Tells if a token is inside [[...]]."""
    while i > 0 and stream.at(i) not in (";", "{", "}"):
        if stream.at(i) == "[" and stream.at(i - 1) == "[":
            return True
        i -= 1
    return False


def _opens_lambda(stream: TokenStream, i: int) -> bool:
    """Tells if a bracket opens a lambda: it neither indexes what precedes it nor belongs to an attribute."""
    before, after = stream.at(i - 1), stream.at(i + 1)
    if "[" in (before, after) or before in (")", "]"):
        return False
    indexes = i > 0 and stream.kind[i - 1] in ("name", "string") and before not in ("return", "case", "else")
    return not indexes and stream.at(stream.partner[i] + 1) in ("(", "{")


def _declaration(stream: TokenStream, first: int) -> list[str]:
    """Returns the words of a declaration up to its initialiser, without template arguments, parameters and
    attributes."""
    words: list[str] = []
    i = first
    while i < len(stream) and stream.text[i] not in ("=", ";", "{"):
        text = stream.text[i]
        if text == "[":
            i = stream.partner[i]
        elif text == "(":
            words.append("(")
            i = stream.partner[i]
        elif text == "<":
            i = stream.close_angle(i) or i
        else:
            words.append(text)
        i += 1
    return words


def _lacks_address_space(stream: TokenStream, first: int) -> bool:
    """Tells if a declaration declares a variable that is not `constant`.

    A parenthesis identifies a function, the first word a type or an instantiation."""
    words = _declaration(stream, first)
    declares_variable = len([w for w in words if w.isidentifier()]) >= 2 and "(" not in words
    return declares_variable and not {"constant", *_NOT_VARIABLES} & set(words)
