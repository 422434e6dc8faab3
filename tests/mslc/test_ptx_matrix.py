"""Pairing matrix products keeps what the text computes: both texts are evaluated with symbols for numbers and
compared."""

import re

import make_bundle
import pytest

from mlx_anvil.mslc import Source, ptx
from mlx_anvil.mslc.ptx_matrix import expand_products

REGISTER = re.compile(r"%[a-z_]+\w*")
GROUPS = re.compile(r"\{(.*?)\}")
EFFECTS = ("st.", "red.", "atom.", "bar.", "bra", "ret", "@")


class Meaning:
    """What lines of PTX compute. `symbols` numbers each distinct value; equal numbers are equal values."""

    def __init__(self, lines, symbols):
        self.symbols, self.effects, self.blocks, self.registers, self.read = symbols, [], [], {}, set()
        for line in lines:
            code = line.split("//")[0].strip().rstrip(";")
            if code and not code.startswith(".reg"):
                self.execute(code)
        self.blocks.append(self.registers)

    def symbol(self, *value):
        return self.symbols.setdefault(value, len(self.symbols))

    def value(self, register):
        self.read.add(register)
        if register == "%mslc_zero":
            return self.symbol("zero")
        return self.registers.setdefault(register, self.symbol("at start of block", len(self.blocks), register))

    def execute(self, code):
        if code.startswith(("mslc.mma.", "mma.sync.")):
            self.multiply(code)
        elif code.endswith(":") or code.startswith(EFFECTS):
            self.effects.append(self.symbol(REGISTER.sub("%", code), *map(self.value, REGISTER.findall(code))))
            if not code.startswith("st."):
                self.blocks.append(self.registers)
                self.registers = {}
        else:
            opcode, operands = code.split(maxsplit=1)
            written, _, rest = re.match(r"(\{.*?\}|[^,]*)(,?)(.*)", operands).groups()
            reads = [self.value(register) for register in REGISTER.findall(rest)]
            # A load gives what the stores before it have left.
            memory = len(self.effects) if opcode.startswith("ld.") else None
            for i, register in enumerate(REGISTER.findall(written)):
                self.registers[register] = self.symbol(opcode, i, REGISTER.sub("%", rest), memory, *reads)

    def multiply(self, code):
        opcode, operands = code.split(maxsplit=1)
        d, a, b, c = (REGISTER.findall(group) for group in GROUPS.findall(operands))
        kind = opcode.split(".")[2] if opcode.startswith("mslc.") else opcode.split(".")[-2]
        halves = len(d) // 2
        each = 2 if kind == "tf32" else 1  # registers of an 8x8 operand
        sums = [tuple(map(self.value, c[2 * h : 2 * h + 2])) for h in range(halves)]
        for inner in range(len(b) // each):
            right = tuple(map(self.value, b[each * inner : each * (inner + 1)]))
            rows = [self.value(register) for register in a[each * halves * inner : each * halves * (inner + 1)]]
            for h in range(halves):
                product = (kind, tuple(rows[h::halves]), right, sums[h])
                sums[h] = tuple(self.symbol("mma", i, *product) for i in range(2))
        for register, value in zip(d, [value for pair in sums for value in pair], strict=True):
            self.registers[register] = value


def assert_same_meaning(before, after):
    symbols = {}
    before, after = Meaning(before, symbols), Meaning(after, symbols)
    assert after.effects == before.effects
    assert len(after.blocks) == len(before.blocks)
    for first, second in zip(before.blocks, after.blocks, strict=True):
        for register in first.keys() & second.keys():
            assert first[register] == second[register], register
        # What two products of a chain exchanged is gone, so nothing may read it.
        assert not (first.keys() - second.keys()) & after.read


def random_program(rng):
    """Products over few operands, added to one another, with loads, stores and sums in between."""
    numbers = iter(range(1000, 2000))
    sums = [("%f1", "%f2"), ("%f3", "%f4")]
    lines = []
    for _ in range(rng.integers(2, 14)):
        choice, (x, y) = rng.integers(8), sums[rng.integers(len(sums))]
        if choice < 5:
            kind = ("f16", "bf16", "tf32")[rng.integers(3)] if choice == 0 else "tf32" if rng.integers(2) else "f16"
            width = 2 if kind == "tf32" else 1
            a, b = (
                ", ".join(f"%r{10 * n + i}" for i in range(width)) for n in (rng.integers(1, 4), rng.integers(5, 7))
            )
            d = f"%f{next(numbers)}", f"%f{next(numbers)}"
            lines.append(f"mslc.mma.{kind} {{{', '.join(d)}}}, {{{a}}}, {{{b}}}, {{{x}, {y}}};")
            sums.append(d)
        elif choice == 5:
            d = f"%f{next(numbers)}", y
            lines.append(f"add.f32 {d[0]}, {x}, {y};")
            sums.append(d)
        elif choice == 6:
            d = f"%f{next(numbers)}", f"%f{next(numbers)}"
            lines.append(f"ld.global.v2.f32 {{{d[0]}, {d[1]}}}, [%rd1];")
            sums.append(d)
        else:
            lines.append(f"st.global.f32 [%rd1], {x};")
    return [*lines, *(f"st.global.v2.f32 [%rd2], {{{x}, {y}}};" for x, y in sums)]


def test_random_programs_keep_their_meaning(rng):
    paired = 0
    for _ in range(1000):
        lines = random_program(rng)
        expanded = expand_products("\n".join(["{", *lines, "}"])).split("\n")[1:-1]
        assert_same_meaning(lines, expanded)
        paired += sum("mma.sync" in line for line in expanded) < sum("mslc.mma" in line for line in lines)
    assert paired > 300


def test_a_product_that_adds_to_another_is_not_put_beside_it():
    lines = [
        "mslc.mma.tf32 {%f1, %f2}, {%r1, %r2}, {%r5, %r6}, {%f8, %f9};",
        "mslc.mma.tf32 {%f3, %f4}, {%r3, %r4}, {%r5, %r6}, {%f1, %f2};",
        "st.global.v2.f32 [%rd1], {%f3, %f4};",
    ]
    expanded = expand_products("\n".join(["{", *lines, "}"])).split("\n")[1:-1]
    assert sum("mma.sync" in line for line in expanded) == 2
    assert_same_meaning(lines, expanded)


def test_rows_of_a_mixed_product_are_paired_part_by_part():
    # Of two rows, what tf32 loses of the float operand, then its main part.
    products = ((10, 10, 70), (12, 12, 10), (20, 20, 80), (22, 22, 20))
    lines = [
        f"mslc.mma.tf32 {{%f{d}, %f{d + 1}}}, {{%r{a}, %r{a + 1}}}, {{%r90, %r91}}, {{%f{c}, %f{c + 1}}};"
        for d, a, c in products
    ]
    lines += ["st.global.v2.f32 [%rd1], {%f12, %f13};", "st.global.v2.f32 [%rd1], {%f22, %f23};"]
    expanded = expand_products("\n".join(["{", *lines, "}"])).split("\n")[1:-1]
    assert sum("mma.sync" in line for line in expanded) == 2
    assert not any("mslc_zero" in line for line in expanded)
    assert_same_meaning(lines, expanded)


@pytest.mark.parametrize("arch", ptx.ARCHITECTURES)
def test_kernels_keep_their_meaning(monkeypatch, arch):
    """All mixtures of element types; operands of a float with a 16-bit matrix are the parts of float that share b."""
    text = Source.load(make_bundle.matrix_source())
    paired = ptx.compile_ptx(text, arch).text
    monkeypatch.setattr(ptx, "expand_products", lambda text: text)
    plain = ptx.compile_ptx(text, arch).text
    entries = [re.findall(r"\.entry (\w+)\(.*?^\{(.*?)^\}", t, re.MULTILINE | re.DOTALL) for t in (plain, paired)]
    assert len(entries[0]) == len(make_bundle.MATRIX_TYPES) * len(make_bundle.MATRIX_SHAPES) + 1
    for (name, before), (same_name, after) in zip(*entries, strict=True):
        assert name == same_name
        assert "mslc.mma" in before or name == "diagonal"
        assert "mslc.mma" not in after
        assert_same_meaning(before.split("\n"), after.split("\n"))


# ---- which products meet


def expand(*lines):
    text = expand_products("\n".join(["{", *lines, "}"]))
    return [line.strip() for line in text.split("\n")[1:-1] if "mma" in line]


FIRST = "mslc.mma.f16 {%f1, %f2}, {%r1}, {%r9}, {%f3, %f4};"
SECOND = "mslc.mma.f16 {%f5, %f6}, {%r2}, {%r9}, {%f7, %f8};"


def test_products_that_share_b_are_stacked():
    assert expand(FIRST, "add.f32 %f20, %f21, %f22;", SECOND) == [
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1, %f2, %f5, %f6}, {%r1, %r2}, {%r9}, {%f3, %f4, %f7, %f8};"
    ]


@pytest.mark.parametrize(
    "between",
    [
        "st.global.f32 [%rd2], %f1;\nld.shared.b32 %r2, [%rd1];",  # needs memory after the first is read
        "add.f32 %f7, %f1, %f2;",  # the second depends on the first
        "mov.b32 %r1, %r7;\nld.shared.b32 %r2, [%rd1];",  # an operand changes, and the second cannot come earlier
        "$L__BB0_2:",  # another block
    ],
)
def test_products_that_cannot_meet_stay_apart(between):
    found = expand(FIRST, *between.split("\n"), SECOND)
    assert len(found) == 2
    assert all("%mslc_zero" in line for line in found)


def test_operands_are_made_earlier_where_that_lets_products_meet():
    found = expand(FIRST, "add.f32 %f30, %f1, %f31;", "mov.b32 %r2, {%rs1, %rs2};", SECOND)
    assert len(found) == 1


def test_chain_with_another_reader_is_not_merged():
    chained = "mslc.mma.f16 {%f5, %f6}, {%r2}, {%r8}, {%f1, %f2};"
    assert ["k16" in line for line in expand(FIRST, chained)] == [True]
    assert ["k16" in line for line in expand(FIRST, chained, "add.f32 %f30, %f1, %f31;")] == [False, False]
