"""Turns clang's LLVM IR of a kernel into SPIR-V that Mesa accepts."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from .agx_bfloat import without_bfloat
from .toolchain import require, run_tool

TARGET = ["--target=spirv64-unknown-unknown", "-O2"]
_FROM_IR = ["clang", "-x", "ir", *TARGET, "-fno-vectorize", "-fno-slp-vectorize", "-Wno-everything"]
_CAST = re.compile(r"  (%[\w.$-]+) = addrspacecast (ptr(?: addrspace\(\d\))?) (%[\w.$-]+) to ptr addrspace\(4\)")
_GENERIC = r"ptr addrspace\(4\) (?P<pointer>%[\w.$-]+)"
_ADDRESS = re.compile(rf"  (?P<result>%[\w.$-]+) = getelementptr [^%]*{_GENERIC}(?P<rest>,.*)")
_ACCESS = re.compile(rf"  (?:%[\w.$-]+ = load [^%]*|store .*, ){_GENERIC}(?P<rest>,.*)")
_NAME = re.compile(r"%[\w.$-]+")
_FUNCTION = re.compile(r"^define .*?^\}$", re.MULTILINE | re.DOTALL)
_REVERSAL = re.compile(
    r"^  %([\w.$-]+) = (?:tail )?call i(\d) @llvm\.bitreverse\.i\d\(i\d (%[\w.$-]+)\).*$", re.MULTILINE
)
_SINGLE = re.compile(r"<1 x ([\w.]+)>")
_FROM_SINGLE = re.compile(
    r"^  (?P<result>%[\w.$-]+) = (?:shufflevector <1 x (?P<type>[\w.]+)> (?P<value>%[\w.$-]+), [^,]*, "
    r"<(?P<size>\d+) x i32> zeroinitializer"
    r"|extractelement <1 x (?P<taken>[\w.]+)> (?P<from>%[\w.$-]+), i\d+ 0"
    r"|insertelement <1 x (?P<given>[\w.]+)> poison, [\w.]+ (?P<number>%[\w.$-]+), i\d+ 0)$",
    re.MULTILINE,
)
_VARIABLE, _WORKGROUP = 59, 4  # OpVariable, and a storage class


def write_spirv(code: str, path: Path) -> None:
    """Optimises a module and writes it as SPIR-V."""
    # `constant` is clang's space of its own, which converts freely. OpenCL's lets Mesa move the loads. And without the
    # named metadata LLVM forbids multiplications and additions to be fused.
    code = code.replace("addrspace(6)", "addrspace(2)") + "\n!opencl.enable.FP_CONTRACT = !{}\n"
    before, after = path.with_suffix(".in.ll"), path.with_suffix(".ll")
    before.write_text(without_bfloat(code), encoding="utf-8")
    require(run_tool([*_FROM_IR, "-S", "-emit-llvm", str(before), "-o", str(after)]), "optimising for SPIR-V")
    optimised = without_single_vectors(without_reversals(after.read_text(encoding="utf-8")))
    after.write_text(_FUNCTION.sub(_without_casts, optimised), encoding="utf-8")
    no_passes = ["-Xclang", "-disable-llvm-passes"]
    require(run_tool([*_FROM_IR, *no_passes, "-c", str(after), "-o", str(path)]), "compiling to SPIR-V")
    path.write_bytes(_without_initial_values(path.read_bytes()))


def without_reversals(code: str) -> str:
    return _REVERSAL.sub(_reversal, code)


def _reversal(found: re.Match[str]) -> str:
    """The bits of a small number in reverse order, one by one: OpenCL's SPIR-V cannot say it at once."""
    result, size, value = found[1], int(found[2]), found[3]
    kind, lines, total = f"i{size}", [], "0"
    for bit in range(size):
        low, one, high, sum_ = (f"%mslc.{result}.{part}{bit}" for part in ("low", "one", "high", "sum"))
        target = sum_ if bit < size - 1 else f"%{result}"
        lines += [f"  {low} = lshr {kind} {value}, {bit}", f"  {one} = and {kind} {low}, 1"]
        lines += [f"  {high} = shl {kind} {one}, {size - 1 - bit}", f"  {target} = or {kind} {total}, {high}"]
        total = target
    return "\n".join(lines)


def without_single_vectors(code: str) -> str:
    """Replaces vectors of one element, which LLVM makes of loads that it repeats and SPIR-V does not have."""
    return _SINGLE.sub(r"\1", _FROM_SINGLE.sub(_from_single, code)) if "<1 x " in code else code


def _from_single(found: re.Match[str]) -> str:
    if not found["type"]:
        kind, value = found["taken"] or found["given"], found["from"] or found["number"]
        return f"  {found['result']} = bitcast {kind} {value} to {kind}"
    lines, vector, before, size = [], f"<{found['size']} x {found['type']}>", "poison", int(found["size"])
    for i in range(size):
        name = f"%mslc.{found['result'][1:]}.{i}" if i < size - 1 else found["result"]
        lines.append(f"  {name} = insertelement {vector} {before}, {found['type']} {found['value']}, i64 {i}")
        before = name
    return "\n".join(lines)


def _without_casts(function: re.Match[str]) -> str:
    """Replaces generic pointers by those that they are cast from, where all that is done with them is to load and
    store.

    SPIR-V has no generic pointers to `constant` memory, from which structs are copied. To others it has, but Mesa keeps
    no array in registers that it sees through one.
    """
    lines = function[0].split("\n")
    types: dict[str, str] = {}  # of what replaces a generic pointer
    uses: dict[str, list[str]] = {}  # the lines that name it, without its definition
    for line in lines:
        if found := _CAST.fullmatch(line):
            types[found[1]] = found[2]
        elif (found := _ADDRESS.fullmatch(line)) and found["pointer"] in types:
            types[found["result"]] = types[found["pointer"]]
        for name in _NAME.findall(line.partition(" = ")[2] or line):
            uses.setdefault(name, []).append(line)

    def is_replaceable(pointer: str) -> bool:
        for line in uses.get(pointer, []):
            found = _ADDRESS.fullmatch(line) or _ACCESS.fullmatch(line)
            if not found or found["pointer"] != pointer or found.groupdict().get("result", pointer) not in types:
                return False
        return True

    while kept := [pointer for pointer in types if not is_replaceable(pointer)]:
        for pointer in kept:
            _forget(pointer, types, lines)
    return "\n".join(_without_cast(line, types) for line in lines)


def _forget(pointer: str, types: dict[str, str], lines: list[str]) -> None:
    """Leaves a pointer as it is, and all that it is computed from or that is computed from it."""
    pending = {pointer}
    while pending:
        pointer = pending.pop()
        types.pop(pointer, None)
        for line in lines:
            if found := _ADDRESS.fullmatch(line):
                pair = {found["result"], found["pointer"]}
                if pointer in pair:
                    pending |= pair & types.keys()


def _without_cast(line: str, types: dict[str, str]) -> str:
    if found := _CAST.fullmatch(line):
        result, type_name, source = found.groups()
        return f"  {result} = getelementptr i8, {type_name} {source}, i64 0" if result in types else line
    found = _ADDRESS.fullmatch(line) or _ACCESS.fullmatch(line)
    if found and found["pointer"] in types:
        start = found.start("pointer") - len("ptr addrspace(4) ")
        return line[:start] + f"{types[found['pointer']]} {found['pointer']}" + found["rest"]
    return line


def _without_initial_values(module: bytes) -> bytes:
    """Removes those of threadgroup variables: LLVM needs one, undefined, and Mesa allows none."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    kept, i = list(words[:5]), 5
    while i < len(words):
        length, operation = words[i] >> 16, words[i] & 0xFFFF
        instruction = list(words[i : i + length])
        if operation == _VARIABLE and length == 5 and instruction[3] == _WORKGROUP:
            instruction = [4 << 16 | _VARIABLE, *instruction[1:4]]
        kept += instruction
        i += length
    return struct.pack(f"<{len(kept)}I", *kept)
