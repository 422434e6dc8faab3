"""Rules for declarations that the text alone can check: address spaces, threadgroup variables, function constants."""

from __future__ import annotations

from collections.abc import Iterator

from .lexer import TokenStream
from .passes.conformance import SPACES
from .structure import CLASS, FUNCTION, NAMESPACE, Structure

Violation = tuple[tuple[int, int], str]  # (line, column) in the preprocessed text, message

LAST_FUNCTION_CONSTANT = 65535
_SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
_FIXED_WIDTH = tuple(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64))
_WORDS_OF_TYPES = (
    "const",
    "volatile",
    "typename",
    "unsigned",
    "signed",
    "struct",
    "static",
    "constexpr",
    "metal",
    "::",
)
_VECTORS = tuple(f"{scalar}{n}" for scalar in _SCALARS for n in (2, 3, 4))
METAL_TYPES = frozenset(("half", "bfloat", "uchar", "ushort", "uint", "ulong", *_VECTORS))
_NOT_TYPES = frozenset(
    ("return", "else", "do", "case", "goto", "throw", "new", "delete", "sizeof", "typename", "struct")
)


def violations(stream: TokenStream, structure: Structure) -> Iterator[Violation]:
    yield from _names(stream)
    yield from _pointers(stream, structure)
    yield from _threadgroup_variables(stream, structure)
    yield from _function_constants(stream, structure)
    yield from _function_pointers(stream)


def _names(stream: TokenStream) -> Iterator[Violation]:
    """Finds Metal types used as names: int half = 1;"""
    for i, text in enumerate(stream.text):
        if text not in METAL_TYPES or stream.at(i + 1) not in ("=", ";", ",", "[", ")"):
            continue
        before = stream.at(i - 1)
        declares = before in _SCALARS or before in METAL_TYPES or before == "auto"
        if declares and stream.at(i - 2) != "::":
            yield stream.position(i), f"'{text}' is a Metal type, not a name"


def _pointers(stream: TokenStream, structure: Structure) -> Iterator[Violation]:
    """Finds pointers and references without an address space, which Metal requires: float* p; void f(S& s);"""
    types = _type_names(stream)
    for i, text in enumerate(stream.text):
        if text not in ("*", "&") or stream.kind[i + 1 : i + 2] != ["name"]:
            continue
        if stream.at(i + 2) not in ("=", ";", ",", ")", "[", "{", ":", "("):
            continue
        first = _specifiers_start(stream, i - 1, types)
        if first > i or SPACES & set(stream.text[first:i]):
            continue
        if stream.at(i + 2) == "(" and not _declares_function(stream, structure, i):
            continue
        if not _begins_declaration(stream, first):
            continue
        kind = "pointer" if text == "*" else "reference"
        yield stream.position(first), f"a {kind} needs an address space for '{stream.joined(first, i - 1)}'"


def _declares_function(stream: TokenStream, structure: Structure, i: int) -> bool:
    return structure.kind[structure.enclosing[i]] in (NAMESPACE, CLASS)


def _type_names(stream: TokenStream) -> frozenset[str]:
    """Collects the type names that the text declares. Template parameters are left out: they may be pointers."""
    names = {*_SCALARS, *_FIXED_WIDTH, *METAL_TYPES, "size_t", "void"}
    for i, text in enumerate(stream.text):
        if text in ("struct", "class", "union") and stream.at(i + 2) in ("{", ":", ";"):
            names.add(stream.at(i + 1))
    return frozenset(names)


def _specifiers_start(stream: TokenStream, i: int, types: frozenset[str]) -> int:
    """Returns the first token of the type that ends at i, or a position after i if there is no type."""
    first, seen = i + 1, False
    while i >= 0:
        text = stream.text[i]
        if text in types:
            seen = True
        elif text not in _WORDS_OF_TYPES and text not in SPACES:
            break
        first = i
        i -= 1
    return first if seen else len(stream)


def _begins_declaration(stream: TokenStream, first: int) -> bool:
    return stream.at(first - 1) in (";", "{", "}", "(", ",", ":", "") or stream.at(first - 1) in (
        "inline",
        "METAL_FUNC",
    )


def _threadgroup_variables(stream: TokenStream, structure: Structure) -> Iterator[Violation]:
    for i, text in enumerate(stream.text):
        if text != "threadgroup" or not structure.in_function(i) or _in_brackets(stream, i):
            continue
        name, end = _declared(stream, i)
        if not name:
            continue
        if not _is_kernel(stream, structure, i):
            yield stream.position(i), f"threadgroup variable '{name}' is declared outside a kernel"
        if stream.at(end) in ("=", "{"):
            yield stream.position(end), f"threadgroup variable '{name}' cannot have an initialiser"


def _in_brackets(stream: TokenStream, i: int) -> bool:
    """Tells if a token is inside brackets opened by its own statement, such as parameters or casts."""
    return any(stream.text[j] in ("(", "[") and stream.partner[j] > i for j in range(stream.statement_start(i), i))


def _declared(stream: TokenStream, i: int) -> tuple[str, int]:
    """Returns (name, token after its array bounds) of the variable declared with `threadgroup` at i; "" for
    pointers."""
    while stream.at(i) not in (";", "*", "&", "(", "=", "{", ""):
        if stream.at(i) == "<":
            i = stream.close_angle(i) or i
        elif stream.at(i) == "[" or (stream.kind[i] == "name" and stream.at(i + 1) in ("=", "{", ";", ",", "[")):
            name = stream.at(i)
            i += 1
            while stream.at(i) == "[":
                i = stream.partner[i] + 1
            return name, i
        i += 1
    return "", i


def _is_kernel(stream: TokenStream, structure: Structure, i: int) -> bool:
    """Tells if the outermost function around token i is a kernel."""
    brace = structure.enclosing[i]
    function = brace
    while brace >= 0:
        if structure.kind[brace] == FUNCTION:
            function = brace
        brace = structure.enclosing[brace]
    return "kernel" in stream.text[stream.statement_start(function) : function]


def _function_constants(stream: TokenStream, structure: Structure) -> Iterator[Violation]:
    seen: set[str] = set()
    for i, text in enumerate(stream.text):
        if text != "function_constant" or stream.at(i + 1) != "(" or "[" not in (stream.at(i - 1), stream.at(i - 2)):
            continue
        opening = i - 1 if stream.at(i - 2) == "[" else i
        if _in_brackets(stream, opening - 1):
            continue  # belongs to a parameter that the constant enables
        if structure.kind[structure.enclosing[i]] != NAMESPACE:
            yield stream.position(i), "a function constant must be declared outside functions and structs"
        start = stream.statement_start(i)
        if "constant" not in stream.text[start:i]:
            yield stream.position(start), "a function constant must be 'constant'"
        after = stream.partner[i + 1] + 1
        while stream.at(after) == "]":
            after += 1
        if stream.at(after) in ("=", "{"):
            yield stream.position(after), "a function constant cannot have an initialiser: the pipeline sets its value"
        index = stream.joined(i + 2, stream.partner[i + 1] - 1)
        if index in seen:
            yield stream.position(i), f"function constant {index} is declared twice"
        seen.add(index)
        if index.isdigit() and int(index) > LAST_FUNCTION_CONSTANT:
            yield stream.position(i + 2), f"the last function constant is {LAST_FUNCTION_CONSTANT}, not {index}"


def _function_pointers(stream: TokenStream) -> Iterator[Violation]:
    """Finds pointers to functions, which Metal allows as template parameters only: float (*f)(float);"""
    for i in range(1, len(stream) - 4):
        if stream.text[i : i + 2] != ["(", "*"] or stream.kind[i + 2] != "name":
            continue
        if stream.text[i + 3 : i + 5] != [")", "("] or stream.kind[i - 1] != "name" or stream.at(i - 1) in _NOT_TYPES:
            continue
        start = stream.statement_start(i)
        close = stream.close_angle(start + 1) if stream.at(start) == "template" else None
        if close is None or i > close:
            yield stream.position(i), f"'{stream.text[i + 2]}' is a pointer to a function, which Metal does not have"
