"""``python -m mlx_anvil``: is every op correct on this machine, and how fast is it?

Every op runs forward and backward on every usable backend, on fresh random inputs: in every dtype at a small size, and
at a model's size in one dtype, which the seed draws. The error is measured against the op's definition in float64. Its
limit follows from the error that the same definition has when it is computed in the dtype itself. Ours and MLX's ops
are timed interleaved.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlx_anvil._trace import trace
from mlx_anvil.bench.timing import Timing, measure, ratio
from mlx_anvil.reference import DTYPES, OPS, OpSpec

# The FlashAttention criterion: a low-precision result may have this many times the error of the definition in the same
# dtype, plus a floor.
OUTPUT_FACTOR, GRADIENT_FACTOR, FLOOR = 2.0, 3.0, 1e-5

FEW = 8  # numbers, of which the largest may be small by luck


@dataclass(frozen=True)
class Times:
    """Median seconds per call, and the memory of one call.

    Attributes:
        ours: seconds of the op.
        mlx: seconds of its definition in MLX ops.
        speedup: median over the rounds of ``mlx / ours``.
        spread: the larger of both interquartile ranges, as a fraction of the median.
        peak_memory: bytes that the op allocates beyond its inputs.
    """

    ours: float
    mlx: float
    speedup: float
    spread: float
    peak_memory: int


@dataclass(frozen=True)
class Row:
    """The result of one case.

    Attributes:
        op: Python name of the op.
        variant: which of its entries in ``OPS``.
        what: ``"forward"`` or ``"gradient"``.
        dtype: such as ``"float16"``.
        shape: as ``make_inputs`` of the entry takes it.
        backend: the backend whose stream ran the case.
        ran_on: the backend that launched kernels, or ``"MLX ops"`` if a graph of MLX ops replaced them.
        error: largest error, relative to the largest magnitude of the result; NaN if the case raised.
        limit: largest error allowed.
        times: None if the case was not timed.
        exception: type and text of what the case raised; empty if it returned.
        represents_op: True if its times stand for the op in the summary.
    """

    op: str
    variant: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    backend: str
    ran_on: str = ""
    error: float = math.nan
    limit: float = 0.0
    times: Times | None = None
    exception: str = ""
    represents_op: bool = False

    @property
    def passed(self) -> bool:
        """True if the error is a number and within its limit."""
        return self.error <= self.limit

    @property
    def share(self) -> float:
        """The error as a fraction of its limit; infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.limit

    def as_dict(self) -> dict[str, Any]:
        """All fields and ``passed``, with the fields of ``times``, if any, at the same level."""
        fields = asdict(self)
        return fields | (fields.pop("times") or {}) | {"passed": self.passed}


@dataclass(frozen=True)
class Case:
    """One op, direction, dtype and shape on one backend."""

    spec: OpSpec
    gradient: bool
    dtype: mx.Dtype
    shape: tuple[int, ...]
    backend: str

    @property
    def what(self) -> str:
        """``"forward"`` or ``"gradient"``."""
        return "gradient" if self.gradient else "forward"

    @property
    def label(self) -> str:
        """Names the case, for the progress bar and the seed of its inputs."""
        return f"{self.spec.id} {self.what} {dtype_name(self.dtype)} {self.shape} {self.backend}"


def dtype_name(dtype: mx.Dtype) -> str:
    """``"float32"`` for ``mx.float32``."""
    return str(dtype).removeprefix("mlx.core.")


def keep_float32_exact() -> None:
    """Turns off TF32 in MLX's float32 matrix products on CUDA, unless the environment sets it. Call it before the
    first.

    TF32 rounds each factor to 11 bits. That would show as an error of float32, in MLX's results and in those of our
    gradients that end in a product of MLX's.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def cases(ops: list[str], backends: list[str], seed: int | None = None) -> list[Case]:
    """All cases of one run, in the order of the table.

    With a seed, a case of a model's size runs in one dtype, which the seed draws, and in the one that is timed.
    """
    every = [
        Case(spec, gradient, dtype, shape, backend)
        for spec in OPS.values()
        if spec.name in ops
        for shape in spec.check_shapes
        for backend in backends
        for gradient in (False, True)
        for dtype in DTYPES
    ]
    if seed is None:
        return every
    return [case for case in every if _is_small(case) or represents_op(case) or case.dtype == _drawn(case, seed)]


def _is_small(case: Case) -> bool:
    return case.shape == case.spec.check_shapes[0]


def _drawn(case: Case, seed: int) -> mx.Dtype:
    """The dtype that the seed draws for a case, whatever the case's own."""
    label = f"{case.spec.id} {case.what} {case.shape} {case.backend}"
    return DTYPES[(zlib.crc32(label.encode()) + seed) % len(DTYPES)]


def timed_dtype(backend: str) -> mx.Dtype:
    """The dtype of the times in the summary: float32 on the CPU, where MLX's half-precision ops are slow."""
    return mx.float32 if backend == "cpu" else mx.bfloat16


def represents_op(case: Case) -> bool:
    """True for the case whose times stand for its op in the summary: the first variant, at its last shape."""
    first = next(spec for spec in OPS.values() if spec.name == case.spec.name)
    is_first = case.spec.id == first.id and case.shape == first.check_shapes[-1]
    return is_first and case.dtype == timed_dtype(case.backend)


def results_of(function: Callable[..., mx.array], case: Case) -> Callable[..., list[mx.array]]:
    """What the case computes, with ``function``: the output, or ``(inputs..., cotangent) -> gradients``."""
    count = len(case.spec.arguments)

    def output(*arrays: mx.array) -> list[mx.array]:
        return [function(*arrays)]

    def gradients(*arrays: mx.array) -> list[mx.array]:
        return mx.vjp(function, list(arrays[:count]), list(arrays[count:]))[1]

    return gradients if case.gradient else output


def inputs(case: Case) -> list[mx.array]:
    """Random inputs, followed by a cotangent if the case is a gradient."""
    arrays = case.spec.make_inputs(case.shape, case.dtype)
    if case.gradient:
        output = case.spec.function(*arrays)
        arrays = [*arrays, mx.random.normal(output.shape).astype(output.dtype)]
    mx.eval(arrays)
    return arrays


def largest_error(results: list[mx.array], truth: list[mx.array]) -> float:
    """Largest error, relative to the largest magnitude of the truth; NaN if any result is NaN."""
    with mx.stream(mx.cpu):
        worst = 0.0
        for result, exact in zip(results, truth, strict=True):
            scale = float(mx.abs(exact).max()) or 1.0
            error = float(mx.abs(result.astype(mx.float64) - exact).max()) / scale
            if math.isnan(error):
                return error
            worst = max(worst, error)
        return worst


def luck_of_few(result: mx.array) -> float:
    """An addition to limits that come from composed results in a 16-bit format, relative to the largest number. Among
    few numbers the composed result may be exact by chance, while ours is rounded."""
    if result.size > 4096:
        return 0.0
    unit = {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}[result.dtype]
    return unit if result.size <= FEW else unit / 2


def error_and_limit(case: Case, arrays: list[mx.array]) -> tuple[float, float]:
    """The op's error on ``arrays``, and its limit."""
    ours, plain = results_of(case.spec.function, case), results_of(case.spec.reference, case)
    with mx.stream(mx.cpu):
        truth = plain(*(x.astype(mx.float64) for x in arrays))
        mx.eval(truth)
    results = ours(*arrays)
    error = largest_error(results, truth)
    if case.dtype == mx.float32:
        return error, case.spec.float32_tolerance
    with mx.stream(mx.cpu):
        composed = largest_error(plain(*arrays), truth)
    factor = GRADIENT_FACTOR if case.gradient else OUTPUT_FACTOR
    luck = max(luck_of_few(result) for result in results if result.dtype != mx.float32)
    return error, factor * composed + FLOOR + luck


def time_both(case: Case, arrays: list[mx.array], rounds: int = 5) -> dict[str, Timing]:
    """Times the op and its definition in MLX ops, interleaved."""
    ours, plain = results_of(case.spec.function, case), results_of(case.spec.reference, case)
    contestants = {"ours": lambda: mx.eval(ours(*arrays)), "MLX": lambda: mx.eval(plain(*arrays))}
    return measure(contestants, rounds=rounds, least_seconds=0.004, budget_seconds=1.5)


def _peak_memory(case: Case, arrays: list[mx.array]) -> int:
    function = results_of(case.spec.function, case)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(*arrays))
    return max(0, mx.get_peak_memory() - before)


def _times(case: Case, arrays: list[mx.array]) -> Times:
    memory = _peak_memory(case, arrays)
    timings = time_both(case, arrays)
    return Times(
        timings["ours"].median,
        timings["MLX"].median,
        ratio(timings["MLX"], timings["ours"]),
        max(timing.spread for timing in timings.values()),
        memory,
    )


def run_case(case: Case, timed: bool = True) -> Row:
    """Checks one case, and times it if ``timed``."""
    row = (case.spec.name, case.spec.variant, case.what, dtype_name(case.dtype), case.shape, case.backend)
    device = mx.cpu if case.backend == "cpu" else mx.gpu
    with mx.stream(device):
        arrays = inputs(case)
        with trace() as log:
            error, limit = error_and_limit(case, arrays)
        kernels = [event.device.partition(" ")[0] for event in log.events if not event.is_fallback]
        times = _times(case, arrays) if timed else None
    return Row(*row, kernels[0] if kernels else "MLX ops", error, limit, times, "", represents_op(case))


def run(chosen: list[Case], seed: int, time_all: bool = False) -> Iterator[Row]:
    """Runs every case, and yields its row. A case that raises fails; the others still run.

    The inputs of a case depend on the seed and the case alone, so a run of one op repeats its part of a longer run.
    """
    keep_float32_exact()
    for case in chosen:
        mx.random.seed(seed + zlib.crc32(case.label.encode()))
        try:
            yield run_case(case, time_all or represents_op(case))
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            row = (case.spec.name, case.spec.variant, case.what, dtype_name(case.dtype), case.shape, case.backend)
            yield Row(*row, exception=what)
