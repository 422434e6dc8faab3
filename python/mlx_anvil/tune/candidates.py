"""What is measured: the choices of ``csrc/common/choices.h``, the values to try, and the calls that tell them apart."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import mlx.core as mx

import mlx_anvil

GROUP = 64
# Relative to the largest magnitude of a result. A wrong kernel is wrong by more.
LIMITS = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}

Call = Callable[[], mx.array]


@dataclass(frozen=True)
class Workload:
    """A call that a choice may change.

    Attributes:
        label: for people.
        size: what the choice's value is compared with.
        make: makes the inputs, and returns the call.
    """

    label: str
    size: int
    make: Callable[[], Call]


@dataclass(frozen=True)
class Candidates:
    """A choice and its values.

    Attributes:
        name: as in the file.
        values: those to try.
        behaviour: what a value does to a workload of a size. Values that do the same are measured once.
        workloads: the calls; small ones for the simulator.
        backends: where the choice exists, and can be measured.
    """

    name: str
    values: tuple[int, ...]
    behaviour: Callable[[int, int], Hashable]
    workloads: Callable[[bool], list[Workload]]
    backends: tuple[str, ...] = ("metal", "cuda", "simulator")


def _normal(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def _norm(rows: int, columns: int, *, gradient: bool = False) -> Workload:
    def make() -> Call:
        x, weight = _normal(rows, columns), _normal(columns)

        def norm(x: mx.array) -> mx.array:
            return mlx_anvil.rms_norm(x, weight)

        if not gradient:
            return lambda: norm(x)
        cotangent = _normal(rows, columns)
        return lambda: mx.vjp(norm, [x], [cotangent])[1][0]

    return Workload(f"rms_norm{' gradient' * gradient} {rows} x {columns}", columns, make)


def _product(rows: int, outputs: int, columns: int, *, size: int, bits: int = 4) -> Workload:
    def make() -> Call:
        matrix = mx.quantize(_normal(outputs, columns, dtype=mx.float32), group_size=GROUP, bits=bits)
        w, scales, biases = matrix[0], matrix[1].astype(mx.bfloat16), matrix[2].astype(mx.bfloat16)
        x = _normal(rows, columns)
        mx.eval(w, scales, biases)
        return lambda: mlx_anvil.quantized_matmul(x, w, scales, biases, group_size=GROUP, bits=bits)

    return Workload(f"{bits}-bit product, {rows} row{'s' * (rows > 1)}, {columns} -> {outputs}", size, make)


def _attention(queries: int, heads: int = 8, dim: int = 128) -> Workload:
    def make() -> Call:
        q = _normal(1, heads, queries, dim)
        k, v = (_normal(1, heads // 4, queries, dim) for _ in range(2))
        return lambda: mlx_anvil.flash_attention(q, k, v, mask="causal")

    return Workload(f"causal attention, {queries} queries, {heads} heads of {dim}", queries, make)


def _gradients(queries: int, heads: int = 8, dim: int = 128) -> Workload:
    def make() -> Call:
        x = [_normal(1, heads, queries, dim) for _ in range(4)]

        def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return mlx_anvil.flash_attention(q, k, v, mask="causal")

        return lambda: mx.concatenate(mx.vjp(attend, x[:3], x[3:])[1])

    return Workload(f"gradients of causal attention, {queries} queries, {heads} heads of {dim}", queries, make)


def _norms(small: bool) -> list[Workload]:
    sizes = ((3, 200), (2, 1024)) if small else ((1, 4096), (512, 2048), (4096, 4096), (1024, 8192))
    return [_norm(*size, gradient=gradient) for size in sizes for gradient in (False, True)]


def _gemvs(small: bool) -> list[Workload]:
    columns, all_outputs = (256, (64, 160)) if small else (4096, (1024, 2048, 4096, 8192, 16384))
    # 4-bit products with few rows have other kernels where there are matrix units.
    return [_product(1, outputs, columns, size=outputs, bits=8) for outputs in all_outputs]


def _rows(small: bool) -> list[Workload]:
    columns, all_rows = (256, (9, 17)) if small else (4096, (9, 16, 24, 32))
    return [_product(rows, columns, columns, size=rows) for rows in all_rows]


def _many_rows(small: bool) -> list[Workload]:
    return [_product(rows, 4096, 4096, size=rows) for rows in (9, 16, 32, 64, 128, 512)]


def _few_rows(small: bool) -> list[Workload]:
    return [_product(rows, outputs, 4096, size=rows) for rows in (2, 3, 4, 8) for outputs in (4096, 14336)]


def _prompts(small: bool) -> list[Workload]:
    return [_attention(queries) for queries in (16, 128, 512, 2048)]


def _backwards(small: bool) -> list[Workload]:
    return [_gradients(queries) for queries in (512, 2048, 4096)]


def _from(value: int, size: int) -> bool:
    return 0 < value <= size


ALL = (
    Candidates("norm.elements_per_thread", (4, 8, 16), lambda value, size: value, _norms),
    Candidates(
        "quantized_gemv.shared_outputs", (0, 1536, 3072, 4096, 6144, 12288), lambda value, size: size < value, _gemvs
    ),
    Candidates(
        "quantized_matmul.split_rows", (8, 16, 24, 32), lambda value, size: size <= value, _rows, ("metal", "simulator")
    ),
    # The simulator cannot count what MLX's kernels do.
    Candidates("quantized_matmul.mlx_rows", (0, 9, 16, 32, 64, 128, 512), _from, _many_rows, ("metal",)),
    Candidates(
        "quantized_matmul.mlx_few_rows", (0, 2, 3, 4, 8), lambda value, size: size <= value, _few_rows, ("metal",)
    ),
    # The simulator counts the same for all.
    Candidates(
        "flash_attention.stored_kb", (4096, 8192, 16384, 32768), lambda value, size: value, _backwards, ("metal",)
    ),
    Candidates("flash_attention.mlx_queries", (0, 9, 128, 512, 2048), _from, _prompts, ("metal", "cuda")),
)


def of_backend(backend: str) -> list[Candidates]:
    """The choices that ``backend`` has, and can measure."""
    return [candidates for candidates in ALL if backend in candidates.backends]
