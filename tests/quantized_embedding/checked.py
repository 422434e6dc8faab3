"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype
from quantized_numpy import Format, any_format_of_each_kind, assert_rounded, draw


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    for format in any_format_of_each_kind(rng):
        for matrix_units in (False, True):  # each has its own kernel
            yield Checked(partial(_look_up, rng, format), matrix_units=matrix_units)


def _look_up(rng: np.random.Generator, format: Format) -> None:
    dtype, ids = any_dtype(rng), mx.array([[8, 0, 3], [3, -1, -9]])
    matrix = draw(format, (9, 3 * 128), rng, dtype)
    result = mlx_anvil.quantized_embedding(ids, *matrix.arrays, **format.options, dtype=dtype)
    assert_rounded(result, matrix.weights[np.array(ids)], dtype)
