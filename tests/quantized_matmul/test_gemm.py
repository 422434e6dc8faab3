"""Products of 9 and more rows whose codes go straight to matrix units (gemm_matrix.metal and gemm_plain.metal): every
tile and format, sizes that fill no tile, sums in parts, batches, and weights that are not finite. On CUDA as well."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from quantized_numpy import FLOAT_FORMATS, Format, Matrix, draw, normal
from support import assert_same_bits, to_numpy

pytestmark = pytest.mark.usefixtures("gpu_with_matrix_units")

HALVES = (mx.float16, mx.bfloat16)
GROUPS = {2: 32, 3: 64, 4: 64, 5: 128, 6: 64, 8: 32}
FORMATS = [*(Format("affine", group, bits) for bits, group in GROUPS.items()), *FLOAT_FORMATS]
FOUR_BITS = Format("affine", 64, 4)


def multiply(x: mx.array, matrix: Matrix, kernel: str, parts: bool = False, transpose: bool = True) -> mx.array:
    """Also asserts which kernels the call takes. Some NVIDIA GPUs have others for more than 32 rows
    (test_group_products.py)."""
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        result = mlx_anvil.quantized_matmul(x, *matrix.arrays, transpose=transpose, **matrix.format.options)
        mx.eval(result)
    names = [event.kernel for event in trace.events]
    if kernel == "r64n64" and support.backend == "cuda" and "_group_" in names[0]:
        return result  # with other tiles, and so other parts
    assert f"_{kernel}" in names[0]
    assert [name.split("_")[1] for name in names] == ["gemm" if transpose else "gemmplain"] + ["sum"] * parts
    return result


def assert_close(result: mx.array, x: mx.array, matrix: Matrix, transpose: bool = True) -> None:
    """Against weights that are rounded as the kernel rounds them: what is left is the sum in float32, and rounding it."""
    weights = to_numpy(mx.array(matrix.weights.astype(np.float32)).astype(x.dtype))
    weights = weights.swapaxes(-1, -2) if transpose else weights
    exact, terms = to_numpy(x) @ weights, np.abs(to_numpy(x)) @ np.abs(weights)
    unit = 2.0**-11 if x.dtype == mx.float16 else 2.0**-8
    # A weight that float32 arithmetic rounds twice may be off by its last digit.
    bound = 1.01 * unit * np.abs(exact) + 2e-6 * terms + unit * terms.max() / terms.shape[-1]
    assert (np.abs(to_numpy(result) - exact) <= bound).all()


@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("rows", "kernel"), [(9, "r16n32"), (23, "r32n64"), (50, "r64n64")])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_tiles(format, rows, kernel, dtype, rng):
    """No whole steps of columns, and scales of whole words."""
    columns = 3 * max(128, 2 * format.group_size)
    matrix, x = draw(format, (37, columns), rng, dtype), normal((rows, columns), dtype)
    assert_close(multiply(x, matrix, kernel), x, matrix)


@pytest.mark.slow
@pytest.mark.parametrize("format", [FOUR_BITS, FORMATS[-1]], ids=str)
def test_many_outputs(format, rng):
    matrix, x = draw(format, (8455, 128), rng, mx.bfloat16), normal((16, 128), mx.bfloat16)
    assert_close(multiply(x, matrix, "r16n64"), x, matrix)


@pytest.mark.parametrize(("rows", "kernel"), [(9, "r16n32"), (32, "r32n64"), (33, "r64n64")])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_parts(group, rows, kernel, rng):
    """Few outputs and many columns, in several steps each."""
    columns = 5 * 1024 if rows == 9 else 5 * 512
    matrix = draw(Format("affine", group, 4), (65, columns), rng, mx.float16)
    x = normal((rows, columns), mx.float16)
    result = multiply(x, matrix, kernel, parts=True)
    assert_close(result, x, matrix)
    assert_same_bits(multiply(x, matrix, kernel, parts=True), result)


@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("rows", "kernel"), [(9, "r16"), (23, "r32"), (50, "r64")])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_plain_tiles(format, rows, kernel, dtype, rng):
    """40 rows of w are no whole step."""
    matrix, x = draw(format, (40, 256), rng, dtype), normal((rows, 40), dtype)
    assert_close(multiply(x, matrix, kernel, transpose=False), x, matrix, transpose=False)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_plain_parts(group, rng):
    matrix, x = draw(Format("affine", group, 4), (1544, 256), rng, mx.float16), normal((17, 1544), mx.float16)
    result = multiply(x, matrix, "r32", parts=True, transpose=False)
    assert_close(result, x, matrix, transpose=False)
    assert_same_bits(multiply(x, matrix, "r32", parts=True, transpose=False), result)


def test_gradient_in_x(rng):
    matrix, x = draw(FOUR_BITS, (64, 256), rng, mx.float16), normal((12, 256), mx.float16)
    y = normal((12, 64), mx.float16)
    gradient = mx.vjp(lambda x: mlx_anvil.quantized_matmul(x, *matrix.arrays), [x], [y])[1][0]
    assert_same_bits(gradient, multiply(y, matrix, "r16", transpose=False))
    assert_close(gradient, y, matrix, transpose=False)


def test_batch(rng):
    matrix, x = draw(FOUR_BITS, (3, 40, 512), rng, mx.float16), normal((3, 19, 512), mx.float16)
    assert_close(multiply(x, matrix, "r32n64"), x, matrix)
    long = draw(FOUR_BITS, (2, 33, 2048), rng, mx.float16)
    y = normal((2, 34, 2048), mx.float16)
    assert_close(multiply(y, long, "r64n64", parts=True), y, long)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_not_finite(dtype, rng):
    """An infinite scale spoils its output, a row of x that is not finite its own results, and nothing else is."""
    matrix, x = draw(FOUR_BITS, (37, 192 * 2), rng, dtype), normal((17, 192 * 2), dtype)
    expected = to_numpy(multiply(x, matrix, "r32n64"))
    w, scales, biases = matrix.arrays
    scales[5, 5] = mx.inf
    x[3, 100] = mx.nan
    with mlx_anvil.strict():
        result = to_numpy(mlx_anvil.quantized_matmul(x, w, scales, biases))
    assert not np.isfinite(result[3]).any()
    assert not np.isfinite(result[:, 5]).any()
    others = np.ones(result.shape, bool)
    others[3], others[:, 5] = False, False
    np.testing.assert_array_equal(result[others], expected[others])
