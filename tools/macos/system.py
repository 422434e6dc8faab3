"""Collects macOS's exports from released binaries, and writes the headers and linker stubs that a build needs."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import macho
import released

LIBCXX = "/usr/lib/libc++.1.dylib"
LIBOBJC = "/usr/lib/libobjc.A.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"

# No witness imports these, but they are older than macOS on arm64. The linker itself adds dyld_stub_binder.
_STRING = "__ZNSt3__112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEE"
OLDER_THAN_ARM64 = {
    LIBCXX: {f"{_STRING}21__grow_by_and_replaceEmmmmmmPKc"},
    LIBSYSTEM: {"dyld_stub_binder", "_dispatch_apply_f"},
}

CXX_RUNTIME = re.compile(r"__Z(?:n|d)[wal]|__Z(?:TI|TS|TV|NSt|NKSt|St)|___(?:cxa|gxx)_")

# Replacements for the Apple headers that metal-cpp includes.
HEADERS = {
    "CoreFoundation/CoreFoundation.h": "#include <TargetConditionals.h>\n#include <stdint.h>\n"
    "typedef double CFTimeInterval;\n",
    "IOSurface/IOSurfaceRef.h": "typedef struct __IOSurface* IOSurfaceRef;\n",
}


@cache
def exported_by_system() -> dict[str, frozenset[str]]:
    """Maps install names to the symbols that binaries for macOS 14 or older import from them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for folder in (released.mlx(), released.witnesses()):
        for path in released.binaries(folder):
            binary = macho.read(path)
            if binary.minimum_os[:2] <= released.TARGET:
                for symbol, library in binary.imports.items():
                    found[library].add(symbol)
    # A module may replace functions of the C++ runtime such as operator new, so those are not bound to a library.
    found[LIBCXX] |= {symbol for symbol in found.pop(macho.ANY_LIBRARY) if CXX_RUNTIME.match(symbol)}
    for library, symbols in OLDER_THAN_ARM64.items():
        found[library] |= symbols
    return {library: frozenset(symbols) for library, symbols in found.items()}


def write_linker_stubs(folder: Path) -> None:
    """Writes text stubs (.tbd) of the system's libraries that export only the known symbols."""
    exports = exported_by_system()
    for name in (LIBCXX, LIBOBJC, LIBSYSTEM):
        listed = ", ".join(f"'{symbol}'" for symbol in sorted(exports[name]))
        text = (
            "--- !tapi-tbd\n"
            "tbd-version:     4\n"
            "targets:         [ arm64-macos ]\n"
            f"install-name:    '{name}'\n"
            "exports:\n"
            f"  - targets:     [ arm64-macos ]\n    symbols:     [ {listed} ]\n"
            "...\n"
        )
        released.write((folder / Path(name).name).with_suffix(".tbd"), text)


def write_headers(folder: Path) -> None:
    for name, text in HEADERS.items():
        released.write(folder / name, f"#pragma once\n{text}")
