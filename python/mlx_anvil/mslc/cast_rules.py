"""Finds casts of arrays to vector pointers that need more alignment than the array guarantees."""

from __future__ import annotations

from collections.abc import Iterator

from .declaration_rules import Violation
from .lexer import TokenStream
from .structure import Structure

_SIZES = {
    **dict.fromkeys(("bool", "char", "uchar", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("short", "ushort", "half", "bfloat", "int16_t", "uint16_t"), 2),
    **dict.fromkeys(("int", "uint", "float", "int32_t", "uint32_t"), 4),
    **dict.fromkeys(("long", "ulong", "int64_t", "uint64_t", "size_t"), 8),
}
ALIGNMENTS = {
    **_SIZES,
    **{f"{scalar}{n}": size * (2 if n == 2 else 4) for scalar, size in _SIZES.items() for n in (2, 3, 4)},
    **{f"packed_{scalar}{n}": size for scalar, size in _SIZES.items() for n in (2, 3, 4)},
}
_ALIGNING = frozenset(("alignas", "aligned"))


def violations(stream: TokenStream, structure: Structure) -> Iterator[Violation]:
    """Checks arrays declared in the text. Checked runs of the simulator cover accesses through other pointers."""
    arrays = _arrays(stream)
    for i, text in enumerate(stream.text):
        if text == "(":
            close, operand = stream.partner[i], stream.partner[i] + 1
        elif text == "reinterpret_cast" and stream.at(i + 1) == "<":
            close = stream.close_angle(i + 1) or i
            operand, i = close + 2, i + 1
        else:
            continue
        wanted = ALIGNMENTS.get(stream.at(close - 2), 0) if stream.at(close - 1) == "*" else 0
        while stream.at(operand) in ("(", "&"):
            operand += 1
        name = stream.at(operand)
        if wanted and name in arrays and structure.in_function(i):
            element, alignment = arrays[name]
            if alignment < wanted:
                message = (
                    f"array '{name}' of {element} promises {alignment} bytes of alignment, "
                    f"{stream.at(close - 2)} needs {wanted}: declare it alignas({wanted})"
                )
                yield stream.position(operand), message


def _arrays(stream: TokenStream) -> dict[str, tuple[str, int]]:
    """Maps array names to (element type, alignment). If arrays share a name, the smallest alignment counts."""
    arrays: dict[str, tuple[str, int]] = {}
    for i, text in enumerate(stream.text):
        if text != "[" or stream.kind[i - 1] != "name" or stream.at(i - 2) not in ALIGNMENTS:
            continue
        start = stream.statement_start(i)
        end = stream.partner[i]
        while stream.at(end + 1) == "[":
            end = stream.partner[end + 1]
        if stream.at(end + 1) not in (";", "=", ",", "{") or "(" in _outside_alignas(stream, start, i):
            continue
        alignment = ALIGNMENTS[stream.at(i - 2)]
        if _ALIGNING.intersection(stream.text[start:i]):
            alignment = max(alignment, 16)
        name = stream.text[i - 1]
        if name not in arrays or arrays[name][1] > alignment:
            arrays[name] = stream.at(i - 2), alignment
    return arrays


def _outside_alignas(stream: TokenStream, start: int, end: int) -> list[str]:
    words, i = [], start
    while i < end:
        if stream.text[i] in ("alignas", "__attribute__"):
            i = stream.partner[i + 1]
        elif stream.text[i] == "[":
            i = stream.partner[i]
        else:
            words.append(stream.text[i])
        i += 1
    return words
