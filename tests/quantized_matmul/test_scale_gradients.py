"""Gradients in the scales and biases of affine matrices, against NumPy in float64. On the CPU, one kernel computes
both."""

import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES
from quantized_numpy import AFFINE_FORMATS, Format, Matrix, assert_rounded, draw, normal, unpack
from support import FLOAT32_TOLERANCE, GRADIENT_FACTOR, assert_same_bits, to_numpy

FOUR_BITS = Format("affine", 64, 4)
# More rows of x than the kernel takes at a time, and fewer than a vector of groups or many.
SHAPES = ((1, 37, 3), (2, 33, 1), (5, 70, 17), (9, 5, 2), (257, 37, 9), (520, 3, 1))

each_format = pytest.mark.parametrize("format", AFFINE_FORMATS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_product = pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
cpu_kernels = pytest.mark.cpu_only  # other backends run a graph of MLX ops


def product_of(x: mx.array, matrix: Matrix, transpose: bool = True) -> Callable[..., mx.array]:
    """The product as a function of scales and biases."""

    def product(scales: mx.array, biases: mx.array) -> mx.array:
        options = matrix.format.options
        return mlx_anvil.quantized_matmul(x, matrix.w, scales, biases, transpose=transpose, **options)

    return product


def gradients(x: mx.array, matrix: Matrix, dy: mx.array, transpose: bool = True) -> list[mx.array]:
    return list(mx.vjp(product_of(x, matrix, transpose), list(matrix.arrays[1:]), [dy])[1])


def exact_gradients(x: mx.array, matrix: Matrix, dy: mx.array, transpose: bool = True) -> list[np.ndarray]:
    left, right = (to_numpy(a) for a in ((dy, x) if transpose else (x, dy)))
    of_weights = left.swapaxes(-1, -2) @ right
    per_group = (*matrix.scales.shape, matrix.format.group_size)
    codes = unpack(np.array(matrix.w), matrix.format.bits)
    return [(a.reshape(per_group)).sum(-1) for a in (of_weights * codes, of_weights)]


def operands(
    matrix: Matrix, rows: int | tuple[int, ...], transpose: bool = True, dtype: mx.Dtype = mx.float32
) -> list[mx.array]:
    """x and a cotangent."""
    outputs, columns = matrix.w.shape[-2], matrix.scales.shape[-1] * matrix.format.group_size
    leading = rows if isinstance(rows, tuple) else (rows,)
    inner, outer = (columns, outputs) if transpose else (outputs, columns)
    return [normal((*leading, inner), dtype), normal((*leading, outer), dtype)]


def assert_values(
    format: Format, dtype: mx.Dtype, transpose: bool, shapes: tuple[tuple[int, int, int], ...], rng: np.random.Generator
) -> None:
    for rows, outputs, groups in shapes:
        matrix = draw(format, (outputs, groups * format.group_size), rng, dtype)
        x, dy = operands(matrix, rows, transpose, dtype)
        if format.bits == 8:  # sums of codes up to 255 exceed float16's largest number
            dy = dy / 64
        results = gradients(x, matrix, dy, transpose)
        for result, exact in zip(results, exact_gradients(x, matrix, dy, transpose), strict=True):
            assert_rounded(result, exact, dtype, factor=GRADIENT_FACTOR)


@each_product
@each_dtype
@each_format
def test_values(format, dtype, transpose, rng):
    assert_values(format, dtype, transpose, SHAPES, rng)


@cpu_kernels
@each_product
@each_dtype
def test_every_instruction_set(instruction_set, dtype, transpose, rng):
    for format in AFFINE_FORMATS:
        assert_values(format, dtype, transpose, SHAPES[:1] + SHAPES[2:4], rng)


@each_dtype
def test_one_of_both(dtype, rng):
    """The gradient in scales alone, or in biases alone, has the bits that it has beside the other."""
    for rows in (1, 6, 300):
        matrix = draw(FOUR_BITS, (37, 192), rng, dtype)
        x, dy = operands(matrix, rows, dtype=dtype)
        product, both = product_of(x, matrix), gradients(x, matrix, dy)
        (scales,) = mx.vjp(lambda s: product(s, matrix.biases), [matrix.scales], [dy])[1]  # noqa: B023
        (biases,) = mx.vjp(lambda b: product(matrix.scales, b), [matrix.biases], [dy])[1]  # noqa: B023
        assert_same_bits(scales, both[0])
        if support.backend == "cpu":
            assert_same_bits(biases, both[1])


@pytest.mark.parametrize(
    ("x_shape", "w_batch"),
    [
        ((2, 3, 4), ()),
        ((2, 3, 4), (3,)),
        ((2, 3, 4), (2, 1)),
        ((4,), (3,)),
        ((2, 0, 4), ()),
        ((0, 4), (0,)),
        ((0,), ()),
    ],
)
@each_product
def test_batches(x_shape, w_batch, transpose, rng):
    matrix = draw(FOUR_BITS, (*w_batch, 11, 128), rng)
    x, _ = operands(matrix, x_shape, transpose)
    dy = normal(product_of(x, matrix, transpose)(*matrix.arrays[1:]).shape)
    results = gradients(x, matrix, dy, transpose)
    stretched = Matrix(FOUR_BITS, *(mx.broadcast_to(a, (*dy.shape[:-2], *a.shape[-2:])) for a in matrix.arrays))
    wide = mx.broadcast_to(x, (*dy.shape[:-1], x.shape[-1]))
    for result, exact in zip(results, exact_gradients(wide, stretched, dy, transpose), strict=True):
        summed = exact.sum(axis=tuple(range(exact.ndim - result.ndim)))
        once = tuple(i for i, n in enumerate(result.shape) if n == 1 and summed.shape[i] != 1)
        assert_rounded(result, summed.sum(axis=once, keepdims=True), mx.float32, factor=GRADIENT_FACTOR)


def test_no_rows_of_the_matrix_and_no_columns(rng):
    for outputs, columns in ((0, 128), (5, 0)):
        x, dy = mx.zeros((3, columns)), mx.zeros((3, outputs))
        w, per_group = mx.zeros((outputs, columns // 8), mx.uint32), mx.zeros((outputs, columns // 64))
        for result in gradients(x, Matrix(FOUR_BITS, w, per_group, per_group), dy):
            assert result.shape == per_group.shape
            mx.eval(result)


def test_any_layout(rng):
    matrix = draw(FOUR_BITS, (37, 192), rng)
    x, dy = operands(matrix, 10)
    expected = gradients(x, matrix, dy)
    columns = [mx.contiguous(a.T).T for a in (x, dy)]
    every_third = [mx.contiguous(mx.repeat(a, 3, axis=-1))[..., 1::3] for a in (x, dy)]
    for moved in (columns, every_third):
        for result, same in zip(gradients(moved[0], matrix, moved[1]), expected, strict=True):
            assert_same_bits(result, same)


# ---- extremes --------------------------------------------------------------------------------------------------------


def test_float16_sums_beyond_its_largest_number(rng):
    """Terms of 40000 that nearly cancel: every result is finite, and partial sums are not in float16."""
    for rows in (8, 40):
        matrix = Matrix.of_codes(FOUR_BITS, rng.integers(0, 16, (37, 128)), scale=0.01, dtype=mx.float16)
        x = mx.full((rows, 128), 200, mx.float16)
        dy = mx.array(np.where(np.arange(rows) % 4 < 2, 200, -200)[:, None] * np.ones((1, 37))).astype(mx.float16)
        dy = dy + 0.125 * (mx.arange(rows)[:, None] == 0).astype(mx.float16)
        results = gradients(x, matrix, dy)
        for result, exact in zip(results, exact_gradients(x, matrix, dy), strict=True):
            assert_rounded(result, exact, mx.float16, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@cpu_kernels
def test_large_numbers(instruction_set, dtype, rng):
    """Sums of codes times x overflow, and the gradients do not, because the cotangent is small."""
    for rows in (1, 3, 300):
        matrix = draw(FOUR_BITS, (37, 192), rng, dtype)
        x, dy = operands(matrix, rows, dtype=dtype)
        x[::2] = (mx.sign(x[::2]) * 3e38).astype(dtype)
        dy[::2] = dy[::2] * 2.0**-120
        results = gradients(x, matrix, dy)
        for result, exact in zip(results, exact_gradients(x, matrix, dy), strict=True):
            assert_rounded(result, exact, dtype, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite(value, rng):
    """In the groups of that column of x, and in no other."""
    for rows in (1, 5):
        matrix = draw(FOUR_BITS, (37, 192), rng)
        x, dy = operands(matrix, rows)
        x[0, 70] = value
        for result in gradients(x, matrix, dy):
            assert not np.isfinite(to_numpy(result)[:, 1]).any()
            assert np.isfinite(to_numpy(result)[:, [0, 2]]).all()


# ---- transformations -------------------------------------------------------------------------------------------------


@each_product
def test_vmap_over_every_subset(transpose, rng):
    matrix = draw(FOUR_BITS, (3, 7, 128), rng)
    batched = [*matrix.arrays, *operands(matrix, (3, 2), transpose)]

    def both(*arrays):
        *of_matrix, x, dy = arrays
        return mx.concatenate(gradients(x, Matrix(FOUR_BITS, *of_matrix), dy, transpose))

    for axes in itertools.product((0, None), repeat=len(batched)):
        if all(axis is None for axis in axes):
            continue
        given = [x if axis == 0 else x[0] for x, axis in zip(batched, axes, strict=True)]
        expected = [both(*(x if a is None else x[i] for x, a in zip(given, axes, strict=True))) for i in range(3)]
        mapped = mx.vmap(both, in_axes=axes)(*given)
        assert support.max_error(mapped, mx.stack(expected)) <= support.OTHER_KERNEL


@each_product
@pytest.mark.parametrize("format", [FOUR_BITS, Format("affine", 32, 3), Format("affine", 128, 8)], ids=str)
def test_second_derivatives(format, transpose, rng):
    """Gradients are linear in x and in the cotangent, so that their derivatives are products with C: codes times one
    cotangent plus the other."""
    for rows in (1, 4, 20):
        matrix = draw(format, (13, 2 * format.group_size), rng)
        x, dy = operands(matrix, rows, transpose)
        cotangents = [normal(matrix.scales.shape) for _ in range(2)]
        c = Matrix(format, matrix.w, *cotangents).weights
        of_x, of_dy = mx.vjp(lambda x, dy: gradients(x, matrix, dy, transpose), [x, dy], cotangents)[1]  # noqa: B023
        left, right = (c, c.T) if transpose else (c.T, c)
        assert_rounded(of_x, to_numpy(dy) @ left, mx.float32, factor=GRADIENT_FACTOR)
        assert_rounded(of_dy, to_numpy(x) @ right, mx.float32, factor=GRADIENT_FACTOR)

        tangents = [normal(x.shape), normal(dy.shape)]
        moved = mx.jvp(lambda x, dy: gradients(x, matrix, dy, transpose), [x, dy], tangents)[1]  # noqa: B023
        terms = [exact_gradients(a, matrix, b, transpose) for a, b in ((tangents[0], dy), (x, tangents[1]))]
        for result, *exact in zip(moved, *terms, strict=True):
            assert_rounded(result, sum(exact), mx.float32, factor=GRADIENT_FACTOR)


def test_numerical_gradient(rng):
    """Of a loss that is not linear in the product, by finite differences along one direction."""
    matrix = draw(FOUR_BITS, (9, 128), rng)
    x, _ = operands(matrix, 4)
    directions = [normal(matrix.scales.shape) for _ in range(2)]
    codes = unpack(np.array(matrix.w), 4).reshape(9, 2, 64)
    scales, biases, ds, db = (to_numpy(a) for a in (*matrix.arrays[1:], *directions))

    def loss(step: float) -> float:
        weights = codes * (scales + step * ds)[..., None] + (biases + step * db)[..., None]
        return float(np.sin(to_numpy(x) @ weights.reshape(9, 128).T / 100).sum())

    def ours(scales: mx.array, biases: mx.array) -> mx.array:
        return mx.sin(product_of(x, matrix)(scales, biases) / 100).sum()

    results = mx.grad(ours, argnums=(0, 1))(*matrix.arrays[1:])
    slope = sum((to_numpy(a) * d).sum() for a, d in zip(results, (ds, db), strict=True))
    numerical = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert abs(slope - numerical) <= 10 * FLOAT32_TOLERANCE * max(1, abs(numerical))


@pytest.mark.parametrize("shapeless", [False, True])
def test_compiled(shapeless, rng):
    matrix = draw(FOUR_BITS, (37, 192), rng)
    compiled = mx.compile(lambda x, dy: gradients(x, matrix, dy), shapeless=shapeless)
    for rows in (4, 9):
        x, dy = operands(matrix, rows)
        for result, expected in zip(compiled(x, dy), gradients(x, matrix, dy), strict=True):
            assert support.max_error(result, expected) <= support.OTHER_KERNEL


@cpu_kernels
def test_w_has_no_gradient(rng):
    matrix = draw(FOUR_BITS, (5, 64), rng)
    x, dy = operands(matrix, 2)

    def of_w(w):
        return gradients(x, Matrix(FOUR_BITS, w, *matrix.arrays[1:]), dy)

    with pytest.raises(ValueError, match=r"\[quantized_matmul\] no gradient in w"):
        mx.eval(mx.vjp(of_w, [matrix.w], [matrix.scales, matrix.scales])[1])


@cpu_kernels
def test_one_kernel_for_both(rng):
    matrix = draw(FOUR_BITS, (16, 128), rng)
    for rows in (1, 8, 40):
        x, dy = operands(matrix, rows)
        with mlx_anvil.trace() as trace, mlx_anvil.strict():
            mx.eval(gradients(x, matrix, dy))
        assert len(trace.kernels) == 1
        assert "quantized_scale_gradient" in trace.kernels[0]


@cpu_kernels
def test_swiglu_by_kernels(rng):
    gate, up = (draw(FOUR_BITS, (16, 128), rng) for _ in range(2))
    x, dy = operands(gate, 4)

    def product(scales, biases):
        return mlx_anvil.quantized_swiglu(x, (gate.w, scales, biases), up.arrays, **FOUR_BITS.options)

    with mlx_anvil.strict():
        results = mx.vjp(product, list(gate.arrays[1:]), [dy])[1]
    g, u = (to_numpy(x) @ m.weights.T for m in (gate, up))
    sigmoid = 1 / (1 + np.exp(-g))
    of_gate = mx.array((to_numpy(dy) * u * sigmoid * (1 + g * (1 - sigmoid))).astype(np.float32))
    for result, exact in zip(results, exact_gradients(x, gate, of_gate), strict=True):
        assert_rounded(result, exact, mx.float32, factor=GRADIENT_FACTOR, float32_tolerance=5 * FLOAT32_TOLERANCE)
