"""The preprocessor: resolves #include and macros, and keeps line markers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .toolchain import STUBS, run_tool

# The macros that Apple's compiler defines for Metal 3.1, and __MSLC__. The stub headers are empty because the shim
# provides the library.
DEFINES = {
    "__MSLC__": "1",
    "__METAL__": "1",
    "__METAL_VERSION__": "310",
    "__METAL_MACOS__": "1",
    "__METAL_MAYBE_FAST_MATH__": "1",
    "__METAL_FAST_MATH__": "1",
    "__METAL_PRECISE_MATH__": "0",
    "__HAVE_BFLOAT__": "1",
    "METAL_FUNC": "METAL_FUNC",
}
UNDEFINED = "\0"  # value that removes a macro's definition

_LINE_MARKER = re.compile(r'^# (\d+) "((?:\\.|[^"\\])*)"', re.MULTILINE)
_ENTERED_FILE = re.compile(r'^# \d+ "((?:\\.|[^"\\])*)" 1(?: |$)', re.MULTILINE)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)\b[ \t]*(.*)$", re.MULTILINE)
_STANDARD = re.compile(r"<(metal_\w+|simd/simd\.h|MetalPerformancePrimitives/MetalPerformancePrimitives\.h)>")
_TENSORS_SINCE = 400


@dataclass(frozen=True)
class Source:
    """One translation unit. `name` is its name in messages."""

    text: str
    name: str = "kernel.metal"
    include_dirs: tuple[str, ...] = ()
    defines: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def load(
        cls, source: str | Path, include_dirs: Sequence[str | Path] = (), defines: Mapping[str, object] | None = None
    ) -> Source:
        """Loads a path, or wraps source text (any string with a line break)."""
        directories = tuple(str(d) for d in include_dirs)
        macros = tuple(sorted((name, str(value)) for name, value in (defines or {}).items()))
        if isinstance(source, Path) or "\n" not in source:
            path = Path(source)
            return cls(_text_of(path), str(path), (str(path.parent), *directories), macros)
        return cls(source, include_dirs=directories, defines=macros)

    def is_self_contained(self) -> bool:
        """Tells if preprocessing depends on this text alone."""
        return all(_STANDARD.fullmatch(name.strip()) for name in _INCLUDE.findall(self.text))


def _text_of(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode()
        at = data.find(b"\0")
    except UnicodeDecodeError as error:
        at = error.start
    if at >= 0:
        line, column = data.count(b"\n", 0, at) + 1, at - data.rfind(b"\n", 0, at)
        raise NotTextError(path, line, column, data[at])
    return text.replace("\r\n", "\n").replace("\r", "\n")


class NotTextError(ValueError):
    """A file is binary, such as a metallib, and not Metal source."""

    def __init__(self, path: Path, line: int, column: int, byte: int):
        super().__init__(
            f"{path}:{line}:{column}: error: byte 0x{byte:02x} is not text: a Metal source is a text file in UTF-8"
        )


class PreprocessorError(Exception):
    """Carries the compiler's messages, whose positions already refer to the author's files."""

    def __init__(self, stderr: str):
        super().__init__(stderr)
        self.stderr = stderr


def preprocess(source: Source) -> str:
    arguments = ["clang", "-E", "-x", "c++", "-std=c++20", "-nostdinc", "-U__clang__", "-Wno-everything"]
    defines = {**DEFINES, **dict(source.defines)}
    if _is_at_least(defines["__METAL_VERSION__"], _TENSORS_SINCE):
        defines.setdefault("__HAVE_TENSOR__", "1")
    arguments += [f"-D{name}={value}" for name, value in defines.items() if value != UNDEFINED]
    arguments += ["-I", str(STUBS)]
    for directory in source.include_dirs:
        arguments += ["-I", directory]
    escaped = source.name.replace("\\", "\\\\").replace('"', '\\"')
    # Preprocess a temporary file: the compiler searches the folder of the file, or the current folder for standard
    # input, for quoted headers before `include_dirs`.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "source.metal")
        path.write_text(f'# 1 "{escaped}"\n{source.text}', encoding="utf-8")
        result = run_tool([*arguments, str(path)])
    if result.returncode:
        raise PreprocessorError(result.stderr)
    return result.stdout.replace(str(path), "<stdin>")  # the cache key must not contain the path


def _is_at_least(version: str, least: int) -> bool:
    return version.isdigit() and int(version) >= least


def included_files(preprocessed: str, source: Source) -> list[str]:
    """Returns the files that the preprocessor read, except the source itself and the stub headers.

    Their line markers carry the flag 1. Markers from `#line` directives do not: text that is already preprocessed may
    name files that do not exist.
    """
    names = {unescape(name) for name in _ENTERED_FILE.findall(preprocessed)}
    stubs = str(STUBS)
    return sorted(n for n in names if not n.startswith(("<", stubs)) and n != source.name)


def unescape(name: str) -> str:
    return re.sub(r"\\(.)", r"\1", name)


def line_origins(preprocessed: str) -> list[tuple[str, int]]:
    """Returns (file, line) for every line of the preprocessed text, from index 1."""
    origins: list[tuple[str, int]] = [("", 0)]
    file, line = "", 1
    for text in preprocessed.split("\n"):
        marker = _LINE_MARKER.match(text)
        if marker:
            origins.append(("", 0))
            file, line = unescape(marker.group(2)), int(marker.group(1))
        else:
            origins.append((file, line))
            line += 1
    return origins
