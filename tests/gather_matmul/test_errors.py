"""Bad input of the gathered products: the call raises a ValueError or TypeError that says what was given and what is
allowed."""

import mlx.core as mx
import pytest

import mlx_anvil
import support
from quantized_numpy import Format, draw

QUANTIZED, DENSE = "gather_quantized_matmul", "gather_matmul"
each_op = pytest.mark.parametrize("op", [QUANTIZED, DENSE])


@pytest.fixture
def matrix(rng):
    return draw(Format("affine", 64, 4), (5, 6, 128), rng)


def call(op: str, matrix, x=None, **options: object) -> mx.array:
    x = mx.zeros((2, 1, 128)) if x is None else x
    if op == QUANTIZED:
        return mlx_anvil.gather_quantized_matmul(x, *matrix.arrays, **options)
    return mlx_anvil.gather_matmul(x, mx.zeros((5, 128, 6)), **options)


@each_op
@pytest.mark.parametrize("name", ["lhs_indices", "rhs_indices"])
def test_ids_of_another_type(op, name, matrix):
    with pytest.raises(TypeError, match=rf"^\[{op}\] {name} has dtype float32; allowed: an integer dtype"):
        call(op, matrix, **{name: mx.zeros((2,))})
    with pytest.raises(TypeError, match=rf"^\[{op}\] {name} is a list"):
        call(op, matrix, **{name: [0, 1]})
    with pytest.raises(TypeError, match=rf"^\[{op}\] sorted_indices is a int"):
        call(op, matrix, rhs_indices=mx.array([0, 1]), sorted_indices=1)


@each_op
@pytest.mark.parametrize(
    ("name", "id", "count"), [("rhs_indices", 5, 5), ("rhs_indices", -6, 5), ("lhs_indices", 2, 2)]
)
def test_known_ids_out_of_range(op, name, id, count, matrix):
    if support.backend in ("cuda", "metal"):
        pytest.skip("the host does not read the ids of a GPU")
    text = rf"^\[{op}\] {name} has {id} for {count} matrices; allowed: -{count} to {count - 1}\."
    for ids in (mx.array([0, id]), mx.array([0, 1, id, 1])[::2]):
        mx.eval(ids)
        with pytest.raises(ValueError, match=text):
            call(op, matrix, **{name: ids})


@each_op
def test_ids_that_do_not_broadcast(op, matrix):
    with pytest.raises(ValueError, match=rf"^\[{op}\] (x|a) has shape \(2, 1, 128\) and rhs_indices has shape \(3,\)"):
        call(op, matrix, rhs_indices=mx.array([0, 1, 2]))
    with pytest.raises(ValueError, match=rf"^\[{op}\] lhs_indices has shape \(2,\) and rhs_indices has shape \(3,\)"):
        call(op, matrix, lhs_indices=mx.array([0, 1]), rhs_indices=mx.array([0, 1, 2]))
    with pytest.raises(ValueError, match=rf"^\[{op}\] lhs_indices has shape \(2,\) and (w|b) has shape \(5, "):
        call(op, matrix, lhs_indices=mx.array([0, 1]))


@each_op
def test_shapes_that_do_not_match(op, matrix):
    with pytest.raises(ValueError, match=rf"^\[{op}\] (x|a) has shape \(2, 1, 64\) and (w|b) has shape"):
        call(op, matrix, mx.zeros((2, 1, 64)), rhs_indices=mx.array([0, 1]))
    with pytest.raises(ValueError, match=rf"^\[{op}\] (x|a) has dtype int32; allowed"):
        call(op, matrix, mx.zeros((2, 1, 128), mx.int32), rhs_indices=mx.array([0, 1]))


def test_x_needs_rows(matrix):
    with pytest.raises(ValueError, match=rf"^\[{QUANTIZED}\] x has shape \(128,\); allowed: rank 2 or more"):
        call(QUANTIZED, matrix, mx.zeros((128,)), rhs_indices=mx.array([0]))


@each_op
def test_no_experts(op):
    x, ids = mx.zeros((2, 1, 64)), mx.array([0, 0])
    none = (mx.zeros((0, 6, 8), mx.uint32), mx.zeros((0, 6, 1)), mx.zeros((0, 6, 1)))
    arrays = none if op == QUANTIZED else (mx.zeros((0, 64, 6)),)
    with pytest.raises(ValueError, match=rf"^\[{op}\] (w|b) has shape .* and rhs_indices .*at least one matrix"):
        getattr(mlx_anvil, op)(x, *arrays, rhs_indices=ids)


@pytest.mark.parametrize("wrt", ["w", "scales"])
def test_codes_have_no_gradient(wrt, rng):
    matrix = draw(Format("mxfp4", 32, 4), (5, 6, 64), rng)
    x, ids = mx.zeros((2, 1, 64)), mx.array([0, 1])

    def product(codes: mx.array) -> mx.array:
        w, scales = (codes, matrix.scales) if wrt == "w" else (matrix.w, codes)
        return mlx_anvil.gather_quantized_matmul(x, w, scales, rhs_indices=ids, mode="mxfp4")

    codes = matrix.w if wrt == "w" else matrix.scales
    with pytest.raises(ValueError, match=rf"^\[{QUANTIZED}\] no gradient in {wrt}"):
        mx.eval(mx.vjp(product, [codes], [mx.ones((2, 1, 6))])[1])
