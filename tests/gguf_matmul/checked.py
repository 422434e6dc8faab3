"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype
from gguf_blocks import BLOCKS, MODES, GgufMatrix
from mlx_anvil.reference import DTYPES
from quantized_numpy import assert_rounded, dense_factor
from support import to_numpy

HALVES = (mx.float16, mx.bfloat16)


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    # Kernels are for 1, 2, 4 or 8 rows of x, for up to 16, 32, or more. A plain product sums 300 rows of w in parts.
    # quantized_matmul takes tiles from 3 rows on, and quantized_gemv none.
    modes = cycle(rng.permutation(MODES))
    for rows in (1, 2, 4, 8, 13, 25, 33):
        yield Checked(partial(_multiply, rng, next(modes), rows, 45))
        yield Checked(partial(_multiply, rng, next(modes), rows, 300, transpose=False))
        if rows <= 8:
            yield Checked(partial(_multiply, rng, next(modes), rows, 45, op=mlx_anvil.quantized_gemv))
    for mode in MODES:
        yield Checked(partial(_look_up, rng, mode))
    for mode, transpose in zip(modes, (True, False), strict=False):  # dequantised for a dense product
        run = partial(_multiply, rng, mode, 33, 40, transpose=transpose, dtypes=HALVES, dense=True)
        yield Checked(run, matrix_units=True)


def columns_of(mode: str) -> int:
    """No multiple of what a threadgroup takes at a time."""
    return 288 if BLOCKS[mode][1] == 32 else 768


def _multiply(
    rng: np.random.Generator,
    mode: str,
    rows: int,
    outputs: int,
    transpose: bool = True,
    dtypes: tuple[mx.Dtype, ...] = DTYPES,
    dense: bool = False,
    op: Callable[..., mx.array] | None = None,
) -> None:
    matrix = GgufMatrix.random(rng, mode, outputs, columns_of(mode))
    weights = matrix.weights.astype(np.float64)
    terms = weights.shape[1 if transpose else 0]
    x = mx.array(rng.standard_normal((rows, terms)).astype(np.float32)).astype(any_dtype(rng, dtypes))
    multiply = op or partial(mlx_anvil.quantized_matmul, transpose=transpose)
    exact = to_numpy(x) @ (weights.T if transpose else weights)
    assert_rounded(multiply(x, matrix.w, mode=mode), exact, x.dtype, factor=dense_factor(rows, dense))


def _look_up(rng: np.random.Generator, mode: str) -> None:
    dtype, ids = any_dtype(rng), mx.array([[8, 0, 3], [3, -1, -9]])
    matrix = GgufMatrix.random(rng, mode, 9, columns_of(mode))
    result = mlx_anvil.quantized_embedding(ids, matrix.w, mode=mode, dtype=dtype)
    assert mx.array_equal(result, mx.array(matrix.weights[np.array(ids)]).astype(dtype))
