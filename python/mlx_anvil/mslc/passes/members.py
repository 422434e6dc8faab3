"""Member functions qualified with an address space.

Metal overloads members on the object's address space; upstream C++ cannot. This pass keeps the plain (or `thread`)
overload, which then accepts objects in every space, and drops the others. If there is no plain overload, the first one
loses its qualifier.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..lexer import TokenStream
from ..structure import Structure

_SPACES = frozenset(("device", "constant", "threadgroup", "thread"))
_AFTER = frozenset(("{", ";", ":", "noexcept", "->", "=", "override"))


def rewrite_members(stream: TokenStream, structure: Structure) -> None:
    variants: dict[tuple[int, str], list[tuple[str, int, int]]] = {}
    for space, close, after in _members(stream, structure):
        first = stream.statement_start(close)
        key = structure.enclosing[close], stream.joined(first, after - 1)
        variants.setdefault(key, []).append((space, first, after))
    for members in variants.values():
        if all(space in ("", "thread") for space, _, _ in members):
            continue
        members.sort(key=lambda member: member[0] not in ("", "thread"))
        space, _, qualifier = members[0]
        if space not in ("", "thread"):
            stream.erase(qualifier, qualifier)
        for _, first, after in members[1:]:
            stream.drop(first, _definition_end(stream, after))


def qualified_members(stream: TokenStream, structure: Structure) -> frozenset[tuple[str, str]]:
    """Returns (name, address space) of each qualified member. Operators have the name "operator"."""
    found = set()
    for space, close, _ in _members(stream, structure):
        declaration = stream.text[stream.statement_start(close) : stream.partner[close]]
        if space:
            found.add(("operator" if "operator" in declaration else declaration[-1], space))
    return frozenset(found)


def _members(stream: TokenStream, structure: Structure) -> Iterator[tuple[str, int, int]]:
    """Yields (address space or "", end of the parameters, position of the space) of the member functions."""
    for close in range(len(stream)):
        if stream.text[close] != ")" or not structure.in_class(close):
            continue
        after = close + 1
        while stream.at(after) in ("const", "volatile"):
            after += 1
        space = stream.at(after) if stream.at(after) in _SPACES else ""
        following = after + 1 if space else after
        if stream.at(following) not in _AFTER:
            continue
        yield space, close, after


def _definition_end(stream: TokenStream, i: int) -> int:
    """Returns the last token of a member function whose parameter list ends before i."""
    while stream.at(i) not in ("{", ";"):
        i = stream.partner[i] + 1 if stream.at(i) in ("(", "[") else i + 1
    return stream.partner[i] if stream.at(i) == "{" else i
