"""How often the blocks of a kernel's AGX code run, from what the simulator counted.

The machine code is static: its blocks, their successors, and what each moves. The simulator knows how many bytes a SIMD
group loaded and stored, and its products and barriers. Flows along the edges of the code that keep what enters a block
equal to what leaves it, and add up to those counts as closely as possible, give the instructions that were issued.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

# Cycles of a scheduler for an instruction of 32 threads, on Apple 7 and 8:
# https://github.com/philipturner/metal-benchmarks, "Instruction Throughputs". The first pattern that matches decides.
# `simple` pipelines take one a cycle; the `complex` one works beside them.
COSTS: tuple[tuple[str, str, float], ...] = (
    (r"matrix_fma", "simple", 17.5),  # MATMUL 8x8xF16 17, F32 18: on the pipelines of FFMA32
    (r"rcp", "complex", 6.0),
    (r"s?rsqrt", "complex", 8.0),
    (r"log2|exp2|convert|floor|ceil|trunc|roundeven", "complex", 4.0),
    (r"sin_pt_[12]", "complex", 5.0),
    (r"imad|bfi|bfeil|extr|asr|bitrev|popcount|ffs|intl", "complex", 4.0),
    (r"simd_reduce", "simple", 14.5),
    (r"simd_prefix", "simple", 12.6),
    (r"quad_(reduce|prefix)", "simple", 6.0),
    (r"(quad_)?shuffle\w*|\w*ballot", "simple", 2.0),
    (r"wait\w*|memory_barrier|logical_end|begin_cf", "simple", 0.0),
)
_WIDE_ADDITION = 4.0  # IADD64: four instructions
ANCHORS = (
    "device read",
    "device written",
    "threadgroup read",
    "threadgroup written",
    "matrix",
    "barriers",
    "exchanges",
)
# Between lanes: those that are one instruction for one call.
_EXCHANGES = re.compile(r"shuffle_(xor|up|down)|(simd|quad)_(reduce|prefix)")
_LITTLE_TRUST = 1e-2
_PARAMETER = re.compile(r"u\d+:u\d+, #")  # an address that all lanes load from, in `constant` memory
_BLOCK = re.compile(r"^block(\d+) \{\n(.*?)^\}([^\n]*)$", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^   (?:([^=\n]*?) = )?([a-z]\w*) ?([^\n]*)$", re.MULTILINE)
_REGISTER = re.compile(r"r(\d+)([lh]?)(?:(?:\.\.\.|:)r(\d+)([lh]?))?")
_FLOW, _COUNT, _EVEN = 30.0, 10.0, 1e-3  # weights: a flow that is kept, a count that is met, an even branch


@dataclass
class Block:
    successors: list[int]
    anchors: dict[str, float]  # of one thread: bytes moved; products; barriers; exchanges
    issued: int = 0
    simple: float = 0.0  # cycles of a scheduler
    complex: float = 0.0
    complex_issued: int = 0
    matrix_cycles: float = 0.0  # of `simple`
    spill_bytes: float = 0.0
    loads: int = 0  # from device memory
    accesses: int = 0  # of device memory


@dataclass
class Issue:
    """What a SIMD group issues on average in a launch."""

    instructions: float = 0.0
    simple: float = 0.0
    complex: float = 0.0
    complex_issued: float = 0.0
    matrix_cycles: float = 0.0
    spill_bytes: float = 0.0
    accesses: float = 0.0  # of device memory
    rounds: float = 0.0  # runs of a block that loads: a compiler that moves loads up waits once in it
    unexplained: float = 0.0  # the largest part of a count that the flows miss
    blocks: list[float] = field(default_factory=list, repr=False)


def cost(opcode: str, destination: str = "") -> tuple[str, float]:
    for pattern, pipeline, cycles in COSTS:
        if re.fullmatch(pattern, opcode):
            return pipeline, cycles
    wide = opcode == "iadd" and ":" in destination
    return "simple", _WIDE_ADDITION if wide else 1.0


def register_bytes(operand: str) -> int:
    """Returns the bytes that a register or range of registers holds."""
    found = _REGISTER.match(operand.strip())
    if not found:
        return 4
    first, half, last, last_half = found.groups()
    if last is None:
        return 2 if half else 4
    begin = 2 * int(first) + (half == "h")
    return 2 * (2 * int(last) + (last_half != "l") - begin + 1)


def read_blocks(code: str) -> list[Block]:
    blocks: dict[int, Block] = {}
    for number, body, tail in _BLOCK.findall(code):
        leads = tail.split("from")[0]
        block = Block([int(n) for n in re.findall(r"block(\d+)", leads)], dict.fromkeys(ANCHORS, 0.0))
        for destination, opcode, operands in _LINE.findall(body):
            _add(block, destination, opcode, operands)
        blocks[int(number)] = block
    return [blocks[number] for number in sorted(blocks)]


def _add(block: Block, destination: str, opcode: str, operands: str) -> None:
    pipeline, cycles = cost(opcode, destination)
    block.issued += 1
    if pipeline == "complex":
        block.complex += cycles
        block.complex_issued += 1
    else:
        block.simple += cycles
    if opcode == "matrix_fma":
        block.anchors["matrix"] += 1
        block.matrix_cycles += cycles
    elif opcode == "threadgroup_barrier":
        block.anchors["barriers"] += 1
    elif opcode == "device_load":
        block.anchors["device read"] += register_bytes(destination)
        block.loads += 1
        block.accesses += 1
    elif opcode == "device_store":
        block.anchors["device written"] += register_bytes(operands)
        block.accesses += 1
    elif opcode == "local_load":
        block.anchors["threadgroup read"] += register_bytes(destination)
    elif opcode == "local_store":
        block.anchors["threadgroup written"] += register_bytes(operands)
    elif _EXCHANGES.fullmatch(opcode):
        block.anchors["exchanges"] += 1
    elif opcode in ("stack_load", "stack_store"):
        block.spill_bytes += register_bytes(destination or operands)


def read_layout(code: str) -> list[Block]:
    """Blocks as a GPU goes through them: it issues masked code too, and leaves the order of the code only by a jump."""
    blocks: list[Block] = []
    first: dict[int, int] = {}
    jumps: list[tuple[int, str, list[int]]] = []
    for number, body, tail in _BLOCK.findall(code):
        leads = [int(n) for n in re.findall(r"block(\d+)", tail.split("from")[0])]
        first[int(number)] = len(blocks)
        blocks.append(Block([], dict.fromkeys(ANCHORS, 0.0)))
        for destination, opcode, operands in _LINE.findall(body):
            _add(blocks[-1], destination, opcode, operands)
            if opcode == "device_load" and _PARAMETER.match(operands):
                blocks[-1].anchors["device read"] -= register_bytes(destination)
            if opcode.startswith("jmp_exec") and leads:
                jumps.append((len(blocks) - 1, opcode, leads))
                blocks.append(Block([], dict.fromkeys(ANCHORS, 0.0)))
    for i, block in enumerate(blocks[:-1]):
        block.successors.append(i + 1)
    for i, opcode, leads in jumps:  # back to a loop's begin, or past what no lane takes
        blocks[i].successors.append(first[min(leads) if opcode == "jmp_exec_any" else max(leads)])
    return blocks


def issue_of(code: str, counts: Mapping[str, float], *, laid_out: bool = False) -> Issue:
    """Weighs the blocks of a listing so that they make `counts`.

    These are of ANCHORS, those that are known, of a SIMD group; bytes are of one thread. `laid_out`: as in
    `read_layout`; otherwise a branch goes one way. Then reads are the most that the code may make, because a compiler
    reads once what the source reads twice. And writes do not count beside products: a mask may keep lanes away.
    """
    blocks = read_layout(code) if laid_out else read_blocks(code)
    if laid_out and counts.get("matrix"):
        counts = {name: count for name, count in counts.items() if not name.endswith("written")}
    bounds = {name for name in counts if laid_out and name.endswith("read")}
    runs = _runs(blocks, counts, bounds, 0.0 if laid_out else 1.0)
    total = Issue(blocks=[float(run) for run in runs])
    for block, run in zip(blocks, runs, strict=True):
        total.instructions += float(run * block.issued)
        for name in ("simple", "complex", "complex_issued", "matrix_cycles", "spill_bytes", "accesses"):
            setattr(total, name, getattr(total, name) + float(run * getattr(block, name)))
        total.rounds += float(run * (block.loads > 0))
    for name, count in counts.items():
        if name in bounds:
            continue
        made = sum(run * block.anchors[name] for block, run in zip(blocks, runs, strict=True))
        if count and any(block.anchors[name] for block in blocks):
            total.unexplained = max(total.unexplained, float(abs(made - count) / count))
    return total


def _runs(blocks: list[Block], counts: Mapping[str, float], bounds: Collection[str], second: float) -> np.ndarray:
    """Returns how often every block runs. Counts of `bounds` are the most that there may be. Of a branch that no count
    decides, the second way is taken `second` times as often as the first."""
    edges = [(i, j) for i, block in enumerate(blocks) for j in (block.successors or [len(blocks)])]
    leaves = np.zeros((len(blocks), len(edges)))
    enters = np.zeros_like(leaves)
    for column, (i, j) in enumerate(edges):
        leaves[i, column] = 1
        if j < len(blocks):
            enters[j, column] = 1
    start = np.zeros(len(blocks))
    start[0] = 1
    rows, wanted, spare = [_FLOW * (leaves - enters)], [_FLOW * start], []
    for name, count in counts.items():
        moved = np.array([block.anchors[name] for block in blocks])
        if moved.any():  # of a kernel's ways through, those that move what was not moved are not taken
            weight = _COUNT * (_LITTLE_TRUST if name in bounds else 1.0)
            if name in bounds:
                spare.append((sum(map(len, rows)), weight))
            rows.append(weight / (count or moved.max()) * (moved @ leaves)[None])
            wanted.append(np.array([weight if count else 0.0]))
    for i, block in enumerate(blocks):
        if len(block.successors) == 2 and min(block.successors) > i:  # no loop's end
            rows.append(
                _EVEN
                * (
                    second * np.array([e == (i, block.successors[0]) for e in edges], float)
                    - np.array([e == (i, block.successors[1]) for e in edges], float)
                )[None]
            )
            wanted.append(np.zeros(1))
    flows = np.concatenate(rows)
    room = np.zeros((len(flows), len(spare)))  # below the bounds
    for column, (row, weight) in enumerate(spare):
        room[row, column] = weight
    x = non_negative_least_squares(np.concatenate([flows, room], axis=1), np.concatenate(wanted))
    return leaves @ x[: len(edges)]


def non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Lawson and Hanson's active sets: the x >= 0 for which |a x - b| is least.

    A step that rounding spoils is refused, and every other one makes the residual smaller. So it ends.
    """
    # One tolerance serves all columns if they have one norm.
    norms = np.linalg.norm(a, axis=0)
    norms[norms == 0] = 1.0
    a = a / norms
    size = a.shape[1]
    x, free, refused = (np.zeros(size, kind) for kind in (float, bool, bool))
    tolerance = 1e-10 * np.abs(a.T @ b).max(initial=0.0)
    for _ in range(10 * size + 10):
        residual = b - a @ x
        gradient = np.where(free | refused, -np.inf, a.T @ residual)
        if not size or gradient.max() <= tolerance:
            break
        chosen = gradient.argmax()
        wider = free.copy()
        wider[chosen] = True
        trial, kept = _least_squares_within(a, b, x, wider)
        if np.linalg.norm(b - a @ trial) < np.linalg.norm(residual):
            x, free, refused = trial, kept, np.zeros(size, bool)
        else:
            refused[chosen] = True
    return x / norms


def _least_squares_within(
    a: np.ndarray, b: np.ndarray, x: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Goes from x towards the least squares of the free numbers, and holds those that reach 0. Each round holds one."""
    free = free.copy()
    while free.any():
        trial = np.zeros_like(x)
        trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        blocking = np.flatnonzero(free & (trial <= 0))
        if not blocking.size:
            return trial, free
        steps = x[blocking] / np.maximum(x[blocking] - trial[blocking], 1e-300)
        x = np.maximum(x + steps.min() * (trial - x), 0.0)
        x[blocking[steps.argmin()]] = 0.0
        free[blocking] = x[blocking] > 0.0
    return np.zeros_like(x), free
