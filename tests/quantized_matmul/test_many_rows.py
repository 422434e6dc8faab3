"""Products x W^T and x W of more than 8 rows: an error bound for each number, extremes of x and of scales, and
independence of rows. test_op.py tests what holds for any number of rows."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from quantized_numpy import FORMATS, Matrix, draw, unpack
from support import assert_same_bits, to_numpy

pytestmark = pytest.mark.cpu_only

FOUR_BITS = FORMATS[7]
CHUNK = 256  # terms that the kernels add up at once
# Half the last digit of results; and how far integers are off: of x against the largest number of a group (x W^T), and
# of x times scales against the largest x and scale of a chunk, either less than half the power of two above it (x W).
HALF_A_UNIT = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
OFF_BY = {mx.float32: 2.0**-23, mx.float16: 2.0**-15, mx.bfloat16: 2.0**-15}
OFF_BY_PLAIN = {
    mx.float32: 1.5 * 4 / (127 * 2**16),
    mx.float16: 0.51 * 4 / (127 * 2**8),
    mx.bfloat16: 0.51 * 4 / (127 * 2**8),
}

each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
each_affine_format = pytest.mark.parametrize("format", [format for format in FORMATS if format.affine], ids=str)
each_product = pytest.mark.parametrize("transpose", [True, False], ids=["x W^T", "x W"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def multiply(x: mx.array, matrix: Matrix, transpose: bool = True) -> mx.array:
    with mlx_anvil.strict():
        return mlx_anvil.quantized_matmul(x, *matrix.arrays, transpose=transpose, **matrix.format.options)


def product(x: np.ndarray, matrix: Matrix, transpose: bool = True) -> np.ndarray:
    return x @ (matrix.weights.T if transpose else matrix.weights)


def scales_and_codes(matrix: Matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, bias and code of each affine weight, with half their range subtracted from the codes and added to the
    biases."""
    scales, biases = (to_numpy(part).repeat(matrix.format.group_size, -1) for part in matrix.arrays[1:])
    half = 2 ** (matrix.format.bits - 1)
    return scales, unpack(np.array(matrix.w), matrix.format.bits) - half, biases + half * scales


def terms_of(matrix: Matrix) -> np.ndarray:
    """Upper bounds of the magnitudes that are summed per weight, for an x of 1."""
    if not matrix.format.affine:
        return np.abs(matrix.weights)
    scales, codes, biases = scales_and_codes(matrix)
    return np.abs(scales * codes) + np.abs(biases)


def rounding(result: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    # Processors take subnormal numbers for zero where they round to bfloat16.
    smallest = {mx.float32: 2.0**-149, mx.float16: 2.0**-25, mx.bfloat16: 2.0**-126}
    return HALF_A_UNIT[dtype] * np.abs(result) + smallest[dtype]


def limits(x: np.ndarray, matrix: Matrix, dtype: mx.Dtype) -> np.ndarray:
    """Error bound of each result of x W^T: rounding of x to integers, of the sums in float32, and of the result."""
    size, weights = matrix.format.group_size, matrix.weights
    per_group = (-1, x.shape[1] // size, size)
    largest = np.abs(x).reshape(per_group).max(-1).repeat(size, -1)
    sums = (per_group[1] + 8) * 2.0**-23 * np.abs(x) @ terms_of(matrix).T
    return 1.01 * (OFF_BY[dtype] * largest @ np.abs(weights).T + sums + rounding(x @ weights.T, dtype))


def plain_limits(x: np.ndarray, matrix: Matrix, dtype: mx.Dtype) -> np.ndarray:
    """Error bound of each result of x W: rounding of x times scales to integers where integers are used, and the rest
    as above."""
    sums = (x.shape[1] / 16 + 16) * 2.0**-23 * np.abs(x) @ terms_of(matrix)
    if not matrix.format.affine or matrix.format.group_size == 32:
        return 1.01 * (
            sums + x.shape[1] * 2.0**-24 * np.abs(x) @ np.abs(matrix.weights) + rounding(x @ matrix.weights, dtype)
        )
    scales, codes, _ = scales_and_codes(matrix)
    integers = np.zeros((x.shape[0], codes.shape[1]))
    for chunk in range(0, x.shape[1], CHUNK):
        rows = slice(chunk, chunk + CHUNK)
        steps = np.abs(x[:, rows]).max(1)[:, None] * np.abs(scales[rows]).max(0)
        integers += OFF_BY_PLAIN[dtype] * steps * np.abs(codes[rows]).sum(0)
    return 1.01 * (integers + sums + rounding(x @ matrix.weights, dtype))


def assert_plain_within_limits(x: mx.array, matrix: Matrix) -> None:
    exact = to_numpy(x) @ matrix.weights
    error = np.abs(to_numpy(multiply(x, matrix, transpose=False)) - exact)
    assert (error <= plain_limits(to_numpy(x), matrix, x.dtype)).all()


@each_dtype
@each_format
def test_every_number_is_within_its_bound(format, dtype, rng):
    """Sizes near those of tiles, panels and chunks; huge and tiny numbers in one group; groups of zeros."""
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
def test_every_number_of_the_plain_product_is_within_its_bound(format, dtype, rng):
    """As above, and with more columns than one strip has."""
    for rows, outputs, columns in (
        (9, 33, 3 * format.group_size),
        (12, CHUNK, 128),
        (31, CHUNK + 1, 5 * 128),
        (10, 2 * CHUNK + 71, 9 * 128),
    ):
        matrix = draw(format, (outputs, columns), rng, dtype)
        x = rng.standard_normal((rows, outputs)) * 2.0 ** rng.integers(-14, 7, (rows, outputs))
        x[rng.integers(rows), :CHUNK] = 0
        x[rng.integers(rows)] = 0
        assert_plain_within_limits(mx.array(x.astype(np.float32)).astype(dtype), matrix)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@each_affine_format
@pytest.mark.parametrize(
    ("x_power", "scale_power"), [(-100, 90), (100, -125), (60, -135), (-20, -100), (-133, 100), (90, 20)]
)
def test_plain_product_of_huge_and_tiny_numbers(format, dtype, x_power, scale_power, rng):
    """Huge and tiny factors whose products are ordinary numbers. (The other formats have scales of one byte.)"""
    matrix = draw(format, (70, 256), rng)
    powers = [(np.array(part) * 2.0**scale_power).astype(np.float32) for part in matrix.arrays[1:]]
    matrix = Matrix(format, matrix.w, *(mx.array(part).astype(dtype) for part in powers))
    x = rng.standard_normal((12, 70)) * 2.0**x_power
    assert_plain_within_limits(mx.array(x.astype(np.float32)).astype(dtype), matrix)


@each_product
@each_dtype
@each_format
def test_rows_do_not_depend_on_their_number(format, dtype, transpose, rng):
    matrix = draw(format, (45, 3 * 128) if transpose else (3 * 128, 128), rng, dtype)
    x = mx.random.normal((25, 3 * 128)).astype(dtype)
    all_rows = multiply(x, matrix, transpose)
    for first, count in ((0, 9), (3, 12), (8, 17), (1, 24)):
        rows = slice(first, first + count)
        assert_same_bits(multiply(x[rows], matrix, transpose), mx.contiguous(all_rows[rows]))


@each_product
@each_dtype
@each_format
def test_numbers_that_are_not_finite(format, dtype, transpose, rng):
    """Rows that are not finite match float32 arithmetic and do not affect the others."""
    matrix = draw(format, (37, 2 * 128) if transpose else (2 * 128, 128), rng, dtype)
    clean = rng.standard_normal((14, 2 * 128))
    spoiled = clean.copy()
    spoiled[[1, 4, 4, 9, 13], [200, 0, 255, 31, 17]] = np.inf, -np.inf, np.inf, np.nan, -np.inf
    given = [mx.array(x.astype(np.float32)).astype(dtype) for x in (clean, spoiled)]
    results = [to_numpy(multiply(x, matrix, transpose)) for x in given]
    with np.errstate(invalid="ignore"):
        exact = product(spoiled, matrix, transpose)
    others = np.isfinite(spoiled).all(axis=1)
    np.testing.assert_array_equal(results[1][others], results[0][others])
    np.testing.assert_array_equal(results[1][~others], exact[~others])
    assert np.isnan(results[1][9]).all()


@each_product
@each_format
def test_all_rows_not_finite(format, transpose, rng):
    matrix = draw(format, (33, 128), rng)
    x = mx.full((11, 128 if transpose else 33), np.nan)
    assert np.isnan(to_numpy(multiply(x, matrix, transpose))).all()


@pytest.mark.parametrize("part", [1, 2], ids=["scale", "bias"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@each_dtype
def test_plain_product_of_scales_that_are_not_finite(dtype, value, part, rng):
    """Groups whose scale or bias is not finite match float32 arithmetic. The others stay within their bounds."""
    clean = draw(FOUR_BITS, (300, 256), rng, dtype)
    parts = [np.array(numbers.astype(mx.float32)) for numbers in clean.arrays[1:]]
    parts[part - 1][290, 2] = value
    matrix = Matrix(FOUR_BITS, clean.w, *(mx.array(numbers).astype(dtype) for numbers in parts))
    x = mx.random.normal((13, 300)).astype(dtype)
    result = to_numpy(multiply(x, matrix, transpose=False))
    group = np.arange(256) // 64 == 2
    with np.errstate(invalid="ignore"):
        exact = to_numpy(x) @ matrix.weights[:, group]
    assert not np.isfinite(exact).any()
    np.testing.assert_array_equal(result[:, group], exact)
    error = np.abs(result - to_numpy(x) @ clean.weights)[:, ~group]
    assert (error <= plain_limits(to_numpy(x), clean, dtype)[:, ~group]).all()


@each_product
@each_dtype
def test_more_rows_than_are_packed_at_once(dtype, transpose, rng):
    matrix = draw(FOUR_BITS, (19, 128), rng, dtype)
    x = mx.random.normal((1030, 128 if transpose else 19)).astype(dtype)
    error = np.abs(to_numpy(multiply(x, matrix, transpose)) - product(to_numpy(x), matrix, transpose))
    assert (error <= (limits if transpose else plain_limits)(to_numpy(x), matrix, dtype)).all()
