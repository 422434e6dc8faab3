"""Loads of matrices keep their places when they are made several at a time: both texts are executed for the four groups
of eight lanes, whose addresses decide what is loaded."""

import re

import pytest

from mlx_anvil.mslc.ptx_ldmatrix import merge_loads, turn_loads
from tests.mslc.ptx_support import ptx

LOAD = re.compile(r"\s*ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16 \{(.*)\}, \[(%\w+)(?:\+(-?\d+))?\];")


def load(result: str, address: str, form: str = "x1") -> str:
    return f"\tldmatrix.sync.aligned.m8n8.{form}.shared.b16 {{{result}}}, [{address}];"


def loaded(lines: list[str]) -> dict[str, tuple[bool, int]]:
    """For each result, whether the matrix is transposed, and its address."""
    found: dict[str, tuple[bool, int]] = {}
    for group in range(4):
        registers = {"%laneid": 8 * group}
        for line in "\n".join(lines).split("\n"):
            match = LOAD.match(line)
            if match:
                count, turned, results, base, offset = match.groups()
                if group < int(count):
                    place = registers[base] + int(offset or 0)
                    found[results.split(", ")[group]] = (bool(turned), place)
            elif not line.strip().startswith((".reg", "bar")):
                opcode, operands = line.strip().rstrip(";").split(None, 1)
                to, *values = (v.strip() for v in operands.split(","))
                a, *rest = (registers[v] if v.startswith("%") else int(v) for v in values)
                operation = opcode.split(".")[0]
                registers[to] = {
                    "add": lambda a, b=0: a + b,
                    "mad": lambda a, b=0, c=0: a * b + c,
                    "mov": lambda a: a,
                    "cvt": lambda a: a,
                    "shr": lambda a, b=0: a >> b,
                    "and": lambda a, b=0: a & b,
                }[operation](a, *rest)
    return found


def program(offsets: list[int], fence: int | None = None, turned: bool = False) -> list[str]:
    lines = ["\tmov.b64 \t%rd1, 1000;", "\tadd.s64 \t%rd2, %rd1, 64;"]
    for i, offset in enumerate(offsets):
        if i == fence:
            lines.append("\tbar.sync \t0;")
        lines.append(f"\tadd.s64 \t%rd{10 + i}, %rd2, {offset};")
        lines.append(load(f"%r{i}", f"%rd{10 + i}", "x1.trans" if turned else "x1"))
    return lines


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("offsets", "loads"),
    [
        ([0, 272, 16, 288], ["4"]),
        ([0, 16, 32, 48, 64, 80, 96, 112], ["4", "4"]),
        ([0, 16, 32, 64], ["1", "1", "1", "1"]),  # no square
        ([5, 16, 32, 48, 64], ["1", "4"]),
        ([16 * i for i in range(42)], ["4"] * 10 + ["1"] * 2),
    ],
)
def test_places(offsets, loads, turned):
    before = program(offsets, turned=turned)
    after = merge_loads(before)
    assert loaded(after) == loaded(before)
    assert re.findall(r"ldmatrix\S*\.x(\d)", "\n".join(after)) == loads


def test_nothing_passes_a_barrier():
    before = program([0, 16, 32, 48], fence=2)
    assert merge_loads(before)[-len(before) :] == before


def test_bases_that_change_are_left_alone():
    before = [*program([0, 16, 32, 48]), "\tadd.s64 \t%rd1, %rd1, 8;"]
    assert "x4" not in "\n".join(merge_loads(before))


def test_turned_where_only_that_is_used():
    transpose = "\tmovmatrix.sync.aligned.m8n8.trans.b16 %r{}, %r{};"
    lines = [
        load("%r1", "%rd1"),
        transpose.format(2, 1),
        "\tst.b32 \t[%rd9], %r2;",
        load("%r3", "%rd1"),
        transpose.format(4, 3),
        "\tst.b32 \t[%rd9], %r3;",
    ]
    after = turn_loads(lines)
    assert after == [load("%r1", "%rd1", "x1.trans"), "\tst.b32 \t[%rd9], %r1;", *lines[3:]]


KERNEL = """
    kernel void k(device float* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {{
      threadgroup uint4 memory[64];
      memory[lane] = memory[lane + 32] = uint4(lane);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const threadgroup half* tile = reinterpret_cast<const threadgroup half*>(memory) + {start};
      simdgroup_matrix<float, 8, 8> sum(0.0f);
      for (int i = 0; i < 4; ++i) {{
        simdgroup_matrix<half, 8, 8> a, b;
        simdgroup_load(a, tile + 8 * i, {stride});
        simdgroup_load(b, tile + 8 * i, {stride}, ulong2(0), true);
        simdgroup_multiply_accumulate(sum, a, b, sum);
      }}
      simdgroup_store(sum, out, 8);
    }}"""


@pytest.mark.parametrize(
    ("start", "stride", "aligned"), [("0", 40, True), ("8", 40, True), ("4", 40, False), ("0", 36, False)]
)
def test_only_rows_known_to_be_aligned(start, stride, aligned):
    text = ptx(KERNEL.format(start=start, stride=stride)).text
    assert ("ldmatrix" in text) == aligned
    assert "movmatrix" not in text
