"""Several products of one x as one node: the bits and the derivatives of single products."""

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil.reference import DTYPES
from quantized_numpy import FLOAT_FORMATS, FORMATS, Format, Matrix, draw, normal
from support import assert_same_bits, poison_memory

pytestmark = pytest.mark.cpu_only

OUTPUTS = (67, 1, 30)
AFFINE = Format("affine", 64, 4)


def products(x: mx.array, matrices: list[Matrix]) -> list[mx.array]:
    return _ext._quantized_products(x, [matrix.arrays for matrix in matrices], **matrices[0].format.options)


def single_products(x: mx.array, matrices: list[Matrix]) -> list[mx.array]:
    return [mlx_anvil.quantized_matmul(x, *matrix.arrays, **matrix.format.options) for matrix in matrices]


def drawn(format: Format, rng, dtype: mx.Dtype = mx.float32, groups: int = 5) -> list[Matrix]:
    return [draw(format, (outputs, groups * format.group_size), rng, dtype) for outputs in OUTPUTS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_bits(format, dtype, rng):
    matrices = drawn(format, rng, dtype)
    for shape in ((1,), (3,), (2, 4), (9,), (0,), (1, 1)):
        x = normal((*shape, 5 * format.group_size), dtype)
        if shape == (3,):
            x[1, 7] = float("nan")
        poison_memory(4096)
        with mlx_anvil.trace() as trace:
            results = products(x, matrices)
            mx.eval(results)
        assert len(trace.kernels) == (3 if shape == (9,) else 1)
        for ours, want in zip(results, single_products(x, matrices), strict=True):
            assert_same_bits(ours, want)


def test_strided_x(rng):
    matrices = drawn(AFFINE, rng)
    x = normal((5 * AFFINE.group_size, 4)).T
    for ours, want in zip(products(x, matrices), single_products(x, matrices), strict=True):
        assert_same_bits(ours, want)


def test_some_of_the_results(rng):
    matrices, x = drawn(AFFINE, rng), normal((1, 5 * AFFINE.group_size))
    _, _, last = products(x, matrices)
    assert_same_bits(last, single_products(x, matrices)[2])


@pytest.mark.parametrize("format", [AFFINE, *FLOAT_FORMATS], ids=str)
def test_transformations(format, rng):
    matrices, x = drawn(format, rng), normal((2, 5 * format.group_size))

    def loss(function):
        return lambda x: sum((y * y).sum() for y in function(x, matrices))

    ours, want = loss(products), loss(single_products)
    close = {"rtol": 1e-5, "atol": 1e-4}
    assert mx.allclose(mx.grad(ours)(x), mx.grad(want)(x), **close)
    assert mx.allclose(mx.compile(mx.grad(ours))(x), mx.grad(want)(x), **close)
    assert mx.allclose(mx.jvp(ours, [x], [x])[1][0], mx.jvp(want, [x], [x])[1][0], **close)
    batch = normal((3, 2, 5 * format.group_size))
    for one, other in zip(
        mx.vmap(lambda x: products(x, matrices))(batch), single_products(batch, matrices), strict=True
    ):
        assert mx.allclose(one, other, **close)
    for one, other in zip(mx.compile(lambda x: products(x, matrices))(x), single_products(x, matrices), strict=True):
        assert_same_bits(one, other)


def test_gradients_of_scales(rng):
    matrices, x = drawn(AFFINE, rng), normal((2, 5 * AFFINE.group_size))
    w, scales, biases = matrices[1].arrays
    others = [matrices[0].arrays, matrices[2].arrays]

    def ours(scales):
        return _ext._quantized_products(x, [others[0], (w, scales, biases), others[1]], **AFFINE.options)[1].sum()

    want = mx.grad(lambda s: mlx_anvil.quantized_matmul(x, w, s, biases, **AFFINE.options).sum())(scales)
    assert mx.allclose(mx.grad(ours)(scales), want, rtol=1e-5, atol=1e-4)


def test_a_reshape_before_it_is_skipped(rng, tmp_path):
    matrices = drawn(AFFINE, rng)
    x = normal((2, 5, 1, AFFINE.group_size))
    rows = x.reshape(2, 1, -1)
    results = products(rows, matrices)
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), *results)
    assert "Reshape" not in graph.read_text()
    for ours, want in zip(results, single_products(x.reshape(2, 1, -1), matrices), strict=True):
        assert_same_bits(ours, want)
    strided = x.swapaxes(0, 1)
    results = products(strided.reshape(1, 2, -1), matrices)
    for ours, want in zip(results, single_products(strided.reshape(1, 2, -1), matrices), strict=True):
        assert_same_bits(ours, want)
    gradient = mx.grad(lambda x: sum(y.sum() for y in products(x.reshape(2, 1, -1), matrices)))(x)
    want = mx.grad(lambda x: sum(y.sum() for y in single_products(x.reshape(2, 1, -1), matrices)))(x)
    assert mx.allclose(gradient, want, rtol=1e-5, atol=1e-4)
