"""Rewrites for the conformance check only, which make the compiler check types (shim/conformance.h)."""

from __future__ import annotations

from ..lexer import TokenStream
from ..structure import Structure
from .casts import operand_end

SPACES = frozenset(("thread", "device", "constant", "threadgroup", "threadgroup_imageblock", "ray_data", "object_data"))
_STATEMENTS = frozenset(("if", "for", "while", "switch"))


def rewrite_for_conformance(stream: TokenStream, structure: Structure) -> None:
    _assignments(stream, structure)
    _casts(stream)


def _assignments(stream: TokenStream, structure: Structure) -> None:
    """Wraps the left side of p = {a, b}, so that the compiler checks the type of p."""
    for i, text in enumerate(stream.text):
        if text != "=" or stream.at(i + 1) != "{" or not structure.in_function(i):
            continue
        first = _assigned(stream, i - 1)
        before = stream.at(first - 1)
        follows_condition = before == ")" and stream.at(stream.partner[first - 1] - 1) in _STATEMENTS
        if before in (";", "{", "}", "else", "do", ":") or follows_condition:
            stream.insert_before(first, "MSLC_LIST_ASSIGNED(")
            stream.insert_after(i - 1, ")")


def _casts(stream: TokenStream) -> None:
    """Wraps the operand p of (device T*)p and reinterpret_cast<device T*>(p), to check the address space it points
    to."""
    for i, text in enumerate(stream.text):
        close = stream.partner[i] if text == "(" else None
        if close is not None and _is_pointer(stream, i + 1, close) and _begins_operand(stream, close + 1):
            stream.insert_before(close + 1, f"::mslc::cast_from<{stream.joined(i + 1, close - 1)}>(")
            stream.insert_after(operand_end(stream, close + 1, set()), ")")
        elif text == "reinterpret_cast" and (end := stream.close_angle(i + 1)) and _is_pointer(stream, i + 2, end):
            stream.insert_after(end + 1, f"::mslc::cast_from<{stream.joined(i + 2, end - 1)}>(")
            stream.insert_before(stream.partner[end + 1], ")")


def _is_pointer(stream: TokenStream, first: int, end: int) -> bool:
    """Tells if tokens first..end-1 are a pointer type with an address space."""
    words = stream.text[first:end]
    return words[-1:] == ["*"] and bool(SPACES.intersection(words)) and "," not in words and "(" not in words


def _begins_operand(stream: TokenStream, i: int) -> bool:
    if stream.kind[i : i + 1] == ["name"]:
        return stream.text[i] not in SPACES and stream.text[i] not in ("const", "volatile", "noexcept")
    return stream.at(i) in ("(", "&")


def _assigned(stream: TokenStream, i: int) -> int:
    """Returns the first token of the postfix expression that ends at i, including a dereference."""
    while True:
        if stream.at(i) in (")", "]"):
            i = stream.partner[i]
            if stream.kind[i - 1 : i] == ["name"] or stream.at(i - 1) in (")", "]"):
                i -= 1
                continue
        if stream.at(i - 1) in (".", "->", "::"):
            i -= 2
        elif stream.at(i - 1) == "*" and stream.at(i - 2) in (";", "{", "}", ")", "else"):
            return i - 1
        else:
            return i
