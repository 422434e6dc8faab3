"""Norms and RoPE for bench/cuda.py: forward passes and gradients of models' sizes, against MLX's kernels."""

from collections.abc import Callable, Iterator
from functools import partial

from harness import in_turn

import mlx.core as mx

from cuda_decoder import normal
from cuda_timing import Call, Row, compare
from mlx_anvil import layer_norm, rms_norm, rope, rope_qk
from mlx_anvil._check import dtype_name

EPS = 1e-5
BASE = 10000.0
MORE_THAN_CACHE = 200 << 20
DTYPE = mx.bfloat16


def over_sets(function: Callable[..., object], sets: list[list[mx.array]]) -> Call:
    """Calls with one set of arrays after the other, so that the GPU's cache holds none of them."""
    return in_turn([partial(function, *arrays) for arrays in sets])


def vjp_of(function: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
    """Forward pass and all gradients; the last argument is the gradient of the result."""
    return lambda *arrays: mx.vjp(function, list(arrays[:-1]), [arrays[-1]])[1]


def row_of(
    what: str,
    ours: Callable[..., object],
    mlx: Callable[..., object],
    sets: list[list[mx.array]],
    moved: int,
    copy: float | None,
) -> Row:
    contestants = {"ours": over_sets(ours, sets), "mlx": over_sets(mlx, sets)}
    return compare(f"{what} {dtype_name(DTYPE)}", contestants, work={"bytes": moved}, copy=copy)


def norm_rows(copy: float | None) -> Iterator[Row]:
    ours_rms, mlx_rms = partial(rms_norm, eps=EPS), partial(mx.fast.rms_norm, eps=EPS)
    ours_layer, mlx_layer = partial(layer_norm, eps=EPS), partial(mx.fast.layer_norm, eps=EPS)

    def ours_residual(x: mx.array, residual: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        return rms_norm(x, weight, eps=EPS, residual=residual)

    @mx.compile
    def mlx_residual(x: mx.array, residual: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        h = x + residual
        return mx.fast.rms_norm(h, weight, EPS), h

    for rows, columns in ((1, 4096), (64, 4096), (4096, 4096), (16384, 2048), (65536, 128)):
        shape = (rows, columns)
        size = rows * columns * DTYPE.size
        count = min(64, 2 + MORE_THAN_CACHE // (2 * size))
        sets = [[normal(shape, DTYPE), normal(shape, DTYPE), normal(shape, DTYPE)] for _ in range(count)]
        weight, bias = normal((columns,), DTYPE), normal((columns,), DTYPE)
        name = f"{rows}x{columns}"
        one = [[x, weight] for x, _, _ in sets]
        with_bias = [[x, weight, bias] for x, _, _ in sets]
        yield row_of(f"rms_norm {name}", ours_rms, mlx_rms, one, 2 * size, copy)
        summed = [[x, residual, weight] for x, residual, _ in sets]
        yield row_of(f"rms_norm with residual {name}", ours_residual, mlx_residual, summed, 4 * size, copy)
        yield row_of(f"layer_norm {name}", ours_layer, mlx_layer, with_bias, 2 * size, copy)
        # MLX's gradient evaluates no forward pass that nothing reads; neither does ours.
        back = [[*arrays, d_y] for arrays, (_, d_y, _) in zip(one, sets, strict=True)]
        yield row_of(f"rms_norm gradients {name}", vjp_of(ours_rms), vjp_of(mlx_rms), back, 3 * size, copy)
        back = [[*arrays, d_y] for arrays, (_, d_y, _) in zip(with_bias, sets, strict=True)]
        yield row_of(f"layer_norm gradients {name}", vjp_of(ours_layer), vjp_of(mlx_layer), back, 3 * size, copy)


def rope_rows(copy: float | None) -> Iterator[Row]:
    def theirs(x: mx.array) -> mx.array:
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=BASE, scale=1.0, offset=0)

    def ours(x: mx.array) -> mx.array:
        return rope(x, x.shape[-1], traditional=False, base=BASE)

    def ours_of_both(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        return rope_qk(q, k, q.shape[-1], traditional=False, base=BASE)

    heads, kv_heads, dim = 32, 8, 128
    for length in (1, 512, 4096):
        size = length * dim * DTYPE.size
        count = min(64, 2 + MORE_THAN_CACHE // (2 * heads * size))
        sets = [[normal((1, n, length, dim), DTYPE) for n in (heads, kv_heads)] for _ in range(count)]
        q_alone = [[q] for q, _ in sets]
        yield row_of(f"rope {heads} heads, length {length}", ours, theirs, q_alone, 2 * heads * size, copy)
        what = f"rope_qk {heads}/{kv_heads} heads, length {length}"
        moved = 2 * (heads + kv_heads) * size
        yield row_of(what, ours_of_both, lambda q, k: (theirs(q), theirs(k)), sets, moved, copy)
