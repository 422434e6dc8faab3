"""Attestation: checks that each spelling in Metal source is known to compile with Apple's compiler.

Every qualified name (metal::...), attribute, pragma and double-underscore word must appear, in exactly that spelling,
in one of these: the kernel headers of the installed mlx package, folders that the caller names, library.txt (Metal's
standard library, from its specification) or attested.txt (what else this project's kernels need). A spelling without
its namespace is only a hint: `as_type` does not attest `metal::as_type`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .diagnostics import Diagnostic, SourceMap
from .lexer import PositionMap
from .preprocess import Source, included_files

TABLE = Path(__file__).with_name("attested.txt")
LIBRARY = Path(__file__).with_name("library.txt")
SUFFIXES = frozenset((".metal", ".h", ".hpp", ".msl"))
_HEADERS = Path("include", "mlx", "backend", "metal", "kernels")

_IGNORED = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_PRAGMA = re.compile(r'^[ \t]*#[ \t]*pragma\b([^\n]*)|\b_Pragma\s*\(\s*"([^"]*)"\s*\)', re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?!pragma\b)[^\n]*", re.MULTILINE)
_LINE = re.compile(r'^[ \t]*#[ \t]*(?:line[ \t]+)?(\d+)(?:[ \t]+"([^"]*)")?')
# The library's nested namespaces are checked without a leading metal:: too.
_QUALIFIED = re.compile(r"\b(?:metal|fast|precise)(?:\s*::\s*\w+)+")
_RESERVED = re.compile(r"\b__\w+")
_OPENING = re.compile(r"\[\s*\[|\b__attribute__\s*\(\s*\(")
_NAME = re.compile(r"\s*((?:\w+\s*::\s*)*[A-Za-z_]\w*)\s*")
_BRACES = re.compile(r"([^\s{]*)\{([^}]*)\}(.*)", re.DOTALL)
_ONCE = "#pragma once"


@dataclass(frozen=True)
class Attested:
    """Spellings that are known to compile, and all words of the texts that they come from."""

    spellings: frozenset[str]
    words: frozenset[str]

    def knows(self, spelling: str) -> bool:
        return spelling in self.spellings or f"metal::{spelling}" in self.spellings

    def hint(self, spelling: str) -> str:
        """Says that the last word of an unknown spelling is known, if it is."""
        last = re.findall(r"\w+", spelling)[-1]
        return f"; '{last}' occurs there in another spelling" if last in self.words else ""


def attested(folders: Iterable[str | Path] = ()) -> Attested:
    """Collects the spellings of the installed mlx package, the tables and the given folders of Metal source."""
    known = [_tables(), *(_folder(Path(folder)) for folder in (*_mlx_headers(), *folders))]
    return Attested(
        frozenset().union(*(part.spellings for part in known)), frozenset().union(*(part.words for part in known))
    )


def unattested(source: Source, preprocessed: str, folders: Sequence[str | Path] = ()) -> list[Diagnostic]:
    """Finds every use of an unattested spelling in a file and the files it includes."""
    known = attested(folders)
    source_map = SourceMap(preprocessed, PositionMap(), {source.name: source.text})
    found = []
    for spelling, line, column in _positions(preprocessed, spellings(preprocessed)):
        if not known.knows(spelling):
            file, original, raw = source_map.of_preprocessed(line, column)
            text = source_map.source_line(file, original)
            found.append(_finding(spelling, known, file, original, raw, text))
    for name in (source.name, *included_files(preprocessed, source)):
        text = source.text if name == source.name else Path(name).read_text(encoding="utf-8", errors="replace")
        found += _unattested_macros(name, text, known)
    return found


def spellings(text: str) -> Iterator[tuple[str, int]]:
    """Yields (spelling, offset) for everything that needs an attestation in Metal source, preprocessed or not."""
    blank = _blanked(text)
    for match in _PRAGMA.finditer(_blanked(text, strings=False)):
        spelling = " ".join(f"#pragma {match[1] or match[2] or ''}".split())
        if spelling != _ONCE:
            yield spelling, match.start()
    blank = _PRAGMA.sub(lambda match: " " * len(match.group()), blank)
    for match in _QUALIFIED.finditer(blank):
        if not re.search(r"\w\s*::\s*$", blank[max(0, match.start() - 40) : match.start()]):
            yield re.sub(r"\s", "", match.group()), match.start()
    yield from _attributes(blank)
    for match in _RESERVED.finditer(blank):
        if match.group() != "__attribute__":
            yield match.group(), match.start()


def _attributes(text: str) -> Iterator[tuple[str, int]]:
    """Yields [[a]] and [[b]] for [[a, b(c)]]. __attribute__((a)) works the same way."""
    for match in _OPENING.finditer(text):
        form = "[[{}]]" if match.group().startswith("[") else "__attribute__(({}))"
        i = match.end()
        while name := _NAME.match(text, i):
            yield form.format(re.sub(r"\s", "", name[1])), name.start(1)
            i = _after_arguments(text, name.end())
            if text[i : i + 1] != ",":
                break
            i += 1


def _after_arguments(text: str, i: int) -> int:
    """Returns the end of an attribute whose optional arguments start at i."""
    depth = 0
    while i < len(text) and (depth or text[i] == "(" or text[i].isspace()):
        depth += (text[i] == "(") - (text[i] == ")")
        i += 1
    return i


def _blanked(text: str, strings: bool = True) -> str:
    """Blanks out comments, strings and line continuations; all other text keeps its place."""

    def blank(match: re.Match) -> str:
        if match.group().startswith('"') and not strings:
            return match.group()
        return re.sub(r"[^\n]", " ", match.group())

    return _IGNORED.sub(blank, text).replace("\\\n", "  ")


def _positions(text: str, found: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    for spelling, offset in sorted(found, key=lambda pair: pair[1]):
        yield spelling, text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def _unattested_macros(name: str, text: str, known: Attested) -> Iterator[Diagnostic]:
    """Checks double-underscore words in directives, which preprocessing removes. #line directives set the file."""
    file, line = name, 0
    for raw, content in zip(text.split("\n"), _IGNORED.sub(_keep_lines, text).split("\n"), strict=True):
        line += 1
        if moved := _LINE.match(raw):
            file, line = moved[2] or file, int(moved[1]) - 1
        elif _DIRECTIVE.match(content):
            for match in _RESERVED.finditer(content):
                if not known.knows(match.group()):
                    yield _finding(match.group(), known, file, line, match.start() + 1, raw)


def _keep_lines(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _finding(spelling: str, known: Attested, file: str, line: int, column: int, text: str) -> Diagnostic:
    message = f"'{spelling}' occurs in no Metal source that is known to compile{known.hint(spelling)}"
    return Diagnostic(file, line, column, "error", message, text)


@functools.cache
def _tables() -> Attested:
    known = {s for path in (TABLE, LIBRARY) for names in table(path).values() for s in names}
    return Attested(frozenset(known), frozenset(word for s in known for word in re.findall(r"\w+", s)))


def table(path: Path) -> dict[str, list[str]]:
    """Reads a table of spellings, grouped by the place where they were seen."""
    entries: dict[str, list[str]] = {}
    where = ""
    for line in path.read_text().splitlines():
        if line.startswith(" "):
            entries[where] += [s for item in line.split(",") if item.strip() for s in expanded(item.strip())]
        elif line and not line.startswith("#"):
            where = line
            entries.setdefault(where, [])
    return entries


def expanded(item: str) -> list[str]:
    """Expands braces: metal::{a b} is metal::a and metal::b; {a b}{2 3} is a2, a3, b2 and b3."""
    match = _BRACES.fullmatch(item)
    if not match:
        return [item]
    return [match[1] + word + rest for word in match[2].split() for rest in expanded(match[3])]


@functools.cache
def _folder(folder: Path) -> Attested:
    found: set[str] = set()
    words: set[str] = set()
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES:
            text = path.read_text(encoding="utf-8", errors="replace")
            found.update(spelling for spelling, _ in spellings(text))
            words.update(re.findall(r"\w+", _blanked(text)))
    return Attested(frozenset(found), frozenset(words))


def _mlx_headers() -> list[Path]:
    spec = importlib.util.find_spec("mlx")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [Path(root) / _HEADERS for root in roots if (Path(root) / _HEADERS).is_dir()]
