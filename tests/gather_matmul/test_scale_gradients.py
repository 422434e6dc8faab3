"""Gradients of gathered products in the scales and biases of affine experts, against NumPy in float64. On the CPU, one
kernel computes both."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from quantized_numpy import Format, Matrix, assert_rounded, draw, normal, unpack
from support import GRADIENT_FACTOR, assert_same_bits, to_numpy

EXPERTS, OUTPUTS, COLUMNS = 5, 37, 192
FORMAT = Format("affine", 64, 4)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_product = pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])


def operands(
    pairs: int, rows: int, transpose: bool, rng: np.random.Generator, dtype: mx.Dtype = mx.float32
) -> tuple[Matrix, mx.array, mx.array, np.ndarray, np.ndarray]:
    """A matrix, x of fewer matrices than pairs, a cotangent, and ids that leave out an expert."""
    inner, outer = (COLUMNS, OUTPUTS) if transpose else (OUTPUTS, COLUMNS)
    lefts = pairs // 2 + 1
    matrix = draw(FORMAT, (EXPERTS, OUTPUTS, COLUMNS), rng, dtype)
    x, dy = normal((lefts, rows, inner), dtype), normal((pairs, rows, outer), dtype)
    rhs = rng.choice([0, 1, 2, 4], pairs)
    return matrix, x, dy, rng.integers(0, lefts, pairs), rhs


def product_of(
    x: mx.array, matrix: Matrix, lhs: np.ndarray, rhs: np.ndarray, transpose: bool
) -> Callable[..., mx.array]:
    ids = {"lhs_indices": mx.array(lhs), "rhs_indices": mx.array(rhs)}

    def product(scales: mx.array, biases: mx.array) -> mx.array:
        options = {**ids, **FORMAT.options, "transpose": transpose}
        return mlx_anvil.gather_quantized_matmul(x, matrix.w, scales, biases, **options)

    return product


def exact_gradients(
    x: np.ndarray, dy: np.ndarray, w: mx.array, lhs: np.ndarray, rhs: np.ndarray, transpose: bool
) -> list[np.ndarray]:
    of_weights = np.zeros((EXPERTS, OUTPUTS, COLUMNS))
    for pair, expert in enumerate(rhs):
        left = x[lhs[pair]]
        of_weights[expert] += dy[pair].T @ left if transpose else left.T @ dy[pair]
    per_group = (EXPERTS, OUTPUTS, COLUMNS // FORMAT.group_size, FORMAT.group_size)
    codes = unpack(np.array(w), FORMAT.bits)
    return [a.reshape(per_group).sum(-1) for a in (of_weights * codes, of_weights)]


@each_product
@each_dtype
def test_values(dtype, transpose, rng):
    for pairs, rows in ((1, 1), (9, 1), (7, 3), (600, 1)):
        matrix, x, dy, lhs, rhs = operands(pairs, rows, transpose, rng, dtype)
        product, arrays = product_of(x, matrix, lhs, rhs, transpose), list(matrix.arrays[1:])
        both = mx.vjp(product, arrays, [dy])[1]
        exact = exact_gradients(to_numpy(x), to_numpy(dy), matrix.w, lhs, rhs, transpose)
        for result, wanted in zip(both, exact, strict=True):
            assert_rounded(result, wanted, dtype, factor=GRADIENT_FACTOR)
        (biases,) = mx.vjp(lambda b: product(arrays[0], b), arrays[1:], [dy])[1]  # noqa: B023
        assert_same_bits(biases, both[1])


@each_product
def test_derivatives_of_gradients(transpose, rng):
    matrix, x, dy, lhs, rhs = operands(9, 2, transpose, rng)

    def gradients(x: mx.array, dy: mx.array) -> list[mx.array]:
        product = product_of(x, matrix, lhs, rhs, transpose)
        return list(mx.vjp(product, list(matrix.arrays[1:]), [dy])[1])

    cotangents = [normal(matrix.scales.shape) for _ in range(2)]
    of_x, of_dy = mx.vjp(gradients, [x, dy], cotangents)[1]
    weights = Matrix(FORMAT, matrix.w, *cotangents).weights
    exact_x, exact_dy = np.zeros(x.shape), np.zeros(dy.shape)
    for pair, expert in enumerate(rhs):
        w = weights[expert] if transpose else weights[expert].T
        exact_x[lhs[pair]] += to_numpy(dy)[pair] @ w
        exact_dy[pair] = to_numpy(x)[lhs[pair]] @ w.T
    assert_rounded(of_x, exact_x, mx.float32, factor=GRADIENT_FACTOR)
    assert_rounded(of_dy, exact_dy, mx.float32, factor=GRADIENT_FACTOR)

    tangents = [normal(x.shape), normal(dy.shape)]
    moved = mx.jvp(gradients, [x, dy], tangents)[1]
    terms = ((tangents[0], dy), (x, tangents[1]))
    exact = [exact_gradients(to_numpy(a), to_numpy(b), matrix.w, lhs, rhs, transpose) for a, b in terms]
    for result, *wanted in zip(moved, *exact, strict=True):
        assert_rounded(result, sum(wanted), mx.float32, factor=GRADIENT_FACTOR)


def test_no_pairs(rng):
    matrix, x, _, _, _ = operands(4, 1, True, rng)
    none = np.zeros(0, np.int32)
    product = product_of(x, matrix, none, none, True)
    for result in mx.vjp(product, list(matrix.arrays[1:]), [mx.zeros((0, 1, OUTPUTS))])[1]:
        assert result.shape == matrix.scales.shape
        assert not to_numpy(result).any()


@pytest.mark.cpu_only
def test_one_kernel_for_both(rng):
    matrix, x, dy, lhs, rhs = operands(9, 1, True, rng)
    product = product_of(x, matrix, lhs, rhs, True)
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mx.vjp(product, list(matrix.arrays[1:]), [dy])[1])
    assert len(trace.kernels) == 1
    assert "gather_scale_gradient" in trace.kernels[0]
