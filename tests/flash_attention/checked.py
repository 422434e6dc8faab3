"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from checked_calls import Checked, any_dtype
from tests.flash_attention.cases import check, draw


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    def call(heads, lengths, dim, feature="none", matrix_units=False) -> Checked:
        dtype = any_dtype(rng, (mx.float16, mx.bfloat16)) if matrix_units else any_dtype(rng)
        return Checked(lambda: check(draw(heads, lengths, (dim, dim), dtype, feature)), matrix_units)

    # Gradients in keys and values by one kernel, and for wide heads by two.
    yield call((2, 1), (37, 45), 64, "sinks")
    yield call((1, 1), (33, 40), 192, "causal")
    # Decodes by the rows of a group, which are heads times queries; keys in parts.
    for rows in (1, 2, 4, 8):
        yield call((rows, 1), (1, 300), 64)
    yield call((2, 1), (1, 40), 512)
    yield call((2, 1), (37, 45), 64, "causal", matrix_units=True)
    yield call((1, 1), (70, 75), 128, "causal", matrix_units=True)
    yield call((133, 1), (65, 17), 128, matrix_units=True)  # as many blocks as tall tiles take
    yield call((2, 1), (1, 75), 64, matrix_units=True)
