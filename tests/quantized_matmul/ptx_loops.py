"""Instructions of a kernel's main loop, counted by class in its PTX.

PTX is not a GPU's machine code, so the counts describe the optimised source, for Apple's GPUs as well as NVIDIA's.
Moves between registers are left out: on both GPUs half a register is an operand, not an instruction.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

CLASSES = ("loads", "integer", "float", "conversions", "control")
_FREE = ("mov.", "cvta.", ".loc", "//")
_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"^(?:@!?%p\d+ )?bra(?:\.uni)?\s+(\$\w+);")


@dataclass(frozen=True)
class Loop:
    counts: Counter[str]

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def multiplications(self) -> int:
        return self.counts["multiply"]

    def per(self, weights: int) -> dict[str, float]:
        """Instructions per weight, by class and in total."""
        shares = {name: self.counts[name] / weights for name in CLASSES}
        return {**shares, "total": sum(shares.values())}


def class_of(instruction: str) -> str | None:
    """The class of an instruction; None if it does no work."""
    text = re.sub(r"^@!?%p\d+ ", "", instruction)
    if not text or text.startswith(_FREE):
        return None
    opcode = text.split()[0].rstrip(";")
    assert ".local" not in opcode, "registers are kept in memory: a loop is not unrolled"
    if opcode.startswith(("ld.", "st.")):
        return "loads"
    if opcode.startswith("cvt."):
        integers = set(opcode.split(".")[-2:]) <= {"u16", "s16", "u32", "s32", "u64", "s64", "u8", "s8"}
        return "integer" if integers else "conversions"
    if opcode.startswith(("bra", "setp", "selp", "bar.", "ret", "call")):
        return "control"
    if re.search(r"\.(f16|f16x2|bf16|bf16x2|f32|f64)\b", opcode):
        return "float"
    return "integer"


def body_of(text: str, entry: str) -> list[str]:
    found = re.search(rf"^\.visible \.entry {entry}\(.*?^\{{(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    assert found, f"no entry {entry}"
    lines = (line.split("//")[0].strip() for line in found[1].split("\n"))
    return [line for line in lines if line and not line.startswith(".")]


def loops(body: list[str]) -> list[list[str]]:
    """Loops, from a label to the last branch back to it."""
    labels = {found[1]: i for i, line in enumerate(body) if (found := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for i, line in enumerate(body):
        found = _BRANCH.match(line)
        if found and labels[found[1]] <= i:
            ends[labels[found[1]]] = i
    return [body[begin : end + 1] for begin, end in ends.items()]


def hot_loop(text: str, entry: str) -> Loop:
    """The loop with the most float multiplications."""

    def count(lines: list[str]) -> Loop:
        kinds = Counter(kind for line in lines if (kind := class_of(line)) and not _LABEL.match(line))
        kinds["multiply"] = sum(bool(re.match(r"(fma|mul)\.(rn\.)?f32", line)) for line in lines)
        return Loop(kinds)

    return max(map(count, loops(body_of(text, entry))), key=lambda loop: loop.multiplications)
