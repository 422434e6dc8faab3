"""Metal's rules for a kernel's parameters and calls that the text alone can check."""

from __future__ import annotations

from collections.abc import Iterator

from .declaration_rules import METAL_TYPES, Violation
from .entry import BUILTINS
from .lexer import TokenStream
from .structure import Structure

MOST_THREADS = 1024
_POSITIONS = frozenset(
    (
        "thread_position_in_grid",
        "threads_per_grid",
        "thread_position_in_threadgroup",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "grid_size",
        "grid_origin",
    )
)
_INDICES = frozenset(("ushort", "uint", "uint16_t", "uint32_t", "unsigned"))
_VECTORS = frozenset(f"{scalar}{n}" for scalar in ("ushort", "uint") for n in (2, 3))
_PLAIN = METAL_TYPES | _INDICES | {"bool", "char", "short", "int", "long", "float", "size_t"}


def violations(stream: TokenStream, structure: Structure) -> Iterator[Violation]:
    kernels: set[str] = set()
    for i, text in enumerate(stream.text):
        if stream.kind[i] != "name" or stream.at(i - 1) not in ("[", ","):
            continue
        if text in ("buffer", "threadgroup") and stream.at(i + 1) == "(" and stream.at(i - 2) == "[":
            yield from _binding(stream, i)
        elif text in BUILTINS and stream.at(i - 2) == "[":
            yield from _builtin(stream, i)
        elif text == "max_total_threads_per_threadgroup":
            yield from _limit(stream, i)
    for i, text in enumerate(stream.text):
        if text == "kernel" and stream.at(i + 1) in ("=", ";", "{", ")", ".") and stream.at(i - 1) not in ("[", ","):
            yield stream.position(i), "'kernel' is a Metal keyword, not a name"
        if text == "void" and stream.at(i + 2) == "(" and "kernel" in stream.text[stream.statement_start(i) : i]:
            kernels.add(stream.at(i + 1))
    for i, text in enumerate(stream.text):
        calls = text in kernels and stream.at(i + 1) in ("(", "<") and structure.in_function(i)
        if calls and stream.at(i - 1) in (";", "{", "}", ")", "else"):
            yield stream.position(i), f"kernel '{text}' is called: kernels are launched, not called"


def _limit(stream: TokenStream, i: int) -> Iterator[Violation]:
    number = stream.at(i + 2)
    if number.isdigit() and stream.at(i + 3) == ")" and not 0 < int(number) <= MOST_THREADS:
        yield stream.position(i + 2), f"a threadgroup has 1 to {MOST_THREADS} threads, not {number}"


def _parameter(stream: TokenStream, attribute: int) -> list[str]:
    """Returns the words of the parameter whose attribute name is token `attribute`."""
    i = attribute - 3
    last = i
    while stream.at(i) not in ("(", ",", ""):
        i = stream.partner[i] - 1 if stream.at(i) in (")", "]") else i - 1
        while stream.at(i) == "," and _in_template_list(stream, i, last):
            i -= 1
    return stream.text[i + 1 : last + 1]


def _in_template_list(stream: TokenStream, i: int, last: int) -> bool:
    words = stream.text[i : last + 1]
    return words.count(">") + 2 * words.count(">>") > words.count("<")


def _binding(stream: TokenStream, i: int) -> Iterator[Violation]:
    words, kind = _parameter(stream, i), stream.text[i]
    if not words:
        return
    name = next((w for w in reversed(words) if w.isidentifier()), "")
    if not {"*", "&", "["} & set(words):
        if not {"<", "::"} & set(words) and set(words[:-1]) & _PLAIN:
            yield stream.position(i), f"parameter '{name}' of a kernel must be a pointer or a reference"
        return
    wanted = ("device", "constant") if kind == "buffer" else ("threadgroup",)
    if not set(wanted) & set(words):
        message = f"parameter '{name}' has [[{kind}]] and so must point to {' or '.join(wanted)} memory"
        yield stream.position(i), message


def _builtin(stream: TokenStream, i: int) -> Iterator[Violation]:
    words = [w for w in _parameter(stream, i) if w not in ("const", "constexpr", "metal", "::")]
    is_position = stream.text[i] in _POSITIONS
    allowed = _INDICES | _VECTORS if is_position else _INDICES
    if len(words) == 2 and words[0] in _PLAIN - allowed:
        kinds = "ushort or uint, or a vector of 2 or 3 of them" if is_position else "ushort or uint"
        yield stream.position(i), f"[[{stream.text[i]}]] is {kinds}, not {words[0]}"
