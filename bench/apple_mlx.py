"""What MLX launches for a call, as its dispatch chooses for a chip (apple.py).

A pass whose kernel is neither in MLX's wheel nor in its repository is counted by the bytes that it has to move, which
flatters MLX.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, exp, log
from typing import Any

import apple_launches as more
import estimate_launches as launches
import mlx_anvil
from apple_launches import qmm, qmm_split, qmv_rows, qmv_wide
from mlx_anvil import _ext
from mlx_anvil.mslc.agx import compile_agx
from mlx_anvil.mslc.estimate_work import Work
from mlx_anvil.mslc.estimation import chips, find_chip, ratio, validation


@dataclass(frozen=True)
class Architecture:
    """What MLX's dispatch asks of a chip: "applegpu_g13s" is generation 13, size s."""

    generation: int
    size: str  # g: base; s: Pro and Max; d: Ultra

    @classmethod
    def of(cls, chip: str) -> "Architecture":
        family, _, kind = chip.partition(" ")
        return cls(12 + int(family[1:]), {"": "g", "Ultra": "d"}.get(kind, "s"))


@dataclass(frozen=True)
class Counted:
    """A launch: its work, and what Mesa's compiler says of its kernel, if there is one."""

    work: Work
    needs: dict[str, Any] | None = None


def needs_of(kernel: Any) -> dict[str, Any]:
    return {name: getattr(kernel, name) for name in ("instructions", "registers", "spills", "fills", "threads")}


@cache
def _counted(launch: "Key") -> Counted:
    made = launch.make(*launch.arguments)
    source = made.source()
    return Counted(made.work(), needs_of(compile_agx(source, [made.function], made.constants)[0]))


@dataclass(frozen=True)
class Key:
    make: Any
    arguments: tuple[object, ...]


def counted(make: Any, *arguments: object) -> Counted:
    return _counted(Key(make, arguments))


def times(found: Counted, factor: float) -> Counted:
    """`factor` such launches in one."""
    totals = {name: value for name, value in vars(found.work).items() if isinstance(value, float)}
    del totals["unexplained"]
    return replace(found, work=replace(found.work, **{name: factor * value for name, value in totals.items()}))


def traffic(name: str, read: float, written: float) -> Counted:
    """A pass of which only the bytes are known."""
    groups = ceil((read + written) / 8192)
    nothing = dict.fromkeys(
        ("cache_bytes", "port_cycles", "bank_cycles", "barriers", "simple", "complex", "complex_issued",
         "matrix_cycles", "instructions", "rounds", "spill_bytes", "unexplained"), 0.0,
    )  # fmt: skip
    return Counted(Work(name, groups, 256, 32, 0, read, written, **nothing))


@cache
def alike(chip: str, differ: str) -> str:
    """The first chip whose launches of ours are the same."""

    def what_differs(chip: str) -> int:
        if differ in ("", "cores"):
            return find_chip(chip).cores if differ else 0
        with mlx_anvil.simulate(chip=chip):
            return _ext._choices("cpu")[differ]

    return next(first for first in chips() if what_differs(first) == what_differs(chip))


def backward_chunks(heads: int, length: int, chip: str) -> int:
    """In how many chunks our backward stores weights."""
    with mlx_anvil.simulate(chip=chip):
        return int(_ext._backward_chunks(heads, length))


@cache
def bias(kernel: str) -> float:
    """By what factor estimates of MLX's qmv_wide are longer than its published times: the one kind that they miss."""
    if kernel != "affine_qmv_wide":
        return 1.0
    parameters, works, timings = validation()
    found = [log(ratio(timing, works, parameters)) for timing in timings if timing.work.startswith("qmv_wide")]
    return exp(sum(found) / len(found))


# ---- products


def _vector_limit(columns: int, outputs: int, chip: Architecture) -> int:
    """Rows from which MLX takes its kernel for many of them."""
    if chip.generation >= 15 and chip.size != "d":
        limits = (13, 15, 13)
    elif chip.size == "d":
        limits = (32, 18, 12)
    elif chip.generation >= 13:
        limits = (14, 10, 6)
    else:
        limits = (18, 12, 10)
    largest = max(columns, outputs)
    return limits[0] if largest <= 2048 else limits[1] if largest <= 4096 else limits[2]


def product(rows: int, outputs: int, columns: int, chip: Architecture, bits: int = 4) -> list[Counted]:
    """x [rows, columns] times a quantized matrix, groups of 64."""
    if rows < _vector_limit(columns, outputs, chip):
        if rows >= 2 and chip.generation >= 15:
            return [counted(qmv_wide, rows, outputs, columns, bits)]
        return [counted(qmv_rows, rows, outputs, columns, bits)]
    split = max(1, 512 // (ceil(outputs / 32) * ceil(rows / 32)))
    split = min(split, columns // 64)
    while split > 1 and columns % (split * 64):
        split -= 1
    if split == 1:
        return [counted(qmm, rows, outputs, columns, bits)]
    size = rows * outputs
    return [counted(qmm_split, rows, outputs, columns, bits, split),
            traffic("sum of parts", size * split * 4, size * 2)]  # fmt: skip


# ---- attention


def attention(length: int, dim: int, heads: int, dtype: str, causal: bool) -> list[Counted]:
    return [counted(launches.attention, length, dim, heads, dtype, causal)]


def decode(keys: int, dim: int, heads: int, kv_heads: int, chip: Architecture) -> list[Counted]:
    """In one pass, or in parts and a second pass."""
    if not (chip.size in "ds" and keys >= 1024) and not (kv_heads < heads and keys >= 4096):
        return [counted(more.decode_at_once, keys, dim, heads, kv_heads)]
    group = heads // kv_heads
    if chip.size == "s":
        blocks = 64
        if keys > 1024 and group > 4:
            blocks = 128 if keys <= 8192 else 256 if keys <= 32768 else 512 if keys <= 65536 else 1024
    elif chip.size == "d":
        blocks = 128
        if group <= 2 and keys > 8192:
            blocks = 256
        elif group >= 6 and keys >= 16384:
            blocks = 512 if keys < 65536 else 1024
    else:
        blocks = 64 if group >= 4 else 32
    first = counted(launches.decode, keys, dim, heads, kv_heads, blocks, "float16")
    return [first, counted(launches.combine, dim, heads, blocks, "float16")]


def backward(length: int, dim: int, heads: int, causal: bool, chip: Architecture) -> list[Counted]:
    """Five products through stored scores, and the pass between them, of which only the bytes are counted.

    With a causal mask, half of the scores.
    """
    share = 0.5 * (1 + 1 / 16) if causal else 1.0  # blocks on the diagonal are whole
    nt, nn = ((64, 32, 32, 2, 2), (64, 64, 16, 1, 2)) if chip.size == "g" else ((64, 64, 16, 2, 2),) * 2
    if chip.size == "d":
        nt = nn = (64, 64, 16, 1, 2)
    scores = times(counted(launches.gemm, length, length, dim, heads, "float16", nt, False, True), 2 * share)
    sums = times(counted(launches.gemm, length, dim, length, heads, "float16", nn), 3 * share)
    size = heads * length * length * 2 * share
    return [scores, traffic("between", 2 * size, 2 * size), sums]


def embedding(ids: int, columns: int) -> list[Counted]:
    """Three gathers and a dequantisation, float16, 4 bits in groups of 64."""
    codes, factors = (counted(more.gather, ids, *row) for row in ((columns // 8, "uint32"), (columns // 64, "float16")))
    return [codes, factors, factors, counted(more.dequantize, ids, columns)]
