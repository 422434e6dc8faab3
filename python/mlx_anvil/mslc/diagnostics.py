"""Translates the compiler's messages into the names and positions of the author's source."""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .lexer import PositionMap, significant_tokens
from .preprocess import line_origins
from .toolchain import SHIM, STUBS

_MESSAGE = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):(?P<column>\d+): (?P<severity>fatal error|error|warning|note): (?P<text>.*)$"
)
_INCLUDED = re.compile(r"^In file included from (?P<file>.+?):(?P<line>\d+):$")
_VECTOR = re.compile(
    r"'?__attribute__\(\(__vector_size__\((\d) \* sizeof\((\w+)\)\)\)\) \w+'?|"
    r"(?:vec<([\w ]+), (\d)>|([\w ]+?) __attribute__\(\(ext_vector_type\((\d)\)\)\))"
)
_SPACE_MISMATCH = re.compile(
    r"object is in address space|reference in address space|object parameter of type '(?:const )?mslc::|"
    r"does not match adjusted type '(?:const )?(?:device|constant|threadgroup) "
)
_SPELLINGS = (
    (
        re.compile(r"declaration requires a global (constructor|destructor).*"),
        r"a variable outside functions needs a compile-time value and cannot have a \1",
    ),
    (re.compile(r"::mslc::cast|mslc::cast"), "static_cast"),
    (re.compile(r"(?:::)?mslc::as_type"), "as_type"),
    (re.compile(r"(?:::)?mslc::make<([^<>]*(?:<[^<>]*>)?)>"), r"\1"),
    (re.compile(r"\bmslc_any_vec<"), "vec<"),
    (re.compile(r"(?:::)?mslc::metal4::tensor_ops::"), "mpp::tensor_ops::"),
    (re.compile(r"(?:::)?mslc::metal4::"), "metal::"),
    (re.compile(r"(?:::)?mslc::PackedVector<(\w+), (\d)>"), r"packed_\1\2"),
    (re.compile(r"\b__global_host\b|\bconst __constant\b|\b__constant\b|\b__global_device\b"), "constant"),
    (re.compile(r"\b__global\b"), "device"),
    (re.compile(r"\b__local\b"), "threadgroup"),
    (re.compile(r"\b_Float16\b"), "half"),
    (re.compile(r"\b__bf16\b"), "bfloat"),
    (re.compile(r"'(half|bfloat)' \(aka '\1'\)"), r"'\1'"),
    (re.compile(r"\bunsigned int\b"), "uint"),
    (re.compile(r"\bunsigned short\b"), "ushort"),
    (re.compile(r"\bunsigned char\b"), "uchar"),
    (re.compile(r"\bunsigned long\b"), "ulong"),
)


@dataclass
class Diagnostic:
    """A compiler message with its position in the author's source. It prints in the format of compilers."""

    file: str
    line: int
    column: int
    severity: str
    message: str
    source_line: str = ""
    notes: list[Diagnostic] = field(default_factory=list)
    shim_lacks_space: bool = False  # a shim member was not found because the object has an address space

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}:{self.column}: {self.severity}: {self.message}"
        if self.source_line.strip():
            text += f"\n    {self.source_line.rstrip()}\n    {' ' * (self.column - 1)}^"
        return text


class CompileError(Exception):
    """The source does not compile. `diagnostics` lists the reasons."""

    def __init__(self, diagnostics: list[Diagnostic]):
        super().__init__("\n".join(str(d) for d in diagnostics))
        self.diagnostics = diagnostics


class SourceMap:
    """Maps positions in the rewritten text, which keeps the author's lines, to positions in the author's files."""

    def __init__(self, preprocessed: str, positions: PositionMap, sources: dict[str, str] | None = None):
        self._lines = ["", *preprocessed.split("\n")]
        self._origins = line_origins(preprocessed)
        self._positions = positions
        self._sources = {name: text.split("\n") for name, text in (sources or {}).items()}
        self._physical: dict[tuple[str, int], list[int]] = {}
        for number, origin in enumerate(self._origins):
            if self._lines[number].strip() if number < len(self._lines) else False:
                self._physical.setdefault(origin, []).append(number)

    def original(self, file: str, line: int, column: int) -> tuple[int, int]:
        """Returns (line, column) in the author's `file` for a position that the compiler reports."""
        candidates = self._physical.get((file, line))
        if not candidates:
            return line, column
        physical = candidates[0]
        return line, self._raw_column(file, line, physical, self._positions.original_column(physical, column))

    def of_preprocessed(self, line: int, column: int) -> tuple[str, int, int]:
        """Returns (file, line, column) for a position in the preprocessed text."""
        file, original = self.line_of_preprocessed(line)
        return file, original, self._raw_column(file, original, line, column) if original else 0

    def line_of_preprocessed(self, line: int) -> tuple[str, int]:
        """Returns (file, line) only, which avoids the cost of aligning two lines."""
        return self._origins[line] if line < len(self._origins) else ("", 0)

    def source_line(self, file: str, line: int) -> str:
        if file not in self._sources:
            try:
                with open(file, encoding="utf-8", errors="replace") as opened:
                    self._sources[file] = opened.read().split("\n")
            except OSError:
                self._sources[file] = []
        lines = self._sources[file]
        return lines[line - 1] if 0 < line <= len(lines) else ""

    def _raw_column(self, file: str, line: int, physical: int, column: int) -> int:
        """Reverts the preprocessor's column changes in one line by aligning its tokens with the author's."""
        raw = self.source_line(file, line)
        text = self._lines[physical] if physical < len(self._lines) else ""
        if not raw or raw == text:
            return column
        ours, theirs = significant_tokens(text), significant_tokens(raw)
        if not ours or not theirs:
            return min(column, len(raw.rstrip()) or 1)
        index = max(bisect.bisect_right([c for c, _ in ours], column) - 1, 0)
        matcher = difflib.SequenceMatcher(None, [t for _, t in ours], [t for _, t in theirs], autojunk=False)
        for tag, first, last, other, _other_last in matcher.get_opcodes():
            if first <= index < last:
                if tag == "equal":
                    start, name = theirs[other + index - first]
                    return start + min(max(column - ours[index][0], 0), len(name) - 1)
                return theirs[min(other, len(theirs) - 1)][0]  # the macro that expanded to this
        return column


def author_words(message: str) -> str:
    """Translates a compiler message into Metal's vocabulary."""
    message = _VECTOR.sub(_vector_name, message)
    for pattern, replacement in _SPELLINGS:
        message = pattern.sub(replacement, message)
    return re.sub(r"'([^']+)' \(aka '\1'\)", r"'\1'", message)


def _vector_name(match: re.Match) -> str:
    count, element = match.group(1), match.group(2)
    if element is None:
        element, count = (match.group(3), match.group(4)) if match.group(3) else (match.group(5), match.group(6))
    element = element.strip()
    prefix, _, scalar = element.rpartition(" ")
    if prefix in ("unsigned", "") or not prefix:
        scalar = {"_Float16": "half", "__bf16": "bfloat"}.get(scalar, scalar)
        return ("u" if prefix else "") + scalar + count
    return f"{prefix} {scalar}{count}"


def parse(stderr: str, source_map: SourceMap | None) -> list[Diagnostic]:
    """Parses the errors and warnings of a compiler run, each with its notes.

    An error inside the shim moves to the author's line that led there, and one in a stub header to its #include."""
    found: list[Diagnostic] = []
    includes = ("", 0)
    for text in stderr.splitlines():
        if included := _INCLUDED.match(text):
            includes = included["file"], int(included["line"])
        match = _MESSAGE.match(text)
        if not match:
            continue
        file, line, column = match["file"], int(match["line"]), int(match["column"])
        if file.startswith(str(STUBS)) and includes[1]:
            file, line, column = *includes, 1
        diagnostic = Diagnostic(
            file, line, column, match["severity"].replace("fatal ", ""), author_words(match["text"])
        )
        if source_map is not None and not _in_shim(file):
            diagnostic.line, diagnostic.column = source_map.original(file, line, column)
            diagnostic.source_line = source_map.source_line(file, line)
        if diagnostic.severity == "note" and found:
            found[-1].notes.append(diagnostic)
        else:
            found.append(diagnostic)
    for diagnostic in found:
        if _in_shim(diagnostic.file):
            note = next((n for n in diagnostic.notes if not _in_shim(n.file)), None)
            if note is not None:
                diagnostic.file, diagnostic.line, diagnostic.column = note.file, note.line, note.column
                diagnostic.source_line = note.source_line
        shim_notes = [note.message for note in diagnostic.notes if _in_shim(note.file)]
        diagnostic.shim_lacks_space = any(_SPACE_MISMATCH.search(text) for text in (diagnostic.message, *shim_notes))
        diagnostic.notes = [note for note in diagnostic.notes if not _in_shim(note.file)]
    return found


def _in_shim(file: str) -> bool:
    return file.startswith(str(SHIM)) or file.startswith("<")


def errors(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    return [d for d in diagnostics if d.severity == "error"]
