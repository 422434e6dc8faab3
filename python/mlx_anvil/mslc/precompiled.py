"""The shim as a precompiled header: to parse it takes clang longer than to parse most kernels."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from pathlib import Path

from .toolchain import SHIM, cache_directory, digest, fingerprint, is_whole, keep_with_digest, require, run_tool

_HEADER = str(SHIM / "mslc.h")
_UNUSED_FOR = 7 * 24 * 3600  # seconds, after which a precompiled shim is deleted
_OF_OUTPUT = ("-c", "-S", "-emit-llvm", "-fsyntax-only")


def include_shim(language: list[str], flags: list[str]) -> list[str]:
    """Returns the arguments that include the shim in a compilation with these flags."""
    kept = [flag for flag in flags if flag not in _OF_OUTPUT]
    if "-o" in kept:
        at = kept.index("-o")
        del kept[at : at + 2]
    path = _precompiled(cache_directory(), tuple(language), tuple(kept))
    if not path.exists():  # deleted while this process runs
        _precompiled.cache_clear()
        path = _precompiled(cache_directory(), tuple(language), tuple(kept))
    return ["-include-pch", str(path)]


@functools.cache
def _precompiled(directory: Path, language: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    path = directory / f"shim-{digest(fingerprint(), _HEADER, language, flags)}.pch"
    if is_whole(path):
        os.utime(path)
        return path
    _prune(directory)
    header = ["c++-header" if argument == "c++" else argument for argument in language]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, path.name)
        # Included, so that it is a system header. Without timestamps, because the contents are in the name.
        arguments = [
            "clang",
            *header,
            "-Xclang",
            "-fno-pch-timestamp",
            "-include",
            _HEADER,
            *flags,
            "-o",
            str(output),
            "-",
        ]
        require(run_tool(arguments, text=""), "compiling the shim")
        keep_with_digest(path, output.read_bytes())
    return path


def _prune(directory: Path) -> None:
    """Deletes precompiled shims of versions that are no longer in use."""
    oldest = time.time() - _UNUSED_FOR
    for path in directory.glob("shim-*.pch"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
                path.with_suffix(".digest").unlink()
        except OSError:
            pass  # deleted by another process
