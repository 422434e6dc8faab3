"""Tokenises preprocessed Metal source and edits it. The edits keep track of the original positions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
      (?P<newline>\n)
    | (?P<directive>^[ \t]*\#[^\n]*)
    | (?P<space>[ \t\r\f\v]+|\\\n)
    | (?P<string>"(?:\\.|[^"\\\n])*")
    | (?P<character>'(?:\\.|[^'\\\n])+')
    | (?P<number>\.?\d(?:[eEpP][+-]|[\w.']|\.(?!\.))*)
    | (?P<name>[A-Za-z_]\w*)
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


@dataclass
class Token:
    kind: str
    text: str
    line: int  # 1-based, in the preprocessed text
    column: int
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


class TokenStream:
    """The tokens of one file. Rewriting passes index the significant tokens, as the author wrote them.

    `text[i]` is the i-th significant token; `partner[i]` is the index of its closing or opening bracket. Edits change
    neither, so passes do not depend on each other's output. `erased(i)` identifies erased tokens.
    """

    def __init__(self, source: str):
        self.tokens: list[Token] = []
        line, start = 1, 0
        for match in _TOKEN.finditer(source):
            kind = match.lastgroup or "operator"
            text = match.group()
            self.tokens.append(Token(kind, text, line, match.start() - start + 1))
            if "\n" in text:
                line += 1
                start = match.end()
        self._code = [t for t in self.tokens if t.kind not in _INSIGNIFICANT]
        self.text = [t.text for t in self._code]
        self.kind = [t.kind for t in self._code]
        self.partner: dict[int, int] = {}
        self._match_brackets()

    def __len__(self) -> int:
        return len(self.text)

    def _match_brackets(self) -> None:
        opened: list[int] = []
        for i, text in enumerate(self.text):
            if text in _PAIRS:
                opened.append(i)
            elif text in (")", "]", "}"):
                if not opened or _PAIRS[self.text[opened[-1]]] != text:
                    raise SourceError(f"unexpected '{text}'", self.position(i))
                self.partner[i] = opened[-1]
                self.partner[opened.pop()] = i
        if opened:
            raise SourceError(f"'{self.text[opened[-1]]}' is never closed", self.position(opened[-1]))

    def at(self, i: int) -> str:
        """Returns the text of token i, or "" outside the file."""
        return self.text[i] if 0 <= i < len(self.text) else ""

    def position(self, i: int) -> tuple[int, int]:
        return self._code[i].line, self._code[i].column

    def erased(self, i: int) -> bool:
        return self._code[i].erased

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
        self._code[i].output = text

    def insert_before(self, i: int, text: str) -> None:
        if not self._code[i].dropped:
            self._code[i].before += text

    def insert_after(self, i: int, text: str) -> None:
        if not self._code[i].dropped:
            self._code[i].after += text

    def drop(self, first: int, last: int) -> None:
        """Removes code permanently. Insertions by other passes there are removed too."""
        self.erase(first, last)
        for token in self._code[first : last + 1]:
            token.dropped = True

    def erase(self, first: int, last: int) -> None:
        for token in self._code[first : last + 1]:
            token.erased = True

    def render(self) -> tuple[str, PositionMap]:
        parts: list[str] = []
        positions = PositionMap()
        column: int = 1
        shift: int | None = 0  # current column difference; None after inserted text
        for token in self.tokens:
            if token.kind == "newline":
                parts.append("\n")
                column, shift = 1, 0
                continue
            if token.before:
                positions.add(token.line, column, token.column, True)
                parts.append(token.before)
                column += len(token.before)
                shift = None
            text = token.text if token.output is None else token.output
            if token.erased:
                text = " "
            if column - token.column != shift:
                positions.add(token.line, column, token.column, False)
                shift = column - token.column
            parts.append(text)
            column += len(text)
            if token.after:
                positions.add(token.line, column, token.column, True)
                parts.append(token.after)
                column += len(token.after)
                shift = None
        return "".join(parts), positions


_ACCESS = frozenset(("public", "private", "protected", "default"))
