"""Tokenises preprocessed Metal source and edits it. The edits keep track of the original positions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
      (?P<name>[A-Za-z_]\w*)
    | (?P<newline>\n)
    | (?P<directive>^[ \t]*\#[^\n]*)
    | (?P<space>[ \t\r\f\v]+|\\\n)
    | (?P<string>"(?:\\.|[^"\\\n])*")
    | (?P<character>'(?:\\.|[^'\\\n])+')
    | (?P<number>\.?\d(?:[eEpP][+-]|[\w.']|\.(?!\.))*)
    | (?P<operator>::|->\*?|<<=|<=>|<<|&&|\|\||[-+*/%&|^=!<>]=|\+\+|--|\.\.\.|.)
    """,
    re.VERBOSE | re.MULTILINE,
)
_INSIGNIFICANT = frozenset(("newline", "directive", "space"))
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def significant_tokens(line: str) -> list[tuple[int, str]]:
    """Returns (column, text) of the tokens in one line."""
    return [(m.start() + 1, m.group()) for m in _TOKEN.finditer(line) if m.lastgroup not in _INSIGNIFICANT]


class SourceError(Exception):
    """The source is not Metal that mslc understands. `position` is a (line, column) in the preprocessed text."""

    def __init__(self, message: str, position: tuple[int, int]):
        super().__init__(message)
        self.message = message
        self.position = position


class Token(NamedTuple):
    kind: str
    text: str
    line: int  # 1-based, in the preprocessed text
    column: int


@dataclass
class _Edit:
    """What happens to one token."""

    before: str = ""  # inserted text
    after: str = ""
    output: str | None = None  # replacement text; None leaves the token unchanged
    erased: bool = False
    dropped: bool = False


@dataclass
class PositionMap:
    """Maps columns of the edited text to the original ones, line by line. Edits never add or remove a line break."""

    lines: dict[int, list[tuple[int, int, bool]]] = field(default_factory=dict)
    # line: [(first new column, old column, True if the columns from there on were inserted)]

    def add(self, line: int, new: int, old: int, inserted: bool) -> None:
        self.lines.setdefault(line, []).append((new, old, inserted))

    def original_column(self, line: int, column: int) -> int:
        new, old, inserted = 1, 1, False
        for segment in self.lines.get(line, ()):
            if segment[0] > column:
                break
            new, old, inserted = segment
        return old if inserted else old + column - new


@dataclass(frozen=True)
class _Scanned:
    """A file as the author wrote it. `code` has the indices of the significant tokens, which the other fields list."""

    tokens: list[Token]
    code: list[int]
    text: list[str]
    kind: list[str]
    partner: dict[int, int]


@lru_cache(maxsize=2)  # one check reads the same text several times
def _scan(source: str) -> _Scanned:
    tokens: list[Token] = []
    line, start = 1, 0
    for match in _TOKEN.finditer(source):
        text = match.group()
        tokens.append(Token(match.lastgroup or "operator", text, line, match.start() - start + 1))
        if "\n" in text:
            line += 1
            start = match.end()
    code = [n for n, token in enumerate(tokens) if token.kind not in _INSIGNIFICANT]
    significant = [tokens[n] for n in code]
    partner = _partners(significant)
    return _Scanned(tokens, code, [t.text for t in significant], [t.kind for t in significant], partner)


def _partners(tokens: list[Token]) -> dict[int, int]:
    partner: dict[int, int] = {}
    opened: list[int] = []
    for i, token in enumerate(tokens):
        text = token.text
        if text in _PAIRS:
            opened.append(i)
        elif text in (")", "]", "}"):
            if not opened or _PAIRS[tokens[opened[-1]].text] != text:
                raise SourceError(f"unexpected '{text}'", (token.line, token.column))
            partner[i] = opened[-1]
            partner[opened.pop()] = i
    if opened:
        last = tokens[opened[-1]]
        raise SourceError(f"'{last.text}' is never closed", (last.line, last.column))
    return partner


class TokenStream:
    """The tokens of one file. Rewriting passes index the significant tokens, as the author wrote them.

    `text[i]` is the i-th significant token; `partner[i]` is the index of its closing or opening bracket. Edits change
    neither, so passes do not depend on each other's output. `erased(i)` identifies erased tokens.
    """

    def __init__(self, source: str):
        scanned = _scan(source)
        self.text, self.kind, self.partner = scanned.text, scanned.kind, scanned.partner
        self._tokens, self._code = scanned.tokens, scanned.code
        self._edits: dict[int, _Edit] = {}  # by the index of the significant token

    def __len__(self) -> int:
        return len(self.text)

    def at(self, i: int) -> str:
        """Returns the text of token i, or "" outside the file."""
        return self.text[i] if 0 <= i < len(self.text) else ""

    def position(self, i: int) -> tuple[int, int]:
        token = self._tokens[self._code[i]]
        return token.line, token.column

    def erased(self, i: int) -> bool:
        edit = self._edits.get(i)
        return edit is not None and edit.erased

    def joined(self, first: int, last: int) -> str:
        """Returns the source of tokens first..last as one line."""
        return " ".join(self.text[first : last + 1])

    def close_angle(self, i: int) -> int | None:
        """Returns the index of the '>' that closes the template list opened at i, or None if '<' is an operator."""
        depth = 0
        while i < len(self.text):
            text = self.text[i]
            if text in _PAIRS and text != "{":
                i = self.partner[i]
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return i
            elif text in (";", "{", "}", ")", "]", "&&", "||"):
                return None
            i += 1
        return None

    def statement_start(self, i: int) -> int:
        """Returns the first token of the declaration or statement that contains token i."""
        while i > 0:
            previous = self.text[i - 1]
            if previous in (")", "]"):
                i = self.partner[i - 1]
                continue
            if previous in (";", "{", "}") or (previous == ":" and self.at(i - 2) in _ACCESS):
                return i
            i -= 1
        return 0

    # ---- edits -----------------------------------------------------------------------------------

    def replace(self, i: int, text: str) -> None:
        self._edit(i).output = text

    def insert_before(self, i: int, text: str) -> None:
        edit = self._edit(i)
        if not edit.dropped:
            edit.before += text

    def insert_after(self, i: int, text: str) -> None:
        edit = self._edit(i)
        if not edit.dropped:
            edit.after += text

    def drop(self, first: int, last: int) -> None:
        """Removes code permanently. Insertions by other passes there are removed too."""
        self.erase(first, last)
        for i in range(first, min(last + 1, len(self))):
            self._edit(i).dropped = True

    def erase(self, first: int, last: int) -> None:
        for i in range(first, min(last + 1, len(self))):
            self._edit(i).erased = True

    def _edit(self, i: int) -> _Edit:
        index = range(len(self))[i]  # as a list takes an index: from the end, if it is negative
        return self._edits.setdefault(index, _Edit())

    def render(self) -> tuple[str, PositionMap]:
        edits = {self._code[i]: edit for i, edit in self._edits.items()}
        parts: list[str] = []
        positions = PositionMap()
        column: int = 1
        shift: int | None = 0  # current column difference; None after inserted text
        for n, token in enumerate(self._tokens):
            if token.kind == "newline":
                parts.append("\n")
                column, shift = 1, 0
                continue
            text, edit = token.text, edits.get(n)
            if edit:
                if edit.before:
                    positions.add(token.line, column, token.column, True)
                    parts.append(edit.before)
                    column += len(edit.before)
                    shift = None
                text = " " if edit.erased else token.text if edit.output is None else edit.output
            if column - token.column != shift:
                positions.add(token.line, column, token.column, False)
                shift = column - token.column
            parts.append(text)
            column += len(text)
            if edit and edit.after:
                positions.add(token.line, column, token.column, True)
                parts.append(edit.after)
                column += len(edit.after)
                shift = None
        return "".join(parts), positions


_ACCESS = frozenset(("public", "private", "protected", "default"))


def integer(literal: str) -> int:
    """The value of an integer literal; ValueError if it is none."""
    digits = literal.rstrip("uU")
    return int(digits, 8 if digits.isdigit() and digits.startswith("0") else 0)
