"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype
from mlx_anvil.reference import DTYPES
from quantized_numpy import Format, any_format_of_each_kind, draw
from support import FLOAT32_TOLERANCE, to_numpy

COLUMNS, BEST = 256, 7


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    formats = any_format_of_each_kind(rng)
    # There is a kernel for each of these numbers of rows of x. 301 rows of w are several blocks, which are merged.
    for rows, format in zip(cycle((1, 2, 4, 8)), formats, strict=False):
        yield Checked(partial(_choose, rng, format, rows, 301))
    # Apple's GPUs take 3 rows and more to tiles; NVIDIA's take float32 to the same kernels as 1 row.
    for rows, format in zip((4, 8), formats, strict=False):
        yield Checked(partial(_choose, rng, format, rows, 301, (mx.float32,)), matrix_units=True)
    # With matrix units logits are stored: one block of them, and several.
    for rows, outputs in ((3, 301), (1, 2100)):
        run = partial(_choose, rng, Format("affine", 64, 4), rows, outputs, (mx.float16, mx.bfloat16))
        yield Checked(run, matrix_units=True)


def _choose(
    rng: np.random.Generator, format: Format, rows: int, outputs: int, dtypes: tuple[mx.Dtype, ...] = DTYPES
) -> None:
    dtype = any_dtype(rng, dtypes)
    matrix = draw(format, (outputs, COLUMNS), rng, dtype)
    x = mx.array(rng.standard_normal((rows, COLUMNS)).astype(np.float32)).astype(dtype)
    indices, values = mlx_anvil.quantized_topk(x, *matrix.arrays, k=BEST, **format.options)
    best = mlx_anvil.quantized_argmax(x, *matrix.arrays, **format.options)
    np.testing.assert_array_equal(np.array(best), np.array(indices)[:, 0])

    logits = to_numpy(x) @ matrix.weights.T
    unit = {mx.float32: FLOAT32_TOLERANCE, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[dtype]
    tolerance = unit * np.abs(logits).max()
    largest = -np.sort(-logits, axis=-1)[:, :BEST]
    np.testing.assert_allclose(to_numpy(values), largest, rtol=0, atol=tolerance)
    of_chosen = np.take_along_axis(logits, np.array(indices), axis=-1)
    np.testing.assert_allclose(of_chosen, largest, rtol=0, atol=tolerance)
