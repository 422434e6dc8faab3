"""Makes loops that may not end count steps, so that the runtime can stop an endless kernel.

A counted `for` loop does not count steps, because the call would prevent unrolling. In a counted loop, the counter
moves towards the bound it is compared with, and the body changes neither. A step known only at run time is checked
against zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..lexer import TokenStream
from ..structure import Structure
from .changes import Changes

_STEP = "::mslc::count_step(), "
_UP, _DOWN, _EXACT = ("<", "<="), (">",), "!="
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
_SIGNED = frozenset(("short", "int", "long", "int16_t", "int32_t", "int64_t", "ptrdiff_t"))
# A bound may be out of the range of these types: uchar i < 256.
_TINY = frozenset(("bool", "char", "uchar", "int8_t", "uint8_t"))


def rewrite_loops(stream: TokenStream, structure: Structure) -> None:
    changes = Changes(stream, structure)
    for i, text in enumerate(stream.text):
        if stream.at(i + 1) != "(":
            continue
        if text == "while":
            _count_condition(stream, i + 2, stream.partner[i + 1])
        elif text == "for":
            _rewrite_for(stream, changes, i + 1)


def _rewrite_for(stream: TokenStream, changes: Changes, opening: int) -> None:
    close = stream.partner[opening]
    separators = [i for i in _outer(stream, opening + 1, close) if stream.text[i] == ";"]
    if len(separators) != 2:
        return  # range-based
    first, second = separators
    if second == first + 1:
        stream.insert_after(first, "::mslc::count_step(), true")
    elif not _is_counted(stream, changes, (opening + 1, first), (first + 1, second), (second + 1, close)):
        _count_condition(stream, first + 1, second)


def _outer(stream: TokenStream, first: int, end: int) -> Iterator[int]:
    """Yields the tokens of first..end-1 outside of brackets, and the brackets themselves."""
    i = first
    while i < end:
        yield i
        i = stream.partner[i] if stream.text[i] in ("(", "[", "{") else i + 1


def _count_condition(stream: TokenStream, first: int, end: int) -> None:
    """Adds step counting to the condition in tokens first..end-1, which is an expression or a declaration."""
    assignment = next((i for i in _outer(stream, first, end) if stream.text[i] == "="), None)
    declares = (
        assignment is not None
        and assignment - first >= 2
        and stream.kind[assignment - 1] == "name"
        and (stream.kind[assignment - 2] == "name" or stream.text[assignment - 2] in ("*", "&", ">"))
        and stream.kind[first] == "name"
    )
    if assignment is not None and declares:
        stream.insert_after(assignment, f" ({_STEP.rstrip()}")
        stream.insert_before(end, ")")
    else:
        stream.insert_before(first, _STEP)


def _is_counted(
    stream: TokenStream, changes: Changes, start: tuple[int, int], condition: tuple[int, int], step: tuple[int, int]
) -> bool:
    words = [stream.text[i] for i in _outer(stream, *condition)]
    if "||" in words or "," in words or "?" in words:
        return False
    initial = stream.text[start[0] : start[1]]
    if _TINY.intersection(initial):
        return False
    for first, end in _increments(stream, step):
        counter, direction, amount = _movement(stream, first, end, initial)
        if not direction:
            continue
        allowed = {"up": _UP, "down": (*_DOWN, ">=") if _SIGNED.intersection(initial) else _DOWN}[direction]
        if end - first == 2 or (direction == "down" and not amount):
            allowed = (*allowed, _EXACT)  # a larger step could jump over the bound
        if any(
            _compares(stream, *part, counter, allowed) and not changes.in_loop(counter, start, part, step)
            for part in _split(stream, condition, "&&")
        ):
            if amount:
                stream.insert_before(amount, "::mslc::stride(")
                stream.insert_before(end, ")")
            return True
    return False


def _increments(stream: TokenStream, step: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Splits at commas outside of template arguments: `i += A<T, n>::k` is one increment."""
    first, depth = step[0], 0
    for part, end in _split(stream, step, ","):
        words = stream.text[part:end]
        depth += words.count("<") - words.count(">") - 2 * words.count(">>")
        if depth <= 0:
            yield first, end
            first, depth = end + 1, 0


def _split(stream: TokenStream, span: tuple[int, int], separator: str) -> list[tuple[int, int]]:
    parts, first = [], span[0]
    for i in _outer(stream, *span):
        if stream.text[i] == separator:
            parts.append((first, i))
            first = i + 1
    return [*parts, (first, span[1])]


def _movement(stream: TokenStream, first: int, end: int, initial: list[str]) -> tuple[str, str, int]:
    """Returns (counter, "up" or "down", first token of the amount or 0) of an increment, or "" for other
    expressions."""
    words = stream.text[first:end]
    if len(words) == 2 and ("++" in words or "--" in words):
        counter = words[1] if words[0] in ("++", "--") else words[0]
        return counter, "up" if "++" in words else "down", 0
    if len(words) < 3 or stream.kind[first] != "name":
        return "", "", 0
    operator = words[1]
    if operator in ("+=", "-="):
        return words[0], "up" if operator == "+=" else "down", first + 2
    halves = words[1:3] == [">", ">="] or (operator == "/=" and words[2] not in ("0", "1"))
    if halves and words[-1] != "0":
        return words[0], "down", 0
    doubles = (operator == "<<=" and words[2:] != ["0"]) or (operator == "*=" and words[2] not in ("0", "1"))
    if doubles and "=" in initial and initial[-1].isdigit() and initial[-1] != "0":
        return words[0], "up", 0
    return "", "", 0


def _compares(stream: TokenStream, first: int, end: int, counter: str, allowed: tuple[str, ...]) -> bool:
    """Tells if tokens first..end-1 compare the bare counter by an operator in `allowed`, with the counter on the
    left."""
    words = stream.text[first:end]
    if len(words) < 3:
        return False
    if words[0] == counter:
        return words[1] in allowed
    return words[-1] == counter and _MIRRORED.get(words[-2], "") in allowed
