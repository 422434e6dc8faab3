"""Executes a kernel's PTX for one value, with the roundings of the machine: enough of PTX for functions of floats.

A sum without .rn that the machine may fuse with a product is refused.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction

import numpy as np

F32, MASK = np.float32, 0xFFFFFFFF
BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def as_float(bits: int) -> np.float32:
    return np.uint32(bits).view(F32)


def as_bits(value) -> int:
    return int(F32(value).view(np.uint32))


def as_double(bits: int) -> np.float64:
    return np.uint64(bits).view(np.float64)


def fma_double(x, y, z) -> np.float64:
    """A double fma, rounded once."""
    if not np.isfinite([x, y, z]).all():
        return x * y + z
    return np.float64(float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))))


def signed(bits: int) -> int:
    return (bits & MASK) - ((bits & 0x80000000) << 1)


def compare(kind: str, x, y) -> bool:
    unordered = x != x or y != y
    if kind in ("num", "nan"):
        return unordered == (kind == "nan")
    # With a u, as in "ltu", what cannot be compared counts as true.
    return len(kind) == 3 if unordered else bool(getattr(operator, kind[:2])(x, y))


FLOAT = {
    "add.rn": lambda x, y: x + y,
    "sub.rn": lambda x, y: x - y,
    "mul.rn": lambda x, y: x * y,
    "div.rn": lambda x, y: x / y,
    # The product of two floats is exact in 64 bits of mantissa.
    "fma.rn": lambda x, y, z: F32(np.longdouble(x) * np.longdouble(y) + np.longdouble(z)),
    "abs": abs,
    "neg": operator.neg,
    "copysign": lambda sign, x: np.copysign(x, sign),
    "cvt.rni.f32": np.rint,
    "cvt.rzi.f32": np.trunc,
    "min": np.fmin,
    "max": np.fmax,
    "sqrt.rn": np.sqrt,
    # As far off as PTX allows: 2^-22.5 and 2^-22.9.
    "ex2.approx": lambda x: F32(np.exp2(np.float64(x)) * (1 + 2.0**-23 * (x != np.rint(x)))),
    "rsqrt.approx": lambda x: F32(1 / np.sqrt(np.float64(x)) * (1 + 2.0**-23)),
}
# A product without .rn can be fused with a sum only, and there is none in double.
DOUBLE = {"mul": operator.mul, "mul.rn": operator.mul, "neg": operator.neg, "fma.rn": fma_double}
INTEGER = {
    "add.s32": operator.add,
    "sub.s32": operator.sub,
    "shl.b32": operator.lshift,
    "shr.s32": lambda x, y: signed(x) >> y,
    "shr.u32": operator.rshift,
    **{f"{name}.b32": function for name, function in BITWISE.items()},
}


class Kernel:
    """A kernel of pointers to floats that computes `out[i] = function(first[i], ...)`; only thread 0 is executed."""

    def __init__(self, body: str):
        self.code, self.labels = [], {}
        for line in body.split("\n"):
            text = line.split("//")[0].strip().rstrip(";")
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.code)
            elif text and not text.startswith("."):
                predicate, opcode, operands = re.match(r"(?:@(!?%p\d+) )?(\S+)\s*(.*)", text).groups()
                self.code.append((predicate, opcode, [o.strip(" []") for o in operands.split(",")]))

    def __call__(self, *arguments: float) -> np.float32:
        self.registers: dict[str, int] = {}
        self.memory = dict(enumerate(map(as_bits, arguments)))
        place, steps = 0, 0
        with np.errstate(all="ignore"):
            while (instruction := self.code[place])[1] != "ret":
                place, steps = self.step(place + 1, *instruction), steps + 1
                assert steps < 10_000, "the kernel does not end"
        return as_float(self.memory[len(arguments)])

    def value(self, operand: str) -> int:
        if operand.startswith(("0f", "0d")):
            return int(operand[2:], 16)
        if operand in ("%ctaid.x", "%ntid.x", "%tid.x"):
            return 0
        return self.registers[operand] if operand.startswith("%") else int(operand)

    def step(self, following: int, predicate: str | None, opcode: str, operands: list[str]) -> int:
        if predicate and bool(self.registers[predicate.lstrip("!")]) == predicate.startswith("!"):
            return following
        if opcode.startswith("bra"):
            return self.labels[operands[0]]
        if opcode.startswith("ld.param"):  # an address is the number of the parameter
            self.registers[operands[0]] = int(operands[1].rsplit("_", 1)[1])
        elif opcode.startswith("st.global"):
            self.memory[self.value(operands[0])] = self.value(operands[1])
        elif opcode.startswith("ld.global"):
            self.registers[operands[0]] = self.memory[self.value(operands[1])]
        else:
            self.registers[operands[0]] = self.result(opcode, [self.value(operand) for operand in operands[1:]])
        return following

    def result(self, opcode: str, values: list[int]) -> int:
        name, _, kind = opcode.rpartition(".")
        if name.startswith("setp."):
            read = {"f32": as_float, "s32": signed}.get(kind, int)
            return int(compare(name[5:], read(values[0]), read(values[1])))
        if name == "selp":
            return values[0] if values[2] else values[1]
        if opcode in INTEGER:
            return INTEGER[opcode](*(v & MASK for v in values)) & MASK
        if kind == "pred":
            return BITWISE[name](*values)
        if kind == "f32" and name in FLOAT:
            return as_bits(FLOAT[name](*map(as_float, values)))
        if kind == "f64" and name in DOUBLE:
            return int(np.float64(DOUBLE[name](*map(as_double, values))).view(np.uint64))
        if opcode == "cvt.f64.f32":
            return int(np.float64(as_float(values[0])).view(np.uint64))
        if opcode == "cvt.rn.f32.f64":
            return as_bits(F32(as_double(values[0])))
        if opcode == "cvt.rn.f32.s32":
            return as_bits(F32(signed(values[0])))
        if opcode == "cvt.rzi.s32.f32":
            x = as_float(values[0])
            return 0 if x != x else int(np.clip(np.trunc(np.float64(x)), -(2**31), 2**31 - 1)) & MASK
        if name in ("mov", "cvt.u64"):
            return values[0]
        # Addresses: the thread's index is 0.
        if opcode in ("mad.lo.s32", "mul.wide.u32", "add.s64", "shl.b64"):
            return {"mad": 0, "mul": 0, "add": sum(values), "shl": values[0] << values[-1]}[name.split(".")[0]]
        raise NotImplementedError(opcode)
