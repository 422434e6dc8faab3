"""Gradients of a table in scales and biases, against NumPy in float64."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from quantized_numpy import AFFINE_FORMATS, Format, Matrix, assert_rounded, draw, normal, unpack
from support import GRADIENT_FACTOR, to_numpy

ROWS = 29


def lookup_of(ids: mx.array, matrix: Matrix) -> Callable[..., mx.array]:
    def lookup(scales: mx.array, biases: mx.array) -> mx.array:
        return mlx_anvil.quantized_embedding(ids, matrix.w, scales, biases, **matrix.format.options)

    return lookup


def exact_gradients(ids: np.ndarray, matrix: Matrix, dy: np.ndarray) -> list[np.ndarray]:
    codes = unpack(np.array(matrix.w), matrix.format.bits)
    of_weights = np.zeros(codes.shape)
    np.add.at(of_weights, ids.reshape(-1), dy.reshape(-1, codes.shape[-1]))
    per_group = (*matrix.scales.shape, matrix.format.group_size)
    return [a.reshape(per_group).sum(-1) for a in (of_weights * codes, of_weights)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", AFFINE_FORMATS, ids=str)
def test_values(format, dtype, rng):
    matrix = draw(format, (ROWS, 3 * format.group_size), rng, dtype)
    for shape in ((), (7,), (3, 40), (0,), (600,)):
        ids = rng.integers(-ROWS, ROWS, shape, dtype=np.int64)
        dy = normal((*shape, 3 * format.group_size), dtype)
        given = mx.array(ids.astype(rng.choice(["int8", "int32", "int64"])))
        results = mx.vjp(lookup_of(given, matrix), list(matrix.arrays[1:]), [dy])[1]
        for result, exact in zip(results, exact_gradients(ids, matrix, to_numpy(dy)), strict=True):
            assert_rounded(result, exact, dtype, factor=GRADIENT_FACTOR)


def test_derivatives_of_gradients(rng):
    matrix = draw(Format("affine", 64, 4), (ROWS, 128), rng)
    ids = rng.integers(0, ROWS, 20)
    dy, tangent, *cotangents = (normal(shape) for shape in ((20, 128), (20, 128), (ROWS, 2), (ROWS, 2)))

    def gradients(dy):
        return mx.vjp(lookup_of(mx.array(ids), matrix), list(matrix.arrays[1:]), [dy])[1]

    (of_dy,) = mx.vjp(gradients, [dy], cotangents)[1]
    weights = Matrix(matrix.format, matrix.w, *cotangents).weights
    assert_rounded(of_dy, weights[ids], mx.float32, factor=GRADIENT_FACTOR)
    for result, exact in zip(
        mx.jvp(gradients, [dy], [tangent])[1], exact_gradients(ids, matrix, to_numpy(tangent)), strict=True
    ):
        assert_rounded(result, exact, mx.float32, factor=GRADIENT_FACTOR)


def test_vmap_of_gradients(rng):
    matrix = draw(Format("affine", 64, 4), (ROWS, 128), rng)
    ids = mx.array(rng.integers(-ROWS, ROWS, (3, 20)))
    dy, tangent = normal((3, 20, 128)), normal((3, 20, 128))

    def gradients(ids, dy):
        return mx.vjp(lookup_of(ids, matrix), list(matrix.arrays[1:]), [dy])[1]

    def all_gradients(dy):
        return mx.vmap(gradients)(ids, dy)

    def assert_exact(results, dy):
        for i in range(3):
            exact = exact_gradients(np.array(ids[i]), matrix, to_numpy(dy[i]))
            for result, one in zip(results, exact, strict=True):
                assert_rounded(result[i], one, mx.float32, factor=GRADIENT_FACTOR)

    assert_exact(all_gradients(dy), dy)
    assert_exact(mx.jvp(all_gradients, [dy], [tangent])[1], tangent)
    shared = mx.vmap(lambda dy: gradients(ids[0], dy))(dy[:1])
    for result, one in zip(shared, all_gradients(dy), strict=True):
        assert mx.allclose(result[0], one[0])


@pytest.mark.cpu_only
def test_one_kernel_for_both(rng):
    matrix = draw(Format("affine", 64, 4), (ROWS, 128), rng)
    lookup = lookup_of(mx.array([3, 3, 5]), matrix)
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mx.vjp(lookup, list(matrix.arrays[1:]), [normal((3, 128))])[1])
    assert [kernel for kernel in trace.kernels if "embedding_scale_gradient" in kernel]
