"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    EVERY_FORMAT,
    FEW,
    FORMATS,
    MODEL_DTYPES,
    PROMPT,
    Call,
    for_matrix_units,
    matrix,
)


def every_kernel() -> Iterator[Call]:
    for dtype, options in product(DTYPES, EVERY_FORMAT):
        table = mx.quantize(mx.zeros((5, 128), dtype), **options)
        for ids in (mx.zeros((3,), mx.int32), mx.zeros((3,), mx.uint64)):
            look_up = partial(mlx_anvil.quantized_embedding, ids, *table, dtype=dtype, **options)
            yield look_up
            yield for_matrix_units(look_up)


def of_models() -> Iterator[Call]:
    for dtype, form in product(MODEL_DTYPES, FORMATS):
        for ids in (mx.zeros((1, 1), mx.int32), mx.zeros((1, PROMPT), mx.uint32)):
            yield partial(mlx_anvil.quantized_embedding, ids, *matrix(dtype, FEW, 256, **form), dtype=dtype, **form)
