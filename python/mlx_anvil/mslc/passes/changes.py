"""Decides from the text if a loop may change the operands of its condition."""

from __future__ import annotations

from functools import cached_property

from ..lexer import TokenStream
from ..structure import FUNCTION, Structure

Span = tuple[int, int]  # tokens first..end-1

_ASSIGNMENTS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", "++", "--"))
_NOT_A_TYPE = frozenset(("return", "else", "do", "case", "goto", "sizeof", "throw"))
_OPERANDS = frozenset((")", "]"))


class Changes:
    def __init__(self, stream: TokenStream, structure: Structure):
        self._stream = stream
        self._structure = structure

    def in_loop(self, counter: str, start: Span, condition: Span, step: Span) -> bool:
        """Tells if a loop's body may set its counter, or its body or step what the counter is compared with."""
        body = (step[1] + 1, _statement_end(self._stream, step[1] + 1))
        if not self._declares(counter, start):
            # A counter declared outside the loop may have an alias, through which the body could set it unnoticed.
            function = self._function_start(step[1])
            if self._has_alias(counter, (function, start[0])) or self._has_alias(counter, body):
                return True
        if self._may_set(counter, body):
            return True
        stream = self._stream
        bounds = {
            stream.text[i]
            for i in range(*condition)
            if stream.kind[i] == "name" and stream.text[i] != counter and stream.at(i - 1) not in (".", "->")
        }
        return any(self._may_set(name, span) for name in bounds for span in (body, step))

    def _declares(self, name: str, start: Span) -> bool:
        stream = self._stream
        return any(
            stream.text[i] == name and (stream.kind[i - 1] == "name" or stream.text[i - 1] in (",", ">"))
            for i in range(start[0] + 1, start[1])
        )

    def _function_start(self, i: int) -> int:
        brace = self._structure.enclosing[i]
        start = brace
        while brace >= 0:
            if self._structure.kind[brace] == FUNCTION:
                start = brace
            brace = self._structure.enclosing[brace]
        return start

    def _may_set(self, name: str, span: Span) -> bool:
        return any(self._is_assigned(i) or self._gets_alias(i) or self._is_handed_on(i) for i in self._uses(name, span))

    def _has_alias(self, name: str, span: Span) -> bool:
        stream = self._stream
        captures = any(
            stream.text[i] == "[" and stream.at(i + 1) == "&" and stream.at(i + 2) in ("]", ",", name)
            for i in range(*span)
        )
        return captures or any(self._gets_alias(i) or self._is_handed_on(i) for i in self._uses(name, span))

    def _uses(self, name: str, span: Span) -> list[int]:
        stream = self._stream
        return [i for i in range(*span) if stream.text[i] == name and stream.at(i - 1) not in (".", "->", "::")]

    def _is_assigned(self, i: int) -> bool:
        """Tells if the name at i is assigned: i = 0, ++i, i[1].x += 2; not `int i = 0`, which is another variable."""
        stream = self._stream
        if stream.at(i - 1) in ("++", "--"):
            return True
        if stream.kind[i - 1 : i] == ["name"] and stream.at(i - 1) not in _NOT_A_TYPE:
            return False
        after = i + 1
        while stream.at(after) in ("[", ".", "->"):
            after = stream.partner[after] + 1 if stream.at(after) == "[" else after + 2
        # The lexer splits >>= because >> may close two template lists.
        return stream.at(after) in _ASSIGNMENTS or (stream.at(after) == ">" and stream.at(after + 1) == ">=")

    def _gets_alias(self, i: int) -> bool:
        """Tells if the name at i gets an alias: &i, or `thread int& j = i`."""
        stream = self._stream
        before = stream.at(i - 1)
        if before == "&":
            return stream.kind[i - 2] not in ("name", "number") and stream.at(i - 2) not in _OPERANDS
        return before in ("=", "(", "{") and stream.at(i - 3) == "&" and stream.kind[i - 2] == "name"

    def _is_handed_on(self, i: int) -> bool:
        """Tells if the name at i is passed by reference: f(i)."""
        stream = self._stream
        if stream.at(i - 1) not in ("(", ",") or stream.at(i + 1) not in (",", ")"):
            return False
        opening = _opening(stream, i)
        return opening is not None and (_called(stream, opening), _place(stream, opening, i)) in self._setters

    @cached_property
    def _setters(self) -> frozenset[tuple[str, int]]:
        """The (function, parameter) pairs of references through which a function may change its argument."""
        stream = self._stream
        found = set()
        for i, text in enumerate(stream.text):
            if text != "&" or stream.kind[i + 1 : i + 2] != ["name"] or stream.at(i + 2) not in (",", ")", "="):
                continue
            opening = _opening(stream, i)
            if opening is None:
                continue
            first, end = _pieces(stream, opening)[_place(stream, opening, i)]
            words = stream.text[first:end]
            is_expression = self._structure.in_function(i) and "thread" not in words
            if not is_expression and "const" not in words and "constant" not in words:
                found.add((_called(stream, opening), _place(stream, opening, i)))
        return frozenset(found)


def _opening(stream: TokenStream, i: int) -> int | None:
    """Returns the parenthesis around token i, if it is the innermost bracket."""
    while i > 0:
        i -= 1
        text = stream.text[i]
        if text in (")", "]", "}"):
            i = stream.partner[i]
        elif text in ("(", "[", "{", ";"):
            return i if text == "(" else None
    return None


def _pieces(stream: TokenStream, opening: int) -> list[Span]:
    """Returns the comma-separated parts of a parenthesis."""
    pieces, i = [], opening + 1
    first, close = i, stream.partner[opening]
    while i < close:
        text = stream.text[i]
        if text in ("(", "[", "{"):
            i = stream.partner[i]
        elif text == "<":
            i = stream.close_angle(i) or i
        elif text == ",":
            pieces.append((first, i))
            first = i + 1
        i += 1
    return [*pieces, (first, close)]


def _place(stream: TokenStream, opening: int, i: int) -> int:
    """Returns the number of the part that contains token i."""
    return sum(end <= i for _, end in _pieces(stream, opening))


def _called(stream: TokenStream, opening: int) -> str:
    """Returns the name before a parenthesis and its template arguments. A lambda has the name of its variable."""
    i = opening - 1
    if stream.at(i) == "]":
        return stream.at(stream.partner[i] - 2)
    if stream.at(i) == ">":
        depth = 0
        while i > 0:
            depth += (stream.text[i] == ">") - (stream.text[i] == "<")
            if depth == 0:
                break
            i -= 1
        i -= 1
    return stream.at(i)


def _statement_end(stream: TokenStream, i: int) -> int:
    """Returns the token after the statement that begins at i."""
    while i < len(stream):
        text = stream.text[i]
        if text in ("(", "["):
            i = stream.partner[i]
        elif text in ("{", ";"):
            end = stream.partner[i] + 1 if text == "{" else i + 1
            if stream.at(end) != "else":
                return end
            i = end
        i += 1
    return i
