"""Tests of quantized_matmul and quantized_gemv beyond the contract: formats, shapes and dtypes against NumPy in
float64."""

import itertools
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES
from quantized_numpy import (
    FLOAT_FORMATS,
    FORMATS,
    Format,
    Matrix,
    assert_rounded,
    dense_factor,
    draw,
    exact_product,
    gradients,
    normal,
)
from support import GRADIENT_FACTOR, assert_same_bits, poison_memory, to_numpy

quantized_matmul, quantized_gemv = mlx_anvil.quantized_matmul, mlx_anvil.quantized_gemv

ROWS = (1, 2, 3, 5, 8, 9, 33)
GROUPS = (1, 3, 5, 10)  # columns, in groups
OUTPUTS = (1, 7, 31, 64, 97)

each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One of each unpacking and scale: for what does not depend on the arithmetic.
some_formats = pytest.mark.parametrize(
    "format", [Format("affine", 64, 4), Format("affine", 32, 3), *FLOAT_FORMATS], ids=str
)


def multiply(x: mx.array, matrix: Matrix, transpose: bool = True) -> mx.array:
    return quantized_matmul(x, *matrix.arrays, transpose=transpose, **matrix.format.options)


def views(x: mx.array) -> Iterator[mx.array]:
    """The same matrix in other memory layouts."""
    yield mx.contiguous(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    yield mx.contiguous(mx.repeat(x, 2, axis=0))[::2]
    yield mx.contiguous(mx.repeat(x, 3, axis=-1))[..., 1::3]
    yield mx.contiguous(x[:, ::-1])[:, ::-1]
    yield mx.contiguous(mx.concatenate([x.reshape(-1)[:1], x.reshape(-1)]))[1:].reshape(x.shape)


# ---- values ----------------------------------------------------------------------------------------------------------


@each_dtype
@each_format
def test_forward(format, dtype, rng):
    for index, rows in enumerate(ROWS):
        groups, outputs = GROUPS[index % len(GROUPS)], OUTPUTS[index % len(OUTPUTS)]
        matrix = draw(format, (outputs, groups * format.group_size), rng, dtype)
        for transpose, inner in ((True, groups * format.group_size), (False, outputs)):
            x = normal((rows, inner), dtype)
            exact = exact_product(x, matrix, transpose)
            poison_memory(2 * exact.size)
            with mlx_anvil.strict():
                result = multiply(x, matrix, transpose)
                mx.eval(result)
            assert_rounded(result, exact, dtype, terms=inner, factor=dense_factor(rows))


@pytest.mark.alike("dtype", "group_size")
@pytest.mark.parametrize(
    ("outputs", "columns"), [(4667, 2304), (17411, 256), (65539, 512)], ids=["4667", "17411", "65539"]
)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_matrices_of_many_rows(dtype, group_size, outputs, columns, rng, request):
    # On GPUs, tiles of more rows of w, some of half as many among them, and threadgroups that take several.
    if request.config.getoption("--backend") == "simulator":
        pytest.skip("too many for the simulator; test_matrix_units.py has some")
    matrix = draw(Format("affine", group_size, 4), (outputs, columns), rng, dtype)
    x = normal((8, columns), dtype)
    whole = multiply(x, matrix)
    assert_rounded(whole, exact_product(x, matrix), dtype, terms=columns)
    for first, count in ((0, 1), (5, 2), (2, 5)):
        assert_same_bits(multiply(x[first : first + count], matrix), whole[first : first + count])


@each_dtype
@some_formats
def test_matrices_larger_than_a_block(format, dtype, rng):
    """Sizes that are split between threads, blocks and parts, just off round numbers."""
    if support.backend == "simulator":
        pytest.skip("minutes in the simulator; its tests have sizes of their own")
    matrix = draw(format, (1155, 17 * 128), rng, dtype)
    for rows, transpose in itertools.product((1, 4, 8, 50, 133), (True, False)):
        x = normal((rows, 17 * 128 if transpose else 1155), dtype)
        exact = exact_product(x, matrix, transpose)
        assert_rounded(multiply(x, matrix, transpose), exact, dtype, factor=dense_factor(rows))


@each_dtype
@pytest.mark.parametrize(
    "format",
    [Format("affine", 32, 4), Format("affine", 64, 4), Format("affine", 128, 8), *FLOAT_FORMATS],
    ids=str,
)
def test_where_in_a_cache_line_arrays_begin(format, dtype, rng):
    """Some kernels start blocks of columns at cache lines. That changes which lane sums what, but not the result."""
    if support.backend == "simulator":
        pytest.skip("addresses are nothing to its kernels")
    for outputs, columns in ((37, 128), (140, 1152), (9, 17 * 1024)):
        matrix = draw(format, (outputs, columns), rng, dtype)
        for transpose in (True, False):
            x = normal((1, columns if transpose else outputs), dtype)
            first, exact = multiply(x, matrix, transpose), exact_product(x, matrix, transpose)
            assert_rounded(first, exact, dtype, terms=x.shape[1])
            words = matrix.w.reshape(-1)
            for place in range(1, 16):
                moved = mx.contiguous(mx.concatenate([words[:place], words]))[place:].reshape(matrix.w.shape)
                others = matrix.arrays[1:]
                again = quantized_matmul(x, moved, *others, transpose=transpose, **format.options)
                if support.backend == "cuda":  # there another kernel serves arrays that wide loads cannot read
                    assert_rounded(again, exact, dtype, terms=x.shape[1])
                else:
                    assert_same_bits(again, first)


@each_dtype
@each_format
def test_gradients(format, dtype, rng):
    for rows, outputs, groups in ((3, 37, 3), (9, 5, 1)):
        matrix = draw(format, (outputs, groups * format.group_size), rng, dtype)
        x, dy = normal((rows, groups * format.group_size), dtype), normal((rows, outputs), dtype)
        others = matrix.arrays[1:] if format.affine else ()

        def product(x, *others, matrix=matrix):
            return quantized_matmul(x, matrix.w, *(others or matrix.arrays[1:]), **matrix.format.options)

        results = mx.vjp(product, [x, *others], [dy])[1]
        for result, exact in zip(results, gradients(x, matrix, dy), strict=True):
            assert_rounded(result, exact, dtype, factor=max(GRADIENT_FACTOR, dense_factor(rows)))


@each_format
def test_tangents(format, rng):
    matrix = draw(format, (21, 3 * format.group_size), rng)
    primals = [normal((5, 3 * format.group_size)), *(matrix.arrays[1:] if format.affine else ())]
    tangents = [normal(x.shape) for x in primals]

    def product(x, *others):
        return quantized_matmul(x, matrix.w, *(others or matrix.arrays[1:]), **format.options)

    exact = exact_product(tangents[0], matrix)
    if format.affine:
        exact = exact + exact_product(primals[0], Matrix(format, matrix.w, *tangents[1:]))
    (result,) = mx.jvp(product, primals, tangents)[1]
    assert_rounded(result, exact, mx.float32, factor=GRADIENT_FACTOR)


@some_formats
def test_second_derivative_in_x(format, rng):
    """The gradient of |x W^T|^2 is 2 x W^T W, from which its derivative follows."""
    matrix = draw(format, (19, 2 * format.group_size), rng)
    x, direction = (normal((3, 2 * format.group_size)) for _ in range(2))
    weights = matrix.weights
    gradient = mx.grad(lambda x: (multiply(x, matrix) ** 2).sum())
    (result,) = mx.vjp(gradient, [x], [direction])[1]
    assert_rounded(result, 2 * to_numpy(direction) @ weights.T @ weights, mx.float32, factor=GRADIENT_FACTOR)


# ---- rows do not depend on each other --------------------------------------------------------------------------------


@each_dtype
@each_format
def test_rows_do_not_depend_on_their_number(format, dtype, rng):
    """Speculative decoding relies on this: a row has the same bits for every number of rows and at every position. On
    Apple's GPUs, quantized_matmul of 3 to 8 rows has other bits than of 1 or 2; quantized_gemv has the same."""
    most = 2 if support.backend in ("simulator", "metal") else 8
    for outputs, groups in ((37, 5), (3, 33)):
        matrix = draw(format, (outputs, groups * format.group_size), rng, dtype)
        x = normal((8, groups * format.group_size), dtype)
        single = mx.concatenate([multiply(x[i : i + 1], matrix) for i in range(8)])
        several = single if most == 8 else multiply(x, matrix)
        for count in range(2, 9):
            for first in {0, 8 - count, (8 - count) // 2}:
                rows = slice(first, first + count)
                assert_same_bits(multiply(x[rows], matrix), (single if count <= most else several)[rows])
                assert_same_bits(quantized_gemv(x[rows], *matrix.arrays, **format.options), single[rows])
        assert_same_bits(multiply(x[::-1], matrix), mx.contiguous(several[::-1]))
        assert_same_bits(multiply(x.reshape(2, 4, -1), matrix), several.reshape(2, 4, -1))
        assert_same_bits(multiply(x[3], matrix), single[3])


@some_formats
def test_rows_do_not_depend_on_their_neighbours(format, rng):
    """A NaN or an infinity affects only its own row."""
    matrix = draw(format, (9, 2 * format.group_size), rng)
    for rows in (2, 8, 20):
        x = normal((rows, 2 * format.group_size))
        clean = multiply(x, matrix)
        for poison in (np.nan, np.inf):
            spoiled = to_numpy(x).astype(np.float32)
            spoiled[1, 3] = poison
            result = multiply(mx.array(spoiled), matrix)
            others = mx.array([i for i in range(rows) if i != 1])
            assert_same_bits(result[others], clean[others])
            assert not np.isfinite(to_numpy(result[1])).any()


def test_gemv_is_the_product_of_few_rows(rng):
    format = Format("affine", 64, 4)
    matrix = draw(format, (33, 192), rng)
    for shape in ((192,), (1, 192), (8, 192), (2, 4, 192)):
        x = normal(shape)
        rows = mx.concatenate([multiply(row[None], matrix) for row in x.reshape(-1, 192)])
        assert_same_bits(quantized_gemv(x, *matrix.arrays, **format.options), rows.reshape(*shape[:-1], 33))
    with pytest.raises(ValueError, match=r"^\[quantized_gemv\] x has shape \(9, 192\).*allowed: at most 8"):
        quantized_gemv(normal((9, 192)), *matrix.arrays, **format.options)


# ---- shapes and layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x_shape", "w_batch"),
    [
        ((2, 3, 4), ()),
        ((2, 3, 4), (3,)),
        ((2, 3, 4), (2, 3)),
        ((2, 3, 4), (2, 1)),
        ((4,), (3,)),
        ((1, 9), (3,)),
        ((3, 1), (2, 1)),
        ((2, 0, 4), ()),
        ((0, 4), (0,)),
        ((0,), ()),
    ],
)
@some_formats
def test_batches(format, x_shape, w_batch, rng):
    columns, outputs = 2 * format.group_size, 11
    matrix = draw(format, (*w_batch, outputs, columns), rng)
    for transpose, inner in ((True, columns), (False, outputs)):
        x = normal((*x_shape, inner))
        result, exact = multiply(x, matrix, transpose), exact_product(x, matrix, transpose)
        assert_rounded(result, exact, mx.float32)
        dy = normal(result.shape)
        (gradient,) = mx.vjp(lambda x, transpose=transpose: multiply(x, matrix, transpose), [x], [dy])[1]
        by_rows = to_numpy(dy) @ (matrix.weights if transpose else matrix.weights.swapaxes(-1, -2))
        summed = by_rows.sum(axis=tuple(range(by_rows.ndim - x.ndim)))
        stretched = tuple(i for i, n in enumerate(x.shape) if n == 1 and summed.shape[i] != 1)
        assert_rounded(gradient, summed.sum(axis=stretched, keepdims=True), mx.float32, factor=GRADIENT_FACTOR)


@each_dtype
@some_formats
def test_any_layout_of_the_matrix(format, dtype, rng):
    matrix = draw(format, (2, 6, 2 * format.group_size), rng, dtype)
    x = normal((2, 3, 2 * format.group_size), dtype)
    expected = multiply(x, matrix)
    for index, array in enumerate(matrix.arrays):
        for view in views(array):
            moved = [*matrix.arrays[:index], view, *matrix.arrays[index + 1 :]]
            assert_same_bits(quantized_matmul(x, *moved, **format.options), expected)


@pytest.mark.parametrize("scales_dtype", DTYPES, ids=str)
@each_dtype
def test_scales_of_another_dtype(dtype, scales_dtype, rng):
    format = Format("affine", 64, 4)
    matrix, x = draw(format, (13, 128), rng, scales_dtype), normal((3, 128), dtype)
    result = multiply(x, matrix)
    assert result.dtype == (mx.zeros((), dtype) + mx.zeros((), scales_dtype)).dtype
    assert_rounded(result, exact_product(x, matrix), result.dtype)


def test_the_defaults_are_those_of_mlx(rng):
    for mode in ("affine", "mxfp4", "mxfp8", "nvfp4"):
        parts = mx.quantize(normal((8, 128)), mode=mode)
        x = normal((2, 128))
        expected = mx.quantized_matmul(x, *parts, mode=mode, stream=mx.cpu)
        result = quantized_matmul(x, *parts, mode=mode)
        assert support.max_error(result, expected) <= support.FLOAT32_TOLERANCE


# ---- transformations -------------------------------------------------------------------------------------------------


@some_formats
def test_vmap_over_every_subset(format, rng):
    """vmap over any of the arrays, including w, which MLX's own op refuses."""
    matrix = draw(format, (3, 7, 2 * format.group_size), rng)
    batched = [normal((3, 2, 2 * format.group_size)), *matrix.arrays]

    def product(*arrays):
        return quantized_matmul(*arrays, **format.options)

    for axes in itertools.product((0, None), repeat=len(batched)):
        if all(axis is None for axis in axes):
            continue
        given = [x if axis == 0 else x[0] for x, axis in zip(batched, axes, strict=True)]
        expected = [product(*(x if a is None else x[i] for x, a in zip(given, axes, strict=True))) for i in range(3)]
        mapped = mx.vmap(product, in_axes=axes)(*given)
        assert support.max_error(mapped, mx.stack(expected)) <= support.OTHER_KERNEL


def test_one_kernel_forward_and_one_for_the_gradient_in_x(rng):
    format = Format("affine", 64, 4)
    matrix = draw(format, (16, 128), rng)
    for rows in (1, 8, 40):
        x, dy = normal((rows, 128)), normal((rows, 16))
        with mlx_anvil.trace() as trace, mlx_anvil.strict():
            mx.eval(multiply(x, matrix))
        assert len(trace.kernels) == 1
        with mlx_anvil.trace() as trace, mlx_anvil.strict():
            mx.eval(mx.vjp(lambda x: multiply(x, matrix), [x], [dy])[1])
        assert len(trace.kernels) == 1
