"""Tests of quantized_embedding beyond the contract: formats, ids of every kind, the result's dtype, memory, errors."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from quantized_numpy import FLOAT_FORMATS, FORMATS, Format, Matrix, assert_rounded, draw
from support import assert_same_bits, kernel_names, max_error, to_numpy, without_copies

quantized_embedding = mlx_anvil.quantized_embedding

FOUR_BITS = Format("affine", 64, 4)
INTEGERS = (mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64)


def ready(*numbers: int, dtype: mx.Dtype = mx.int32) -> mx.array:
    """An array whose values the host can read."""
    ids = mx.array(numbers, dtype)
    mx.eval(ids)
    return ids


def lazy(*numbers: int, dtype: mx.Dtype = mx.int32) -> mx.array:
    """An array that has not been evaluated."""
    return mx.array(numbers, dtype) + mx.array(0, dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_format(format, dtype, rng):
    for columns in (128, 384, 1152):
        matrix = draw(format, (9, columns), rng, dtype)
        ids = mx.array([[8, 0, 3], [3, -1, -9]])
        result = quantized_embedding(ids, *matrix.arrays, **format.options, dtype=None if format.affine else dtype)
        assert_rounded(result, matrix.weights[np.array(ids)], dtype)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.bits == 8 and not f.affine], ids=str)
def test_codes_that_are_no_number(format):
    """A NaN code affects only its own element."""
    codes = np.arange(256)[None]
    matrix = Matrix.of_codes(format, codes)
    result = to_numpy(quantized_embedding(mx.array([0]), *matrix.arrays, **format.options))
    np.testing.assert_array_equal(result, matrix.weights)
    assert np.isnan(result[0, [127, 255]]).all()


def test_scales_at_the_ends_of_their_range():
    format = Format("mxfp4", 32, 4)
    matrix = Matrix.of_codes(format, np.tile(np.arange(16), (1, 8)), raw_scales=np.array([[0, 254, 1, 127]]))
    result = quantized_embedding(mx.array([0]), *matrix.arrays, **format.options, dtype=mx.float32)
    exact = matrix.weights
    np.testing.assert_array_equal(
        to_numpy(result), np.where(np.abs(exact) >= 2.0**128, np.copysign(np.inf, exact), exact)
    )


def test_matches_mlx():
    w, scales, biases = mx.quantize(mx.random.normal((7, 128)))
    ids = mx.array([[6, 2], [2, -1]])
    with mx.stream(mx.cpu):
        theirs = mx.dequantize(w[ids], scales[ids], biases[ids])
    assert max_error(quantized_embedding(ids, w, scales, biases), theirs) <= 1e-6


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_ids_of_every_dtype(dtype, rng):
    matrix = draw(FOUR_BITS, (9, 64), rng)
    signed = mx.issubdtype(dtype, mx.signedinteger)
    ids = mx.array([1, 8, 0] + [-1, -9] * signed).astype(dtype)
    result = quantized_embedding(ids, *matrix.arrays)
    assert_rounded(result, matrix.weights[[1, 8, 0] + [-1, -9] * signed], mx.float32)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3), (2, 1, 2, 2, 2)], ids=str)
def test_ids_of_every_shape(shape, rng):
    matrix = draw(FOUR_BITS, (9, 64), rng)
    ids = mx.random.randint(-9, 9, shape)
    for view in (ids, mx.stack([ids, ids], axis=-1)[..., 0]):
        assert_rounded(quantized_embedding(view, *matrix.arrays), matrix.weights[np.array(ids)], mx.float32)


def test_dtype_of_the_result(rng):
    ids = mx.array([1, 2])
    for given, dtype in itertools.product((None, *DTYPES), DTYPES):
        affine = draw(FOUR_BITS, (3, 64), rng, dtype)
        result = quantized_embedding(ids, *affine.arrays, dtype=given)
        assert result.dtype == (given or dtype)
        assert_same_bits(result, quantized_embedding(ids, *affine.arrays).astype(result.dtype))
        with mx.stream(mx.cpu):
            assert result.dtype == mx.dequantize(*affine.arrays, dtype=given).dtype
    for format in FLOAT_FORMATS:
        assert quantized_embedding(ids, *draw(format, (3, 64), rng).arrays, **format.options).dtype == mx.bfloat16
    mixed = draw(FOUR_BITS, (3, 64), rng, mx.float16)
    assert quantized_embedding(ids, mixed.w, mixed.scales, mixed.biases.astype(mx.float32)).dtype == mx.float32


# ---- ids outside the matrix ------------------------------------------------------------------------------------------


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_known_ids_outside(dtype, rng):
    matrix = draw(FOUR_BITS, (9, 64), rng)
    outside = (9, 100) + ((-10,) if mx.issubdtype(dtype, mx.signedinteger) else ())
    for bad in outside:
        with pytest.raises(
            ValueError, match=rf"^\[quantized_embedding\] ids has {bad} and w 9 rows; allowed: -9 to 8\."
        ):
            quantized_embedding(ready(0, bad, 1, dtype=dtype), *matrix.arrays)


VIEWS = {
    "every second": lambda ids: mx.concatenate([ids[:, None], mx.zeros_like(ids)[:, None]], axis=1)[:, 0],
    "backwards": lambda ids: mx.contiguous(ids)[::-1],
    "transposed": lambda ids: mx.stack([ids, mx.zeros_like(ids)]).T,
    "broadcast": lambda ids: mx.broadcast_to(ids[:, None], (3, 5)),
    "broadcast scalar": lambda ids: mx.broadcast_to(ids[2], (2, 2)),
    "part of a matrix": lambda ids: mx.broadcast_to(mx.contiguous(mx.stack([ids] * 4))[1:3, 1:], (2, 2, 2)),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_known_ids_outside_in_views(view, dtype, rng):
    matrix = draw(FOUR_BITS, (9, 64), rng)
    for bad in (9, *((-10,) if mx.issubdtype(dtype, mx.signedinteger) else ())):
        ids = view(ready(0, 1, bad, dtype=dtype))
        mx.eval(ids)
        with pytest.raises(
            ValueError, match=rf"^\[quantized_embedding\] ids has {bad} and w 9 rows; allowed: -9 to 8\."
        ):
            quantized_embedding(ids, *matrix.arrays)
    inside = view(ready(0, 1, 8, dtype=dtype))
    mx.eval(inside)
    assert_rounded(quantized_embedding(inside, *matrix.arrays), matrix.weights[np.array(inside)], mx.float32)


@pytest.mark.cpu_only
def test_numbers_beside_a_view_are_not_looked_at(rng):
    matrix = draw(FOUR_BITS, (9, 64), rng)
    for view in (ready(8, 99, 0, 99, -9, 99)[::2], ready(99, 1, 2, 99)[1:3], ready(99, 5)[:0]):
        mx.eval(view)
        assert_rounded(quantized_embedding(view, *matrix.arrays), matrix.weights[np.array(view)], mx.float32)


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64, mx.uint32, mx.uint64], ids=str)
def test_unknown_ids_outside(dtype, rng):
    """Ids out of range that the host does not know are clamped. The op does not evaluate a graph to check them."""
    matrix = draw(FOUR_BITS, (9, 64), rng)
    numbers, rows = [9, 2**31 - 1], [8, 8]
    if mx.issubdtype(dtype, mx.signedinteger):
        numbers, rows = [*numbers, -10, -(2**31)], [*rows, 0, 0]
    if dtype in (mx.uint32, mx.uint64):
        numbers, rows = [*numbers, 2**32 - 1], [*rows, 8]
    if dtype in (mx.int64, mx.uint64):
        numbers, rows = [*numbers, 2**32 + 3, 2**62], [*rows, 8, 8]
    result = quantized_embedding(lazy(*numbers, dtype=dtype), *matrix.arrays)
    assert_rounded(result, matrix.weights[rows], mx.float32)


# ---- at once, or as a node of the graph ------------------------------------------------------------------------------


@pytest.mark.cpu_only
def test_rows_at_hand_are_taken_at_the_call(rng):
    matrix = draw(FOUR_BITS, (9, 128), rng)
    mx.eval(*matrix.arrays)
    kernels_at_call = {}
    for kind, ids in (("ready", ready(8, 0, -1)), ("lazy", lazy(8, 0, -1)), ("strided", ready(8, 5, 0, 5, -1, 5)[::2])):
        if kind == "strided":
            mx.eval(ids)
        with mlx_anvil.trace() as trace:
            result = quantized_embedding(ids, *matrix.arrays)
            kernels_at_call[kind] = len(trace.kernels)
            mx.eval(result)
        assert len(trace.kernels) == 1
        assert_rounded(result, matrix.weights[[8, 0, -1]], mx.float32)
    assert kernels_at_call == {"ready": 1, "lazy": 0, "strided": 0}


@pytest.mark.cpu_only
def test_many_rows_are_a_node(rng):
    """Above 2^20 elements the op is a graph node, because the caller would wait too long."""
    matrix = draw(FOUR_BITS, (9, 4096), rng)
    mx.eval(*matrix.arrays)
    for count, at_call in ((256, 1), (257, 0)):
        ids = mx.random.randint(0, 9, (count,))
        mx.eval(ids)
        with mlx_anvil.trace() as trace:
            result = quantized_embedding(ids, *matrix.arrays)
            assert len(trace.kernels) == at_call
            mx.eval(result)
        assert_rounded(result, matrix.weights[np.array(ids)], mx.float32)


@pytest.mark.cpu_only
def test_what_is_traced_is_a_node(rng):
    """Otherwise a compiled function would keep the rows of its first call, and a gradient would be zero."""
    matrix = draw(FOUR_BITS, (9, 128), rng)
    mx.eval(*matrix.arrays)
    compiled = mx.compile(lambda ids: quantized_embedding(ids, *matrix.arrays))
    for numbers in ((8, 0), (1, 7)):
        assert_rounded(compiled(ready(*numbers)), matrix.weights[list(numbers)], mx.float32)
    gradient = mx.grad(lambda s: quantized_embedding(ready(3), matrix.w, s, matrix.biases).sum())(matrix.scales)
    assert np.abs(to_numpy(gradient)[3]).min() > 0


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_reads_no_more_than_the_rows(rng):
    """The op allocates nothing of the matrix's size, and none of the intermediate arrays of MLX's gathers."""
    matrix = draw(FOUR_BITS, (4096, 512), rng)
    ids = mx.array([5, 4095, 7])
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        without_copies(quantized_embedding, ids, *matrix.arrays)
    assert len(trace.kernels) == 1
    assert kernel_names(trace)[0].replace("_rows", "").startswith("quantized_embedding_float32_affine4")


def test_matrix_inside_a_larger_one(rng):
    matrix = draw(FOUR_BITS, (9, 128), rng)
    ids = mx.array([3, 8, 3])
    expected = quantized_embedding(ids, *matrix.arrays)
    for view in (lambda a: mx.concatenate([a, a])[9:], lambda a: mx.concatenate([a, a], axis=1)[:, : a.shape[1]]):
        assert_same_bits(quantized_embedding(ids, *map(view, matrix.arrays)), expected)


# ---- transformations -------------------------------------------------------------------------------------------------


def test_equal_ids_add_up(rng):
    matrix = draw(FOUR_BITS, (3, 128), rng)
    ids = mx.array([1, 1, 2, 1])
    gradient = mx.grad(lambda b: quantized_embedding(ids, matrix.w, matrix.scales, b).sum())(matrix.biases)
    np.testing.assert_array_equal(to_numpy(gradient), [[0, 0], [192, 192], [64, 64]])


def test_vmap_over_ids(rng):
    matrix = draw(FOUR_BITS, (9, 64), rng)
    ids = mx.random.randint(0, 9, (2, 3, 4))
    for axis in (0, 1, 2):
        mapped = mx.vmap(lambda i: quantized_embedding(i, *matrix.arrays), in_axes=axis)(ids)
        assert_same_bits(mapped, quantized_embedding(mx.moveaxis(ids, axis, 0), *matrix.arrays))


@pytest.mark.parametrize("format", FLOAT_FORMATS, ids=str)
def test_vmap_over_matrices(format, rng):
    """Includes matrices with an odd number of groups, which MLX cannot dequantize."""
    matrices = [draw(format, (3, format.group_size), rng) for _ in range(2)]
    stacked = [mx.stack(parts) for parts in zip(*(m.arrays for m in matrices), strict=True)]
    ids = mx.array([2, 0])

    def rows(*arrays):
        return quantized_embedding(ids, *arrays, **format.options)

    mapped = mx.vmap(rows)(*stacked)
    assert_same_bits(mapped, mx.stack([rows(*matrix.arrays) for matrix in matrices]))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_nested_vmap_over_codes(bits, rng):
    """Tests the composed graph: MLX's own `dequantize` is wrong for some of these axes and bits."""
    w, scales, biases = mx.quantize(mx.array(rng.standard_normal((3, 2, 5, 64)), mx.float32), group_size=32, bits=bits)
    ids = mx.array([4, 0, 1])

    def rows(codes):
        return quantized_embedding(ids, codes, scales[0, 0], biases[0, 0], group_size=32, bits=bits)

    expected = mx.stack([mx.stack([rows(w[i, j]) for j in range(2)]) for i in range(3)])
    for outer, inner in itertools.product(range(4), range(3)):
        codes = mx.moveaxis(mx.moveaxis(w, 1, 1 + inner), 0, outer)
        mapped = mx.vmap(mx.vmap(rows, in_axes=inner), in_axes=outer)(codes)
        assert max_error(mapped, expected) < 1e-6, (outer, inner)


def test_no_gradient_in_integers(rng):
    for format, index, name in ((FOUR_BITS, 0, "w"), (FLOAT_FORMATS[0], 1, "scales")):
        arrays = draw(format, (3, 64), rng).arrays

        def of_one(x, index=index, arrays=arrays, format=format):
            return quantized_embedding(mx.array([1]), *arrays[:index], x, *arrays[index + 1 :], **format.options)

        with pytest.raises(ValueError, match=rf"^\[quantized_embedding\] no gradient in {name}, which holds integers"):
            mx.eval(mx.vjp(of_one, [arrays[index]], [mx.zeros((1, 64), of_one(arrays[index]).dtype)]))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bool_, mx.complex64], ids=str)
def test_ids_that_are_no_integers(dtype, rng):
    arrays = draw(FOUR_BITS, (3, 64), rng).arrays
    with pytest.raises(TypeError, match=r"^\[quantized_embedding\] ids has dtype .*; allowed: an integer dtype\."):
        quantized_embedding(mx.zeros((2,), dtype), *arrays)
    with pytest.raises(TypeError, match=r"^\[quantized_embedding\] ids is a list; allowed: mlx\.core\.array"):
        quantized_embedding([1], *arrays)


def test_matrix_and_options(rng):
    matrix = draw(FOUR_BITS, (3, 64), rng)
    ids = mx.array([1])
    wrong = {
        r"bits is 7; allowed in mode 'affine': 2, 3, 4, 5, 6, 8\.": {"bits": 7},
        r"w has shape .* and scales has shape .*; allowed with bits 8": {"bits": 8},
        r"dtype is int32; allowed: None, float32, float16, bfloat16\.": {"dtype": mx.int32},
    }
    for text, options in wrong.items():
        with pytest.raises(ValueError, match=rf"^\[quantized_embedding\] {text}"):
            quantized_embedding(ids, *matrix.arrays, **options)
    with pytest.raises(ValueError, match=r"w has shape \(1, 3, 8\); allowed: rank 2, \[rows, packed columns\]\."):
        quantized_embedding(ids, *(a[None] for a in matrix.arrays))
    with pytest.raises(ValueError, match=r"w has shape \(0, 8\) and ids has shape \(1,\); allowed: at least one row\."):
        quantized_embedding(ids, *(a[:0] for a in matrix.arrays))
    with pytest.raises(TypeError, match=r"^\[quantized_embedding\] dtype is a str; allowed: None, or mlx\.core\.Dtype"):
        quantized_embedding(ids, *matrix.arrays, dtype="float32")
    assert quantized_embedding(mx.zeros((0,), mx.int32), *(a[:0] for a in matrix.arrays)).shape == (0, 64)
