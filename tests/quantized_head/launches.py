"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    EVERY_FORMAT,
    FORMATS,
    MANY,
    MODEL_DTYPES,
    Call,
    columns_of,
    for_matrix_units,
    matrix,
)


def every_kernel() -> Iterator[Call]:
    """One block of rows of w; several blocks with one merge; several merges, of which the last writes the results."""
    for dtype, options in product(DTYPES, EVERY_FORMAT):
        for outputs in (64, 128, 4096):
            head = mx.quantize(mx.zeros((outputs, 128), dtype), **options)
            for rows in (*range(1, 10), 129):
                x = mx.zeros((rows, 128), dtype)
                yield lambda x=x, m=head, o=options: mlx_anvil.quantized_argmax(x, *m, **o)
                yield lambda x=x, m=head, o=options: mlx_anvil.quantized_topk(x, *m, k=64, **o)
        # 128 are kept of too many rows to store their logits: four rows in a threadgroup.
        yield lambda x=x, m=head, o=options: mlx_anvil.quantized_topk(x, *m, k=128, **o)
    # With matrix units the logits are stored: one block of them, and several.
    for dtype, outputs in product(MODEL_DTYPES, (64, 4096)):
        head, x = mx.quantize(mx.zeros((outputs, 256), dtype)), mx.zeros((1, 256), dtype)
        yield for_matrix_units(lambda x=x, m=head: mlx_anvil.quantized_argmax(x, *m))


def of_models() -> Iterator[Call]:
    for dtype, form in product(MODEL_DTYPES, FORMATS):
        for rows, columns in product((1, 8), columns_of(form)):
            x = mx.zeros((rows, columns), dtype)
            yield partial(mlx_anvil.quantized_argmax, x, *matrix(dtype, MANY, columns, **form), **form)
        # A vocabulary that one merge is enough for, and one that takes two.
        for vocabulary in (MANY, 2 * MANY + 4096):
            head = matrix(dtype, vocabulary, 256, **form)
            for sample in (mlx_anvil.quantized_argmax, partial(mlx_anvil.quantized_topk, k=64)):
                yield partial(sample, mx.zeros((1, 256), dtype), *head, **form)
