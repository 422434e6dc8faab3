"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from checked_calls import Checked, any_dtype
from tests.flash_attention.cases import check, draw
from tests.flash_attention.quantized_cases import FOUR_BITS, quantized
from tests.flash_attention.test_ragged import check as check_ragged
from tests.flash_attention.test_ragged import ragged


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    def call(heads, lengths, dim, feature="none", matrix_units=False) -> Checked:
        dtype = any_dtype(rng, (mx.float16, mx.bfloat16)) if matrix_units else any_dtype(rng)
        return Checked(lambda: check(draw(heads, lengths, (dim, dim), dtype, feature)), matrix_units)

    yield call((2, 1), (37, 45), 64, "sinks")
    yield call((1, 1), (33, 40), 192, "causal")
    for dim in (32, 80, 96, 128, 256):  # gradients in keys and values from stored weights
        yield call((1, 1), (33, 40), dim)
    # With matrix units, gradients in keys and values come from one kernel, and for wide heads from two.
    yield Checked(lambda: check(draw((2, 1), (37, 45), (64, 64), mx.float32)), True)
    yield call((1, 1), (33, 40), 192, matrix_units=True)
    # Decodes by the rows of a group, which are heads times queries; keys in parts.
    for rows in (1, 2, 4, 8):
        yield call((rows, 1), (1, 300), 64)
    yield call((2, 1), (1, 40), 512)
    yield call((2, 1), (37, 45), 64, "causal", matrix_units=True)
    yield call((1, 1), (70, 75), 128, "causal", matrix_units=True)
    yield call((133, 1), (65, 17), 128, matrix_units=True)  # as many blocks as tall tiles take
    yield call((2, 1), (1, 75), 64, matrix_units=True)
    for dim in (64, 128):
        case = draw((2, 1), (70, 230), (dim, dim), any_dtype(rng, (mx.float16, mx.bfloat16)), "window+causal")
        yield Checked(lambda case=case: check(case), group_products=True)
    # Ragged batches, in the kernels of prompts and decodes.
    for form, lengths in (
        ("padded", ((1, 200), (2, 9))),
        ("padded", ((33, 40), (4, 9))),
        ("left-padded", ((1, 200), (2, 9))),
        ("packed", ((33, 40), (4, 9))),
    ):
        case = ragged(form, any_dtype(rng), "causal", lengths)
        yield Checked(lambda form=form, case=case, lengths=lengths: check_ragged(form, case, lengths))
    for form in ("padded", "packed"):
        lengths = ((70, 90), (0, 9), (17, 0), (4, 9))
        case = ragged(form, any_dtype(rng, (mx.float16, mx.bfloat16)), "additive mask", lengths)
        yield Checked(lambda form=form, case=case, lengths=lengths: check_ragged(form, case, lengths), True)
    yield from quantized_templates(rng)


def quantized_templates(rng: np.random.Generator) -> Iterator[Checked]:
    def call(heads, lengths, dim, matrix_units=False) -> Checked:
        dtype = any_dtype(rng, (mx.float16, mx.bfloat16)) if matrix_units else any_dtype(rng)
        case = quantized(draw(heads, lengths, (dim, dim), dtype))
        return Checked(lambda: case.assert_right(*case.attend()), matrix_units)

    for rows in (1, 4, 8):
        yield call((rows, 1), (1, 300), 64)
    yield call((2, 1), (1, 40), 512)
    yield call((2, 1), (37, 45), 64)
    yield call((2, 1), (37, 45), 64, matrix_units=True)
    for dim in (64, 128):
        yield call((2, 1), (1, 75), dim, matrix_units=True)
    for dim in (64, 128):
        case = quantized(draw((2, 1), (70, 130), (dim, dim), any_dtype(rng, (mx.float16, mx.bfloat16)), "causal"))
        yield Checked(lambda case=case: case.assert_right(*case.attend()), group_products=True)
    wide = quantized(draw((2, 1), (1, 75), (128, 128), mx.bfloat16), {**FOUR_BITS, "bits": 8})
    yield Checked(lambda: wide.assert_right(*wide.attend()), matrix_units=True)
