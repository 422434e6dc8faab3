"""Products of more rows than the kernels of few rows take, x W^T: bounds of each number by itself, extremes of x, and rows
that do not depend on each other. What holds for any number of rows is in test_quantized_products.py."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from quantized_numpy import FORMATS, Matrix, draw, unpack
from support import assert_same_bits, to_numpy

pytestmark = pytest.mark.cpu_only

CHUNK = 256  # columns that the kernel takes at once
# Half the last digit of results; and of x as integers, against the largest number of a group.
HALF_A_UNIT = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
OFF_BY = {mx.float32: 2.0**-23, mx.float16: 2.0**-15, mx.bfloat16: 2.0**-15}

each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def multiply(x: mx.array, matrix: Matrix) -> mx.array:
    with mlx_anvil.strict():
        return mlx_anvil.quantized_matmul(x, *matrix.arrays, **matrix.format.options)


def limits(x: np.ndarray, matrix: Matrix, dtype: mx.Dtype) -> np.ndarray:
    """How far each result may be off: x by what integers leave of it, sums by what float32 does to the terms, which are
    those of codes less half their range and of the bias that goes with these; and the result as it is rounded."""
    size, weights = matrix.format.group_size, matrix.weights
    per_group = (-1, x.shape[1] // size, size)
    largest = np.abs(x).reshape(per_group).max(-1).repeat(size, -1)
    terms = np.abs(weights)
    if matrix.format.affine:
        scales, biases = (to_numpy(part).repeat(size, -1) for part in matrix.arrays[1:])
        half = 2 ** (matrix.format.bits - 1)
        codes = unpack(np.array(matrix.w), matrix.format.bits)
        terms = np.abs(scales * (codes - half)) + np.abs(biases + half * scales)
    sums = (per_group[1] + 8) * 2.0**-23 * np.abs(x) @ terms.T
    smallest = 2.0**-25 if dtype == mx.float16 else 0.0
    result = HALF_A_UNIT[dtype] * np.abs(x @ weights.T) + smallest
    return 1.01 * (OFF_BY[dtype] * largest @ np.abs(weights).T + sums + result)


@each_dtype
@each_format
def test_every_number_is_within_its_bound(format, dtype, rng):
    """Sizes around those of tiles, panels and chunks; huge and tiny numbers in one group, and groups of zeros."""
    for rows, outputs, columns in ((9, 33, CHUNK + format.group_size), (12, 16, 128), (31, 70, 2 * CHUNK)):
        matrix = draw(format, (outputs, columns), rng, dtype)
        x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-14, 7, (rows, columns))
        x[rng.integers(rows), : format.group_size] = 0
        x[rng.integers(rows)] = 0
        given = mx.array(x.astype(np.float32)).astype(dtype)
        x = to_numpy(given)
        error = np.abs(to_numpy(multiply(given, matrix)) - x @ matrix.weights.T)
        assert (error <= limits(x, matrix, dtype)).all()


@each_dtype
@each_format
def test_rows_do_not_depend_on_their_number(format, dtype, rng):
    matrix = draw(format, (45, 3 * 128), rng, dtype)
    x = mx.random.normal((25, 3 * 128)).astype(dtype)
    all_rows = multiply(x, matrix)
    for first, count in ((0, 9), (3, 12), (8, 17), (1, 24)):
        rows = slice(first, first + count)
        assert_same_bits(multiply(x[rows], matrix), mx.contiguous(all_rows[rows]))


@each_dtype
@each_format
def test_numbers_that_are_not_finite(format, dtype, rng):
    """Their rows are as float32 has them; the others as if they were not there."""
    matrix = draw(format, (37, 2 * 128), rng, dtype)
    clean = rng.standard_normal((14, 2 * 128))
    spoiled = clean.copy()
    spoiled[[1, 4, 4, 9, 13], [200, 0, 255, 31, 17]] = np.inf, -np.inf, np.inf, np.nan, -np.inf
    results = [to_numpy(multiply(mx.array(x.astype(np.float32)).astype(dtype), matrix)) for x in (clean, spoiled)]
    with np.errstate(invalid="ignore"):
        exact = spoiled @ matrix.weights.T
    others = np.isfinite(spoiled).all(axis=1)
    np.testing.assert_array_equal(results[1][others], results[0][others])
    np.testing.assert_array_equal(results[1][~others], exact[~others])
    assert np.isnan(results[1][9]).all()


@each_format
def test_all_rows_not_finite(format, rng):
    matrix = draw(format, (33, 128), rng)
    assert np.isnan(to_numpy(multiply(mx.full((11, 128), np.nan), matrix))).all()


@each_dtype
def test_more_rows_than_are_packed_at_once(dtype, rng):
    matrix = draw(FORMATS[7], (19, 128), rng, dtype)
    x = mx.random.normal((1030, 128)).astype(dtype)
    result = to_numpy(multiply(x, matrix))
    assert (np.abs(result - to_numpy(x) @ matrix.weights.T) <= limits(to_numpy(x), matrix, dtype)).all()
