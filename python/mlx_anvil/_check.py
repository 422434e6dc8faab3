"""The main job, ``python -m mlx_anvil``: is every op right on this machine, and how fast is it?

Every op runs forward and backward, in every dtype, on every usable backend, on fresh random inputs. Errors are taken
against the op's definition in float64, and judged by what the same definition reaches when it is computed in the dtype
itself; then both are timed side by side.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from mlx_anvil.bench.timing import Timing, measure, ratio
from mlx_anvil.reference import DTYPES, OPS, OpSpec

# The FlashAttention criterion: a low-precision result may be off by this many times what the plain definition in that
# dtype is off by, plus a floor.
OUTPUT_FACTOR, GRADIENT_FACTOR, FLOOR = 2.0, 3.0, 1e-5


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in seconds, memory in bytes; errors relative to the result's largest magnitude; spread:
    the larger of ours and MLX's, as a share of the median."""

    op: str
    variant: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    backend: str
    error: float
    limit: float
    ours: float
    mlx: float
    speedup: float
    spread: float
    peak_memory: int

    @property
    def passed(self) -> bool:
        """Whether the error is a number and within its limit."""
        return self.error <= self.limit


@dataclass(frozen=True)
class Case:
    """One op, direction, dtype and shape on one backend."""

    spec: OpSpec
    gradient: bool
    dtype: mx.Dtype
    shape: tuple[int, ...]
    backend: str

    @property
    def label(self) -> str:
        """For the progress display."""
        what = "gradient" if self.gradient else "forward"
        return f"{self.spec.id} {what} {dtype_name(self.dtype)} {self.shape} {self.backend}"


def dtype_name(dtype: mx.Dtype) -> str:
    """``float32`` for ``mx.float32``."""
    return str(dtype).removeprefix("mlx.core.")


def keep_float32_exact() -> None:
    """Turns off TF32 in MLX's float32 products on CUDA, before the first of them, unless the environment says otherwise.

    TF32 keeps 11 bits of each factor. The comparisons here judge float32, in MLX's results and in those of our gradients
    (in scales and biases) that are products of MLX.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def cases(ops: list[str], backends: list[str]) -> list[Case]:
    """Everything that one run checks, in the order of the table."""
    return [
        Case(spec, gradient, dtype, shape, backend)
        for spec in OPS.values()
        if spec.name in ops
        for shape in spec.check_shapes
        for backend in backends
        for gradient in (False, True)
        for dtype in DTYPES
    ]


def results_of(function: Callable[..., mx.array], case: Case) -> Callable[..., list[mx.array]]:
    """What the case computes, by ``function``: its output, or ``(inputs..., cotangent) -> gradients``."""
    count = len(case.spec.arguments)

    def output(*arrays: mx.array) -> list[mx.array]:
        return [function(*arrays)]

    def gradients(*arrays: mx.array) -> list[mx.array]:
        return mx.vjp(function, list(arrays[:count]), list(arrays[count:]))[1]

    return gradients if case.gradient else output


def inputs(case: Case) -> list[mx.array]:
    """Random ones; with the cotangent behind them where the case is a gradient."""
    arrays = case.spec.make_inputs(case.shape, case.dtype)
    if case.gradient:
        output = case.spec.function(*arrays)
        arrays = [*arrays, mx.random.normal(output.shape).astype(output.dtype)]
    mx.eval(arrays)
    return arrays


def largest_error(results: list[mx.array], truth: list[mx.array]) -> float:
    """Largest deviation, as a share of the truth's largest magnitude; NaN if any result is NaN."""
    with mx.stream(mx.cpu):
        worst = 0.0
        for result, exact in zip(results, truth, strict=True):
            scale = float(mx.abs(exact).max()) or 1.0
            error = float(mx.abs(result.astype(mx.float64) - exact).max()) / scale
            if math.isnan(error):
                return error
            worst = max(worst, error)
        return worst


def error_and_limit(case: Case, arrays: list[mx.array]) -> tuple[float, float]:
    """The op's error on ``arrays``, and the most that it may be."""
    ours, plain = results_of(case.spec.function, case), results_of(case.spec.reference, case)
    with mx.stream(mx.cpu):
        truth = plain(*(x.astype(mx.float64) for x in arrays))
        mx.eval(truth)
    error = largest_error(ours(*arrays), truth)
    if case.dtype == mx.float32:
        return error, case.spec.float32_tolerance
    with mx.stream(mx.cpu):
        composed = largest_error(plain(*arrays), truth)
    factor = GRADIENT_FACTOR if case.gradient else OUTPUT_FACTOR
    return error, factor * composed + FLOOR


def time_both(case: Case, arrays: list[mx.array], rounds: int = 5) -> dict[str, Timing]:
    """Ours and MLX's, taken in turn."""
    ours, plain = results_of(case.spec.function, case), results_of(case.spec.reference, case)
    contestants = {"ours": lambda: mx.eval(ours(*arrays)), "MLX": lambda: mx.eval(plain(*arrays))}
    return measure(contestants, rounds=rounds, least_seconds=0.004)


def _peak_memory(case: Case, arrays: list[mx.array]) -> int:
    """Bytes that the op needs beyond its inputs."""
    function = results_of(case.spec.function, case)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(*arrays))
    return max(0, mx.get_peak_memory() - before)


def run_case(case: Case) -> Row:
    """Checks and times one case."""
    device = mx.cpu if case.backend == "cpu" else mx.gpu
    with mx.stream(device):
        arrays = inputs(case)
        error, limit = error_and_limit(case, arrays)
        memory = _peak_memory(case, arrays)
        timings = time_both(case, arrays)
    what = "gradient" if case.gradient else "forward"
    return Row(
        case.spec.name,
        case.spec.variant,
        what,
        dtype_name(case.dtype),
        case.shape,
        case.backend,
        error,
        limit,
        timings["ours"].median,
        timings["MLX"].median,
        ratio(timings["MLX"], timings["ours"]),
        max(timing.spread for timing in timings.values()),
        memory,
    )


def run(ops: list[str], backends: list[str], seed: int) -> Iterator[tuple[Case, Row]]:
    """Runs every case; yields each with its row as soon as it is known."""
    keep_float32_exact()
    mx.random.seed(seed)
    for case in cases(ops, backends):
        yield case, run_case(case)
