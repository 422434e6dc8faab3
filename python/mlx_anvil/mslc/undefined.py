"""Finds functions and variables that a source uses without a definition. The host may define them; Metal has no
host."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from .diagnostics import Diagnostic, SourceMap
from .line_table import LineTable

# Functions that the compiler calls implicitly or on behalf of the shim.
_MEMORY = ("memcpy", "memmove", "memset", "bcmp", "memcmp")
_MATHS = """
    acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh exp exp10 exp2 expm1 fabs fdim floor fma fmax fmaximum_num
    fmin fminimum_num fmod frexp hypot ilogb ldexp log log10 log1p log2 logb modf nearbyint nextafter pow remainder rint round
    roundeven scalbn sin sincos sinh sqrt tan tanh trunc
"""
_KNOWN = frozenset((*_MEMORY, *(name + suffix for name in _MATHS.split() for suffix in ("", "f"))))
_CONVERSIONS = frozenset(("__truncdfhf2", "__truncsfhf2", "__truncdfbf2", "__truncsfbf2", "__extendhfsf2"))
_OF_TOOLS = ("mslc_", "__tsan_", "__ubsan_handle_", "__aarch64_", "llvm.", "_GLOBAL_OFFSET_TABLE_")

_DECLARED = re.compile(r"^(?:declare [^@\n]*@|@)([\w.$]+)(?:\(| = external )", re.MULTILINE)
_SYMBOL = r"@\"?{}\"?(?![\w.$])[^\n]*!dbg !(\d+)"
_LOCATION = re.compile(r"!DILocation\(line: (\d+), column: (\d+), scope: !(\d+)")
_FILE = re.compile(r"\bfile: !(\d+)")
_FILE_NAME = re.compile(r'!DIFile\(filename: "([^"]*)"')


def _is_foreign(symbol: str) -> bool:
    return symbol not in _KNOWN and symbol not in _CONVERSIONS and not symbol.startswith(_OF_TOOLS)


def undefined_in_object(path: Path) -> set[str]:
    """Returns the undefined symbols of an object file, except those that mslc provides."""
    sections = LineTable(path).sections
    names = sections[".strtab"]
    found = set()
    for name, _info, _other, section, _value, _size in struct.iter_unpack("<IBBHQQ", sections[".symtab"]):
        if not section and name:
            found.add(names[name : names.index(b"\0", name)].decode())
    return {symbol for symbol in found if _is_foreign(symbol)}


def undefined_in_code(code: str) -> set[str]:
    """Returns the undefined symbols of LLVM IR, except those that mslc provides."""
    return {symbol for symbol in _DECLARED.findall(code) if _is_foreign(symbol)}


def undefined_uses(code: str, symbols: Collection[str], source_map: SourceMap) -> Iterator[Diagnostic]:
    """Yields an error for each place where IR with line tables refers to one of the symbols."""
    seen = set()
    for symbol in sorted(symbols):
        message = _message(symbol)
        for found in re.finditer(_SYMBOL.format(re.escape(symbol)), code):
            place = _place(code, found[1])
            if place is None or (message, place) in seen:
                continue
            seen.add((message, place))
            file, line, column = place
            line, column = source_map.original(file, line, column)
            yield Diagnostic(file, line, column, "error", message, source_map.source_line(file, line))


def _message(symbol: str) -> str:
    if symbol.startswith("__cxa_guard_"):
        return "a static variable of a function needs a compile-time value"
    if symbol.startswith(("_Zn", "_Zd")):
        return "Metal has no heap"
    return f"'{readable(symbol)}' is not defined: Metal has no functions or variables of the host"


def _place(code: str, number: str) -> tuple[str, int, int] | None:
    location = _LOCATION.search(_metadata(code, number))
    scope = _metadata(code, location[3]) if location else ""
    file = _FILE.search(scope)
    name = _FILE_NAME.search(_metadata(code, file[1])) if file else None
    return (name[1], int(location[1]), int(location[2])) if location and name else None


def _metadata(code: str, number: str) -> str:
    found = re.search(rf"^!{number} = .*$", code, re.MULTILINE)
    return found[0] if found else ""


def readable(symbol: str) -> str:
    """Demangles a symbol, without its parameters."""
    match = re.match(r"_ZN?[VK]*", symbol)
    if not match:
        return symbol
    at, names = match.end(), []
    while digits := re.match(r"\d+", symbol[at:]):
        first = at + digits.end()
        at = first + int(digits[0])
        names.append(symbol[first:at])
    return "::".join(names) or symbol
