"""Quantized ops in the modes of GGUF, against the weights that the gguf package reads."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from gguf_blocks import BLOCKS, MODES, GgufMatrix
from quantized_numpy import assert_rounded, dense_factor
from support import assert_same_bits, max_error, to_numpy

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def width_of(mode: str, columns: int) -> int:
    """About as many columns, in whole blocks. Rows of short blocks do not end with a superblock of 256."""
    block = BLOCKS[mode][1]
    return max(1, columns // block) * block


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def test_rows_are_those_of_the_gguf_package(instruction_set, mode, rng):
    matrix = GgufMatrix.random(rng, mode, 37, width_of(mode, 800))
    ids = mx.array(rng.integers(-37, 37, (3, 5)))
    rows = mlx_anvil.quantized_embedding(ids, matrix.w, mode=mode, dtype=mx.float32)
    assert rows.dtype == mx.float32
    np.testing.assert_array_equal(np.array(rows), matrix.weights[np.array(ids)])
    for dtype in (mx.float16, mx.bfloat16):
        rounded = mlx_anvil.quantized_embedding(ids, matrix.w, mode=mode, dtype=dtype)
        assert_same_bits(rounded, mx.array(matrix.weights[np.array(ids)]).astype(dtype))
    assert mlx_anvil.quantized_embedding(ids, matrix.w, mode=mode).dtype == mx.bfloat16


def test_rows_of_all_bytes(mode, rng):
    """Any bytes are a matrix; scales may be subnormal, infinite or not a number."""
    size, _columns, _ = BLOCKS[mode]
    matrix = GgufMatrix.of_bytes(mode, rng.integers(0, 256, (64, 8 * size), np.uint8))
    rows = mlx_anvil.quantized_embedding(mx.arange(64), matrix.w, mode=mode, dtype=mx.float32)
    np.testing.assert_array_equal(np.array(rows), matrix.weights)


def test_compose_is_the_definition(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 9, width_of(mode, 512))
    with mlx_anvil.composed():
        rows = mlx_anvil.quantized_embedding(mx.arange(9), matrix.w, mode=mode, dtype=mx.float32)
        mx.eval(rows)
    np.testing.assert_array_equal(np.array(rows), matrix.weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transpose", [True, False])
def test_product(instruction_set, mode, dtype, transpose, rng):
    for rows, outputs, columns in ((1, 37, 800), (3, 65, 512), (8, 7, 2048), (9, 33, 256), (70, 95, 1100)):
        matrix = GgufMatrix.random(rng, mode, outputs, width_of(mode, columns))
        weights = matrix.weights.astype(np.float64)
        x = mx.random.normal((rows, weights.shape[1 if transpose else 0])).astype(dtype)
        result = mlx_anvil.quantized_matmul(x, matrix.w, transpose=transpose, mode=mode)
        assert result.dtype == dtype
        exact = to_numpy(x) @ (weights.T if transpose else weights)
        assert_rounded(result, exact, dtype, factor=dense_factor(rows))


def test_rows_have_the_same_bits_however_many(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 41, width_of(mode, 800))
    for dtype in DTYPES:
        x = mx.random.normal((8, matrix.weights.shape[1])).astype(dtype)
        all_rows = mlx_anvil.quantized_gemv(x, matrix.w, mode=mode)
        for first, count in ((0, 1), (5, 1), (2, 3), (1, 7)):
            some = mlx_anvil.quantized_gemv(x[first : first + count], matrix.w, mode=mode)
            assert_same_bits(some, all_rows[first : first + count])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_activation_bits(mode, bits, rows, rng):
    matrix = GgufMatrix.random(rng, mode, 64, width_of(mode, 1024))
    x = mx.random.normal((rows, matrix.weights.shape[1]))
    result = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode, activation_bits=bits)
    exact = mx.array(to_numpy(x) @ matrix.weights.T.astype(np.float64), mx.float32)
    assert max_error(result, exact) < (0.02 if bits == 8 else 1e-4)


def test_numbers_that_are_not_finite(mode, rng):
    """Rows of x with NaN or infinity give what the weights in float32 give; other rows keep their bits."""
    matrix = GgufMatrix.random(rng, mode, 40, width_of(mode, 512))
    for rows in (4, 20):
        x = mx.random.normal((rows, matrix.weights.shape[1]))
        finite = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
        x[1, 3] = mx.inf
        x[2, 7] = mx.nan
        result = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
        assert mx.isnan(result[2]).all()
        with np.errstate(invalid="ignore"):  # infinity times 0
            expected = np.array(x[1]) @ matrix.weights.T
        np.testing.assert_array_equal(np.array(result[1]), expected)
        keep = mx.array([0, 3])
        assert_same_bits(result[keep], finite[keep])


def test_scales_that_are_not_finite(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 40, width_of(mode, 512))
    _size, _, halves = BLOCKS[mode]
    blocks = np.array(matrix.w)
    blocks[5, halves[0] : halves[0] + 2] = np.array([np.inf], np.float16).view(np.uint8)
    broken = GgufMatrix.of_bytes(mode, blocks)
    for rows in (2, 20):
        x = mx.random.normal((rows, matrix.weights.shape[1]))
        good = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
        result = mlx_anvil.quantized_matmul(x, broken.w, mode=mode)
        with np.errstate(invalid="ignore"):
            expected = np.array(x) @ broken.weights.T
        np.testing.assert_array_equal(np.isnan(np.array(result[:, 5])), np.isnan(expected[:, 5]))
        others = [i for i in range(40) if i != 5]
        assert max_error(result[:, mx.array(others)], good[:, mx.array(others)]) < 1e-5


def test_large_numbers_do_not_overflow(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 33, width_of(mode, 512), scale=1e-4)
    for rows in (1, 3, 20):
        x = mx.random.normal((rows, matrix.weights.shape[1])) * 1e36
        result = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
        exact = mx.array(to_numpy(x) @ matrix.weights.T.astype(np.float64), mx.float32)
        assert max_error(result, exact) < 1e-5


def test_batches(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 3, 17, width_of(mode, 512))
    x = mx.random.normal((2, 1, 5, matrix.weights.shape[-1]))
    result = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
    exact = mx.array(to_numpy(x) @ matrix.weights.astype(np.float64).swapaxes(-1, -2), mx.float32)
    assert result.shape == (2, 3, 5, 17)
    assert max_error(result, exact) < 1e-5
    vector = mlx_anvil.quantized_matmul(x[0, 0, 0], matrix.w[0], mode=mode)
    assert vector.shape == (17,)
    assert max_error(vector, exact[0, 0, 0]) < 1e-5


def test_without_elements(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 5, width_of(mode, 256))
    columns = matrix.weights.shape[1]
    assert mlx_anvil.quantized_matmul(mx.zeros((0, columns)), matrix.w, mode=mode).shape == (0, 5)
    empty = mlx_anvil.quantized_matmul(mx.zeros((2, 0)), matrix.w[:0], mode=mode, transpose=False)
    assert mx.array_equal(empty, mx.zeros((2, columns)))
    no_columns = mlx_anvil.quantized_matmul(mx.zeros((2, 0)), matrix.w[:, :0], mode=mode)
    assert mx.array_equal(no_columns, mx.zeros((2, 5)))
    assert mlx_anvil.quantized_embedding(mx.array([], mx.int32), matrix.w, mode=mode).shape == (0, columns)


def gated(x: np.ndarray, gate: GgufMatrix, up: GgufMatrix) -> np.ndarray:
    g, u = (x @ side.weights.astype(np.float64).T for side in (gate, up))
    return g / (1 + np.exp(-g)) * u


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(instruction_set, mode, dtype, rng):
    columns = width_of(mode, 512)
    gate, up = (GgufMatrix.random(rng, mode, 45, columns, scale=1e-4) for _ in range(2))
    for shape in ((columns,), (1, columns), (2, 4, columns), (12, columns)):
        x = (mx.random.normal(shape) * 0.1).astype(dtype)
        result = mlx_anvil.quantized_swiglu(x, (gate.w,), (up.w,), mode=mode)
        exact = gated(to_numpy(x), gate, up)
        if dtype == mx.float32:
            assert max_error(result, mx.array(exact, mx.float32)) < 1e-5
        elif support.backend == "cpu" and shape[0] != 12:
            assert_rounded(result, exact, dtype)
        else:  # not one kernel: both products are rounded before the gate
            products = (mlx_anvil.quantized_matmul(x, side.w, mode=mode) for side in (gate, up))
            assert_same_bits(result, mlx_anvil.silu_gate(*products))
    assert mlx_anvil.quantized_swiglu(mx.zeros((0, columns), dtype), (gate.w,), (up.w,), mode=mode).shape == (0, 45)


@pytest.mark.cpu_only
def test_swiglu_is_one_kernel(mode, rng):
    columns = width_of(mode, 512)
    gate, up = (GgufMatrix.random(rng, mode, 45, columns, scale=1e-4) for _ in range(2))
    x = mx.random.normal((8, columns)) * 0.1
    # Rows that integers do not hold, and sums that overflow before they meet the scale.
    x[2, 5], x[4, 0], x[6] = mx.nan, mx.inf, x[6] * 1e35

    def swiglu(x, bits=None):
        return mlx_anvil.quantized_swiglu(x, (gate.w,), (up.w,), mode=mode, activation_bits=bits)

    with mlx_anvil.trace() as trace:
        result = swiglu(x)
        mx.eval(result)
    assert trace.kernels == [f"gguf_swiglu_float32_{mode}"]
    with np.errstate(over="ignore", invalid="ignore"):
        exact = gated(to_numpy(x), gate, up).astype(np.float32)
    rows = [0, 1, 3, 5, 7]
    assert max_error(result[mx.array(rows)], mx.array(exact[rows])) < 1e-5
    assert mx.isnan(result[2]).all()
    np.testing.assert_allclose(np.array(result[6]), exact[6], rtol=1e-4)
    for i in rows:
        assert_same_bits(swiglu(x[i : i + 1]), result[i : i + 1])

    small, cotangent = x[mx.array(rows)], mx.random.normal((5, 45))

    def in_steps(x):
        product = [mlx_anvil.quantized_matmul(x, side.w, mode=mode, activation_bits=8) for side in (gate, up)]
        return mlx_anvil.silu_gate(*product)

    of_op, of_steps = (mx.vjp(f, [small], [cotangent])[1][0] for f in (lambda x: swiglu(x, 8), in_steps))
    assert max_error(of_op, of_steps) < 1e-6
    (tangent,) = mx.jvp(lambda x: swiglu(x, 8), [small], [small])[1]
    assert max_error(tangent, mx.jvp(in_steps, [small], [small])[1][0]) < 1e-6
    assert max_error(mx.vmap(swiglu)(small), swiglu(small)) < 1e-6
    assert max_error(mx.compile(swiglu, shapeless=True)(small), swiglu(small)) == 0


def test_head(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 300, width_of(mode, 512))
    x = mx.random.normal((4, matrix.weights.shape[1]))
    logits = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
    index, value = mlx_anvil.quantized_argmax(x, matrix.w, mode=mode, return_values=True)
    assert mx.array_equal(index, mx.argmax(logits, -1))
    assert index.dtype == mx.uint32
    assert mx.array_equal(value, mx.max(logits, -1))
    indices, values = mlx_anvil.quantized_topk(x, matrix.w, k=7, mode=mode)
    assert mx.array_equal(indices, mx.argsort(-logits, -1)[:, :7])
    assert mx.array_equal(values, mx.take_along_axis(logits, indices, -1))
    one, best = mlx_anvil.quantized_topk(x, matrix.w, k=1, mode=mode)
    assert mx.array_equal(one[:, 0], index)
    assert mx.array_equal(best[:, 0], value)


def test_gradient(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 43, width_of(mode, 512))
    weights = matrix.weights.astype(np.float64)
    for rows in (3, 20):
        x, cotangent = mx.random.normal((rows, weights.shape[1])), mx.random.normal((rows, 43))

        def product(x):
            return mlx_anvil.quantized_matmul(x, matrix.w, mode=mode, activation_bits=8)

        (_,), (gradient,) = mx.vjp(product, [x], [cotangent])
        assert max_error(gradient, mx.array(to_numpy(cotangent) @ weights, mx.float32)) < 1e-5
        (_,), (tangent,) = mx.jvp(product, [x], [x * 0.5])
        assert max_error(tangent, mx.array(to_numpy(x) @ weights.T / 2, mx.float32)) < 1e-5

        def loss(x):
            return (mlx_anvil.quantized_matmul(x, matrix.w, mode=mode) ** 2).sum()

        second = mx.grad(lambda x: (mx.grad(loss)(x) * x).sum())(x)
        exact = mx.array(4 * to_numpy(x) @ weights.T @ weights, mx.float32)
        assert max_error(second, exact) < 1e-5


def test_vmap(mode, rng):
    columns = width_of(mode, 256)
    matrix = GgufMatrix.random(rng, mode, 4, 19, columns)

    def product(x, w):
        return mlx_anvil.quantized_matmul(x, w, mode=mode)

    x = mx.random.normal((4, 6, columns))
    exact = mx.array(to_numpy(x) @ matrix.weights.astype(np.float64).swapaxes(-1, -2), mx.float32)
    assert max_error(mx.vmap(product)(x, matrix.w), exact) < 1e-5
    shared = mx.array(to_numpy(x) @ matrix.weights[0].astype(np.float64).T, mx.float32)
    assert max_error(mx.vmap(product, (0, None))(x, matrix.w[0]), shared) < 1e-5
    across = mx.vmap(product, (None, 0))(x[0], matrix.w)
    assert max_error(across[1], mx.array(to_numpy(x[0]) @ matrix.weights[1].astype(np.float64).T, mx.float32)) < 1e-5

    def rows(ids, w):
        return mlx_anvil.quantized_embedding(ids, w, mode=mode, dtype=mx.float32)

    ids = mx.array(rng.integers(0, 19, (4, 3)))
    np.testing.assert_array_equal(
        np.array(mx.vmap(rows)(ids, matrix.w)), np.stack([matrix.weights[i][np.array(ids[i])] for i in range(4)])
    )


def test_shapeless_compile(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 19, width_of(mode, 256))
    product = mx.compile(lambda x: mlx_anvil.quantized_matmul(x, matrix.w, mode=mode), shapeless=True)
    for rows in (1, 30, 4):
        x = mx.random.normal((rows, matrix.weights.shape[1]))
        exact = mx.array(to_numpy(x) @ matrix.weights.astype(np.float64).T, mx.float32)
        assert max_error(product(x), exact) < 1e-5
