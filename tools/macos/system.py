"""What macOS exports, as far as released binaries show; and the files that a compiler and a linker want of it."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import macho
import released

LIBCXX = "/usr/lib/libc++.1.dylib"
LIBOBJC = "/usr/lib/libobjc.A.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"

# No witness imports these, but they are older than macOS on arm64. dyld_stub_binder is what a linker adds itself.
_STRING = "__ZNSt3__112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEE"
OLDER_THAN_ARM64 = {
    LIBCXX: {f"{_STRING}21__grow_by_and_replaceEmmmmmmPKc"},
    LIBSYSTEM: {"dyld_stub_binder", "_dispatch_apply_f"},
}

CXX_RUNTIME = re.compile(r"__Z(?:n|d)[wal]|__Z(?:TI|TS|TV|NSt|NKSt|St)|___(?:cxa|gxx)_")

# What metal-cpp wants of Apple's headers, in place of them.
HEADERS = {
    "CoreFoundation/CoreFoundation.h": "#include <TargetConditionals.h>\n#include <stdint.h>\n"
    "typedef double CFTimeInterval;\n",
    "IOSurface/IOSurfaceRef.h": "typedef struct __IOSurface* IOSurfaceRef;\n",
}


@cache
def exported_by_system() -> dict[str, frozenset[str]]:
    """Install name to the symbols that binaries for macOS 14 or older import from it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for folder in (released.mlx(), released.witnesses()):
        for path in released.binaries(folder):
            binary = macho.read(path)
            if binary.minimum_os[:2] <= released.TARGET:
                for symbol, library in binary.imports.items():
                    found[library].add(symbol)
    # A module may replace the C++ runtime's own functions (operator new, say), so they are bound to no one library.
    found[LIBCXX] |= {symbol for symbol in found.pop(macho.ANY_LIBRARY) if CXX_RUNTIME.match(symbol)}
    for library, symbols in OLDER_THAN_ARM64.items():
        found[library] |= symbols
    return {library: frozenset(symbols) for library, symbols in found.items()}


def write_linker_stubs(folder: Path) -> None:
    """Text stubs (.tbd) of the system's libraries that export what is known of them, and no more."""
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
