"""Sums of codes times integers are exact, also where codes and x have their largest magnitudes and saturating
instructions would show; and rows that have no integers do not change others. With every instruction set of the CPU."""

import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from quantized_numpy import FORMATS, Format, Matrix, draw, exact_product
from support import to_numpy

pytestmark = pytest.mark.cpu_only

INTEGER_FORMATS = [format for format in FORMATS if format.mode != "mxfp8"]
ROWS = (*range(1, 9), 9, 33)
LARGEST = 127  # of a byte; with 8 bits, the largest of a row is this many steps

each_format = pytest.mark.parametrize("format", INTEGER_FORMATS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_bits = pytest.mark.parametrize("bits", [None, 16, 8])


def multiply(x: mx.array, matrix: Matrix, bits: int | None) -> mx.array:
    return mlx_anvil.quantized_matmul(x, *matrix.arrays, **matrix.format.options, activation_bits=bits)


def extreme_codes(format: Format, outputs: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of the lowest, of the largest, and of either at random."""
    # 7 and 15 are the largest e2m1, 6 and -6.
    low, high = (0, 2**format.bits - 1) if format.affine else (15, 7)
    codes = rng.choice([low, high], (outputs, columns))
    codes[0], codes[1], codes[2] = low, high, 0
    return codes


@each_format
@each_bits
def test_extreme_codes_times_extreme_x(instruction_set, format, bits, rng):
    """Both are integers, and every sum is a float32."""
    for groups in (1, 3):
        codes = extreme_codes(format, 37, groups * format.group_size, rng)
        matrix = Matrix.of_codes(format, codes)
        for rows in ROWS:
            x = rng.choice([-LARGEST, LARGEST], (rows, codes.shape[1])).astype(np.float32)
            x[0] = LARGEST if rows % 2 else -LARGEST
            result = multiply(mx.array(x), matrix, bits)
            np.testing.assert_array_equal(to_numpy(result), x @ matrix.weights.T)


@each_format
@each_dtype
@each_bits
def test_every_number_of_rows(instruction_set, format, dtype, bits, rng):
    """Odd numbers of groups and of outputs."""
    for columns, outputs in ((format.group_size, 1), (5 * format.group_size, 35)):
        matrix = draw(format, (outputs, columns), rng, dtype)
        for rows in ROWS:
            x = mx.array(rng.standard_normal((rows, columns)).astype(np.float32)).astype(dtype)
            exact = exact_product(x, matrix)
            # By how much an element of x is off, and half a unit of results.
            off = 2.0**-8 if bits == 8 else 2.0**-15 if bits == 16 or dtype != mx.float32 else 2.0**-22
            unit = {mx.float32: 2.0**-23, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
            largest = np.abs(to_numpy(x)).max(axis=-1, keepdims=True)
            limit = off * largest * np.abs(matrix.weights).sum(axis=-1) + unit * np.abs(exact) + 1e-5
            assert (np.abs(to_numpy(multiply(x, matrix, bits)) - exact) <= limit).all(), f"{rows} rows, {columns}"


@each_format
@each_bits
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e-25, 1e30])
def test_a_row_of_extremes_among_others(instruction_set, format, bits, value, rng):
    """It does not change the others."""
    columns = 3 * format.group_size
    matrix = draw(format, (21, columns), rng)
    for rows in (2, 8, 9, 33):
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        before = to_numpy(multiply(mx.array(x), matrix, bits))
        x[1] = value
        result = to_numpy(multiply(mx.array(x), matrix, bits))
        others = np.arange(rows) != 1
        np.testing.assert_array_equal(result[others], before[others])
        if math.isfinite(value):
            exact = x[1].astype(np.float64) @ matrix.weights.T
            limit = 2.0**-7 * np.abs(x[1]).max() * np.abs(matrix.weights).sum(axis=-1)
            assert (np.abs(result[1] - exact) <= limit).all()
        else:
            assert not np.isfinite(result[1]).any()
