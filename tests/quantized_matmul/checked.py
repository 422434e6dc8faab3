"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype
from mlx_anvil.reference import DTYPES
from quantized_numpy import Format, any_format_of_each_kind, assert_rounded, dense_factor, draw
from support import to_numpy

COLUMNS = 256
HALVES = (mx.float16, mx.bfloat16)


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    # Kernels are for 1, 2, 4 or 8 rows of x, for up to 16, 32, or more. A plain product sums 300 rows of w in parts.
    # quantized_matmul takes tiles from 3 rows on, and quantized_gemv none.
    formats = cycle(any_format_of_each_kind(rng))
    for rows in (1, 2, 4, 8, 13, 25, 33):
        yield Checked(partial(_multiply, rng, next(formats), rows, 45))
        yield Checked(partial(_multiply, rng, next(formats), rows, 300, transpose=False))
        if rows <= 8:
            yield Checked(partial(_multiply, rng, next(formats), rows, 45, op=mlx_anvil.quantized_gemv))
            yield Checked(partial(_swiglu, rng, next(formats), rows, 45))
    for call in (
        # Apple's GPUs take 3 gated rows and more to tiles; NVIDIA's take float32 to the same kernels as 1 row.
        partial(_swiglu, rng, next(formats), 4, 45, dtypes=(mx.float32,)),
        partial(_swiglu, rng, next(formats), 8, 45, dtypes=(mx.float32,)),
        partial(_multiply, rng, next(formats), 33, 45, dtypes=(mx.float32,)),
        partial(_multiply, rng, next(formats), 33, 300, False, dtypes=(mx.float32,)),
    ):
        yield Checked(call, matrix_units=True)
    # Tiles for few, several and many rows of w, of which a swiglu has twice as many.
    for (outputs, group), call in product(((37, 32), (4667, 64), (65539, 128)), (_multiply, _swiglu)):
        several = outputs if call is _multiply else outputs // 2
        run = partial(call, rng, Format("affine", group, 4), 2, several, dtypes=HALVES)
        yield Checked(run, matrix_units=True)
    # With matrix units: each tile of quantized_gemm, and many rows dequantised for a dense product.
    for format, (rows, outputs) in product(any_format_of_each_kind(rng), ((13, 37), (20, 70), (40, 45), (200, 37))):
        run = partial(_multiply, rng, format, rows, outputs, dtypes=HALVES, dense=True)
        yield Checked(run, matrix_units=True)
    for format, rows in product(any_format_of_each_kind(rng), (40, 100, 150, 250)):  # of quantized_gemm_group
        run = partial(_multiply, rng, format, rows, 37, dtypes=HALVES, dense=True)
        yield Checked(run, group_products=True)
    for format, rows in product(any_format_of_each_kind(rng), (13, 25, 49)):
        run = partial(_multiply, rng, format, rows, 40, transpose=False, dtypes=HALVES, dense=True)
        yield Checked(run, matrix_units=True)
    for format, (rows, outputs, transpose) in zip(formats, ((9, 8457, True), (49, 37, False)), strict=False):
        run = partial(_multiply, rng, format, rows, outputs, transpose=transpose, dtypes=HALVES, dense=True)
        yield Checked(run, matrix_units=True)


def _draw_x(rng: np.random.Generator, shape: tuple[int, int], dtypes: tuple[mx.Dtype, ...]) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(any_dtype(rng, dtypes))


def _multiply(
    rng: np.random.Generator,
    format: Format,
    rows: int,
    outputs: int,
    transpose: bool = True,
    dtypes: tuple[mx.Dtype, ...] = DTYPES,
    dense: bool = False,
    op: Callable[..., mx.array] | None = None,
) -> None:
    terms = COLUMNS if transpose else outputs
    x = _draw_x(rng, (rows, terms), dtypes)
    matrix = draw(format, (outputs, COLUMNS), rng, x.dtype)
    multiply = op or partial(mlx_anvil.quantized_matmul, transpose=transpose)
    result = multiply(x, *matrix.arrays, **format.options)
    exact = to_numpy(x) @ (matrix.weights.T if transpose else matrix.weights)
    assert_rounded(result, exact, x.dtype, terms=terms, factor=dense_factor(rows, dense))


def _swiglu(
    rng: np.random.Generator, format: Format, rows: int, outputs: int, dtypes: tuple[mx.Dtype, ...] = DTYPES
) -> None:
    x = _draw_x(rng, (rows, COLUMNS), dtypes)
    x = x / 30  # no gate so large that its error is magnified
    gate, up = (draw(format, (outputs, COLUMNS), rng, x.dtype) for _ in range(2))
    result = mlx_anvil.quantized_swiglu(x, gate.arrays, up.arrays, **format.options)
    g, u = (to_numpy(x) @ matrix.weights.T for matrix in (gate, up))
    assert_rounded(result, g / (1 + np.exp(-g)) * u, x.dtype)
