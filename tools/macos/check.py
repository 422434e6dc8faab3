"""Checks a macOS build without a Mac: would its module load beside MLX on macOS 14, and find every symbol?"""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import macho
import released
import system

LIBMLX = "@rpath/libmlx.dylib"
LIBRARIES = {LIBMLX, system.LIBCXX, system.LIBOBJC, system.LIBSYSTEM}
RUN_PATH = "@loader_path/../mlx/lib"
INIT = "_PyInit__ext"
METAL_DEVICE = "__ZN3mlx4core5metal6deviceENS0_6DeviceE"  # launch_metal.cpp always uses it
_NANOBIND_TAG = re.compile(rb"nanobind_\w+_v\d+\w*")


@dataclass(frozen=True)
class Exports:
    """The symbols that a module may import, by library."""

    mlx: frozenset[str]
    system: dict[str, frozenset[str]]

    @classmethod
    def of_macos(cls) -> "Exports":
        return cls(macho.read(released.mlx() / "lib" / "libmlx.dylib").exports, system.exported_by_system())


def nanobind_tag(path: Path) -> str:
    """Returns nanobind's ABI tag in a module. Modules with the same tag can exchange types."""
    tags = sorted(set(_NANOBIND_TAG.findall(path.read_bytes())))
    return b", ".join(tags).decode() or "none"


def is_of_python(symbol: str) -> bool:
    return symbol.startswith(("_Py", "__Py"))


def wrong_import(symbol: str, library: str, exports: Exports) -> str | None:
    """Returns the problem with one import, or None if the library exports the symbol."""
    if is_of_python(symbol):
        # CPython's C API is the same on every platform, so this interpreter serves as reference.
        return None if hasattr(ctypes.pythonapi, symbol[1:]) else f"{symbol}: CPython does not export it"
    if library == LIBMLX:
        return None if symbol in exports.mlx else f"{symbol}: libmlx.dylib does not export it"
    if library == macho.ANY_LIBRARY:
        library = system.LIBCXX
    if symbol in exports.system.get(library, frozenset()):
        return None
    return f"{symbol}: not known to be in {library} of macOS {released.TARGET[0]}, may be newer"


def problems(module: macho.Binary, exports: Exports) -> list[str]:
    """Lists everything that would prevent the module from loading, or from sharing MLX's types."""
    found = [
        problem
        for symbol, library in sorted(module.imports.items())
        if (problem := wrong_import(symbol, library, exports))
    ]
    if module.platform != "MACOS" or module.minimum_os[:2] != released.TARGET:
        found.append(f"made for {module.platform} {module.minimum_os}, not for MACOS {released.TARGET}")
    if module.exports != {INIT}:
        found.append(f"exports {', '.join(sorted(module.exports)) or 'nothing'}; it should export {INIT} alone")
    if unknown := set(module.libraries) - LIBRARIES:
        found.append(f"loads {', '.join(sorted(unknown))}")
    if module.run_paths != (RUN_PATH,):
        found.append(f"looks for libmlx in {module.run_paths}, not in {RUN_PATH}")
    if METAL_DEVICE not in module.imports:
        found.append("has no Metal backend: mlx::core::metal::device is not called")
    core = next(released.mlx().glob("core*.so"))
    if (ours := nanobind_tag(module.path)) != (theirs := nanobind_tag(core)):
        found.append(f"nanobind's ABI tag is {ours}; that of mlx.core is {theirs}")
    return found
