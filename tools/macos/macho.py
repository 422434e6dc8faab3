"""Reads the parts of a Mach-O file that the checks need, with LIEF."""

from dataclasses import dataclass
from pathlib import Path

try:
    import lief
except ModuleNotFoundError as error:  # tools/macos runs without the package
    raise SystemExit("Error: the macOS checks need LIEF: pip install lief") from error

ARM64 = lief.MachO.Header.CPU_TYPE.ARM64
OWN_NAME = lief.MachO.LoadCommand.TYPE.ID_DYLIB
# Stands for special library ordinals: such imports bind to any image that is loaded with the module.
ANY_LIBRARY = "any"


@dataclass(frozen=True)
class Binary:
    path: Path
    imports: dict[str, str]  # symbol: install name of its library, or ANY_LIBRARY
    exports: frozenset[str]
    libraries: tuple[str, ...]
    run_paths: tuple[str, ...]
    platform: str
    minimum_os: tuple[int, ...]


def read(path: Path) -> Binary:
    """Reads the arm64 part of a file."""
    parsed = lief.MachO.parse(str(path))
    images = [image for image in parsed or () if image.header.cpu_type == ARM64]
    if not images:
        raise SystemExit(f"{path} has no arm64 code")
    image = images[0]
    # LIEF lists a library's own name among the libraries it loads, but ordinals do not count it.
    loaded = [library for library in image.libraries if library.command != OWN_NAME]
    libraries = tuple(library.name for library in loaded)
    return Binary(
        path=path,
        imports={symbol.name: _library(symbol.library_ordinal, libraries) for symbol in image.imported_symbols},
        exports=frozenset(symbol.name for symbol in image.exported_symbols),
        libraries=libraries,
        run_paths=tuple(command.path for command in image.rpaths),
        platform=image.build_version.platform.name if image.has_build_version else "unknown",
        minimum_os=tuple(image.build_version.minos) if image.has_build_version else (),
    )


def _library(ordinal: int, libraries: tuple[str, ...]) -> str:
    return libraries[ordinal - 1] if 0 < ordinal <= len(libraries) else ANY_LIBRARY
