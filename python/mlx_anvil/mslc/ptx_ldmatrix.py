"""Optimises loads of 8x8 matrices in PTX text: transposes on load, and merges four `ldmatrix` into one.

`shim/ptx/matrix_ptx.h` loads each matrix separately (.x1), as a Metal fragment. If the matrix is only used transposed
(by movmatrix, for the second operand of a product), `ldmatrix` transposes it for free. An .x4 load takes as long as an
.x1 load. Its lanes 8 i to 8 i + 7 supply the row addresses of matrix i, so each lane adds an offset that depends on its
group of eight to the address of the first load.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_LOAD = re.compile(r"^\s*ldmatrix\.sync\.aligned\.m8n8\.x1(\.trans)?\.shared\.b16 \{(%r\d+)\}, \[(%rd\d+)\];")
_TRANSPOSE = re.compile(r"^\s*movmatrix\.\S+ (%r\d+), (%r\d+);")
_ADD = re.compile(r"^\s*add\.s64\s+(%rd\d+), (%rd\d+), (-?\d+);")
# Groups 1 and 2 are the registers of the operands.
_PRODUCT = re.compile(r"^\s*mma\.sync\S+ \{.*?\}, \{(.*?)\}, \{(.*?)\}, ")
_REGISTER = re.compile(r"%[a-z]+\d+")
_ASSIGNED = re.compile(r"^\s*(?:@!?%p\d+ )?[a-z][\w.:]*\s+(\{[^}]*\}|%[a-z]+\d+(?:\|%[a-z]+\d+)?)")
# Loads of threadgroup memory may not move across these: labels, jumps, barriers and possible writes.
_FENCE = re.compile(
    r"^\s*(\$\w+:|(@!?%p\d+ )?(bra|ret|exit|trap|call|brx|bar|barrier|st|atom|red|cp|fence|membar)\b|\{|\})"
)

_GROUP_BITS = ("%mslc_group_low", "%mslc_group_high")  # bits of the index of the lane's group of eight
_PROLOGUE = f"""\
	.reg .b32 %mslc_group;
	.reg .b64 {", ".join(_GROUP_BITS)};
	mov.u32 %mslc_group, %laneid;
	shr.u32 %mslc_group, %mslc_group, 3;
	cvt.u64.u32 {_GROUP_BITS[1]}, %mslc_group;
	and.b64 {_GROUP_BITS[0]}, {_GROUP_BITS[1]}, 1;
	shr.u64 {_GROUP_BITS[1]}, {_GROUP_BITS[1]}, 1;"""


@dataclass
class _Load:
    line: int
    transposes: bool
    result: str
    base: str
    offset: int

    def text(self, address: str, results: list[str]) -> str:
        form = f"x{len(results)}" + (".trans" if self.transposes else "")
        return f"\tldmatrix.sync.aligned.m8n8.{form}.shared.b16 {{{', '.join(results)}}}, [{address}];"


def _assigned_once(lines: list[str]) -> set[str]:
    assigned = Counter(r for line in lines if (m := _ASSIGNED.match(line)) for r in _REGISTER.findall(m[1]))
    return {register for register, count in assigned.items() if count == 1}


def turn_loads(lines: list[str]) -> list[str]:
    """Transposes matrices at the load if they are only used transposed. `lines` is a function's body."""
    if not any(_LOAD.match(line) for line in lines):
        return lines
    once = _assigned_once(lines)
    loaded = {m[2] for line in lines if (m := _LOAD.match(line))} & once
    mentions = Counter(register for line in lines for register in _REGISTER.findall(line.split("//")[0]))
    turned = {m[1]: m[2] for line in lines if (m := _TRANSPOSE.match(line)) and m[2] in loaded and m[1] in once}
    uses = Counter(turned.values())
    turned = {result: matrix for result, matrix in turned.items() if mentions[matrix] == 1 + uses[matrix]}
    matrices = set(turned.values())
    output = []
    for line in lines:
        load, transpose = _LOAD.match(line), _TRANSPOSE.match(line)
        if transpose and transpose[1] in turned:
            continue
        if load and load[2] in matrices:
            output.append(_Load(0, not load[1], load[2], "", 0).text(load[3], [load[2]]))
        else:
            output.append(_REGISTER.sub(lambda register: turned.get(register[0], register[0]), line))
    return output


def merge_loads(lines: list[str]) -> list[str]:
    """Merges loads of several matrices. `lines` is a function's body."""
    if not any(_LOAD.match(line) for line in lines):
        return lines
    products = [m for line in lines if (m := _PRODUCT.match(line))]
    operands = {group.split(", ")[0]: group.split(", ") for product in products for group in product.groups()}
    once = _assigned_once(lines)
    sums = {m[1]: (m[2], int(m[3])) for line in lines if (m := _ADD.match(line)) and m[1] in once}

    def place(register: str) -> tuple[str, int]:
        offset = 0
        while register in sums:
            register, more = sums[register]
            offset += more
        return register, offset

    run: list[_Load] = []
    groups: list[list[_Load]] = []
    for i, line in enumerate([*lines, "}"]):
        found = _LOAD.match(line)
        if found and found[2] in once:
            run.append(_Load(i, bool(found[1]), found[2], *place(found[3])))
        elif _FENCE.match(line):
            groups += _groups(_operands_together(run, operands))
            run = []
    groups = [group for group in groups if group[0].base in once]
    if not groups:
        return lines

    output: list[str | None] = list(lines)
    addresses: dict[tuple[str, tuple[int, int]], str] = {}
    for group in groups:
        first = group[0]
        steps = (group[1].offset - first.offset, group[2].offset - first.offset)
        address = addresses.setdefault((first.base, steps), f"%mslc_rows_{len(addresses)}")
        output[first.line] = first.text(f"{address}+{first.offset}", [load.result for load in group])
        for load in group[1:]:
            output[load.line] = None
    by_base: dict[str, list[str]] = {}
    for (base, steps), address in addresses.items():
        start = base
        for bit, step in zip(_GROUP_BITS, steps, strict=True):
            by_base.setdefault(base, []).append(f"\tmad.lo.s64 {address}, {bit}, {step}, {start};")
            start = address
    result = [f"\t.reg .b64 {', '.join(addresses.values())};", _PROLOGUE]
    for line in filter(None, output):
        result.append(line)
        if (found := _ASSIGNED.match(line)) and found[1] in by_base:
            result += by_base[found[1]]
    return result


def _operands_together(run: list[_Load], operands: dict[str, list[str]]) -> list[_Load]:
    """Orders loads so that the matrices of each operand are adjacent.

    An operand's registers must be neighbours, as the results of a load are. `operands` is keyed by the first
    register."""
    waiting = {load.result: load for load in run}
    ordered = []
    for load in run:
        if load.result in waiting:
            together = [r for r in operands.get(load.result, [load.result]) if r in waiting]
            ordered += [waiting.pop(register) for register in dict.fromkeys(together)]
    return ordered


def _groups(run: list[_Load]) -> list[list[_Load]]:
    """Groups four adjacent loads whose addresses form a square: base, base + a, base + b and base + a + b."""
    groups = []
    i = 0
    while i + 4 <= len(run):
        group = run[i : i + 4]
        alike = all((load.base, load.transposes) == (group[0].base, group[0].transposes) for load in group)
        if alike and group[3].offset - group[2].offset == group[1].offset - group[0].offset:
            groups.append(group)
            i += 4
        else:
            i += 1
    return groups
