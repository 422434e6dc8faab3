"""Float32 inputs with scales and biases of 16 bits: on the CPU, products read these as they are. The results are those
of scales converted before, bit for bit."""

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from quantized_numpy import AFFINE_FORMATS, Format, Matrix, any_format_of_each_kind, draw, exact_product, normal
from support import assert_same_bits, to_numpy

pytestmark = pytest.mark.cpu_only

HALVES = [mx.float16, mx.bfloat16]
AFFINE4 = Format("affine", 64, 4)
Product = Callable[..., mx.array]

halves = pytest.mark.parametrize("half", HALVES, ids=str)


def in_float32(arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    w, *scales = arrays
    return (w, *(array.astype(mx.float32) for array in scales))


def product_of(format: Format, op: Callable[..., Any] = mlx_anvil.quantized_matmul, **options: Any) -> Product:
    return lambda x, *matrix: op(x, *matrix, **format.options, **options)


def conversions(product: Product, x: mx.array, arrays: tuple[mx.array, ...]) -> int:
    """Conversions of dtypes in the graph of a call."""
    mx.eval(x, arrays)
    text, result = io.StringIO(), product(x, *arrays)
    mx.export_to_dot(text, result)
    return text.getvalue().count("AsType")


@halves
def test_every_format_and_number_of_rows(instruction_set, half, rng):
    for format in AFFINE_FORMATS:
        columns = format.group_size * int(rng.integers(3, 40))
        matrix = draw(format, (int(rng.integers(33, 90)), columns), rng, half)
        for rows in (1, 2, 3, 8, 9, 37):
            for transpose in (True, False):
                product = product_of(format, transpose=transpose)
                x = normal((rows, columns if transpose else matrix.w.shape[0]))
                result = product(x, *matrix.arrays)
                assert result.dtype == mx.float32
                assert conversions(product, x, matrix.arrays) == 0
                assert_same_bits(result, product(x, *in_float32(matrix.arrays)))


@halves
def test_beside_float64(instruction_set, half, rng):
    for format in any_format_of_each_kind(rng):
        matrix = draw(format, (70, 5 * 128), rng, half)
        for rows in (1, 5, 20):
            x = normal((rows, 5 * 128))
            exact = exact_product(x, matrix)
            result = to_numpy(product_of(format)(x, *matrix.arrays))
            assert np.abs(result - exact).max() <= 1e-5 * np.abs(exact).max()


@halves
@pytest.mark.parametrize("bits", [8, 16])
def test_rounded_activations(instruction_set, bits, half, rng):
    for format in (AFFINE4, Format("affine", 32, 6), Format("affine", 128, 8)):
        matrix = draw(format, (50, 4 * 128), rng, half)
        for rows in (1, 2, 8, 20):
            x, product = normal((rows, 4 * 128)), product_of(format, activation_bits=bits)
            assert_same_bits(product(x, *matrix.arrays), product(x, *in_float32(matrix.arrays)))


@halves
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e-40, 3e38])
def test_numbers_that_have_no_integers(instruction_set, value, half, rng):
    matrix = draw(AFFINE4, (70, 512), rng, half)
    for rows in (1, 4, 20):
        for transpose in (True, False):
            x = np.array(normal((rows, 512 if transpose else 70)))
            x[rows // 2, 7] = value
            for arrays in (matrix.arrays, of_infinite_scale(matrix)):
                product = product_of(AFFINE4, transpose=transpose)
                result, expected = (to_numpy(product(mx.array(x), *a)) for a in (arrays, in_float32(arrays)))
                np.testing.assert_array_equal(result, expected)


def of_infinite_scale(matrix: Matrix) -> tuple[mx.array, ...]:
    scales = np.array(matrix.scales.astype(mx.float32))
    scales[3, 1] = np.inf
    return matrix.w, mx.array(scales).astype(matrix.scales.dtype), matrix.biases


@halves
def test_all_ops(instruction_set, half, rng):
    options = AFFINE4.options
    gate, up = (draw(AFFINE4, (96, 128), rng, half).arrays for _ in range(2))
    down = draw(AFFINE4, (64, 128), rng, half).arrays
    sides = [tuple(mx.stack([array] * 3) for array in matrix) for matrix in (gate, up)]
    narrow = tuple(mx.stack([array] * 3) for array in draw(Format("affine", 32, 4), (64, 96), rng, half).arrays)
    for tokens in (1, 3, 8, 40):
        x = normal((tokens, 128)) * 0.1
        ids = mx.array(rng.integers(0, 3, (tokens, 2)))
        weights = mx.array(rng.random((tokens, 2)).astype(np.float32))

        def experts(gate, up, down, x=x, ids=ids, weights=weights):
            return mlx_anvil.quantized_experts(x, ids, weights, gate, up, down, down_group_size=32, **options)

        def topk(*matrix, x=x):
            return mlx_anvil.quantized_topk(x, *matrix, k=5, **options)

        def gathered(*matrix, x=x, ids=ids):
            return mlx_anvil.gather_quantized_matmul(x[:, None, None], *matrix, rhs_indices=ids, **options)

        def plain(*matrix, x=x[:, None, None, :96], ids=ids):
            return mlx_anvil.gather_quantized_matmul(x, *matrix, rhs_indices=ids, transpose=False, **options)

        same(lambda a, b, x=x: mlx_anvil.quantized_swiglu(x, a, b, **options), gate, up)
        same(lambda a, x=x: mlx_anvil.quantized_argmax(x, *a, **options), down)
        same(lambda a: topk(*a)[0], down)
        same(lambda a: topk(*a)[1], down)
        same(lambda a: gathered(*a), sides[0])
        same(lambda a: plain(*a), sides[1])
        same(experts, *sides, narrow)
        if tokens <= 8:
            same(lambda a, x=x: mlx_anvil.quantized_gemv(x, *a, **options), gate)


def same(function: Product, *matrices: tuple[mx.array, ...]) -> None:
    """Bits, also if some matrices have 16 bits and others have not."""
    expected = function(*(in_float32(matrix) for matrix in matrices))
    assert_same_bits(function(*matrices), expected)
    assert_same_bits(function(in_float32(matrices[0]), *matrices[1:]), expected)


@halves
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=["shared", "batched"])
def test_derivatives(batch, half, rng):
    for transpose in (True, False):
        for format in any_format_of_each_kind(rng):
            if not format.affine:
                continue
            columns = 2 * format.group_size
            matrix = draw(format, (*batch, 40, columns), rng, half)
            x = normal((*batch, 5, columns if transpose else 40))
            product = product_of(format, transpose=transpose)
            check_derivatives(product, x, matrix.arrays, rng)


def check_derivatives(product: Product, x: mx.array, arrays: tuple[mx.array, ...], rng: np.random.Generator) -> None:
    w, scales, biases = arrays

    def of_floats(x, scales, biases):
        return product(x, w, scales, biases)

    def of_wide(x, scales, biases):
        return product(x, *in_float32((w, scales, biases)))

    floats = [x, scales, biases]
    cotangent = normal(of_floats(*floats).shape) * 1e-3  # gradients of second order have to be float16, too
    tangents = [normal(array.shape).astype(array.dtype) for array in floats]

    def gradients(function):
        return lambda *floats: mx.vjp(function, list(floats), [cotangent])[1]

    for ours, theirs in zip(gradients(of_floats)(*floats), gradients(of_wide)(*floats), strict=True):
        assert_same_bits(ours, theirs)
    assert [array.dtype for array in gradients(of_floats)(*floats)] == [array.dtype for array in floats]
    for function in (of_floats, of_wide):
        assert mx.jvp(function, floats, tangents)[1][0].dtype == mx.float32
    ours, theirs = (to_numpy(mx.jvp(f, floats, tangents)[1][0]) for f in (of_floats, of_wide))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())

    def of_gradients(function):  # whose gradients are of second order
        return lambda *floats: sum(g.astype(mx.float32).square().sum() for g in gradients(function)(*floats))

    seconds = [mx.grad(of_gradients(f), argnums=[0, 1, 2])(*floats) for f in (of_floats, of_wide)]
    for mine, other in zip(*seconds, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(
            to_numpy(mine), to_numpy(other), rtol=2e-2, atol=1e-2 * np.abs(to_numpy(other)).max()
        )


@halves
def test_derivatives_of_other_ops(half, rng):
    options = AFFINE4.options
    gate, up = (draw(AFFINE4, (64, 128), rng, half).arrays for _ in range(2))
    x = normal((3, 128)) * 0.1
    stacked = tuple(mx.stack([a, b]) for a, b in zip(gate, up, strict=True))
    ids = mx.array([[0, 1], [1, 1], [0, 0]])
    check_gradients(lambda x, s, b: mlx_anvil.quantized_swiglu(x, (gate[0], s, b), up, **options), x, *gate[1:])
    check_gradients(lambda x, s, b: mlx_anvil.quantized_topk(x, gate[0], s, b, k=3, **options)[1], x, *gate[1:])
    gathered = lambda x, s, b: mlx_anvil.gather_quantized_matmul(  # noqa: E731
        x[:, None, None], stacked[0], s, b, rhs_indices=ids, **options
    )
    check_gradients(gathered, x, *stacked[1:])


def check_gradients(function: Product, x: mx.array, scales: mx.array, biases: mx.array) -> None:
    def wide(x, scales, biases):
        return function(x, scales.astype(mx.float32), biases.astype(mx.float32))

    floats = [x, scales, biases]
    cotangent = normal(function(*floats).shape)
    for ours, theirs in zip(*(mx.vjp(f, floats, [cotangent])[1] for f in (function, wide)), strict=True):
        assert_same_bits(ours, theirs)


@halves
def test_transforms(half, rng):
    matrix, x = draw(AFFINE4, (40, 256), rng, half), normal((5, 2, 256))
    w, scales, biases = matrix.arrays
    product = product_of(AFFINE4)
    rows = product(x, *matrix.arrays)
    assert_same_bits(mx.vmap(lambda x: product(x, *matrix.arrays))(x), rows)
    several = [mx.stack([array, array[::-1]]) for array in matrix.arrays]
    each = mx.stack([product(x, w, scales, biases), product(x, w[::-1], scales[::-1], biases[::-1])])
    assert_same_bits(mx.vmap(lambda *arrays: product(x, *arrays))(*several), each)
    for shapeless in (False, True):
        compiled = mx.compile(product, shapeless=shapeless)
        for count in (5, 3):
            assert_same_bits(compiled(x[:count], *matrix.arrays), product(x[:count], *matrix.arrays))
            assert_same_bits(compiled(x[:count], *in_float32(matrix.arrays)), product(x[:count], *matrix.arrays))


@halves
def test_export(half, rng, tmp_path):
    matrix, x = draw(AFFINE4, (40, 256), rng, half), normal((3, 256))
    path = str(tmp_path / "product.mlxfn")
    with mlx_anvil.composed():
        mx.export_function(path, product_of(AFFINE4), x, *matrix.arrays)
    (result,) = mx.import_function(path)(x, *matrix.arrays)
    np.testing.assert_allclose(to_numpy(result), exact_product(x, matrix), rtol=1e-4, atol=1e-4)


def test_other_pairs_of_dtypes_are_converted(rng):
    matrix, x = draw(AFFINE4, (40, 256), rng, mx.float16), normal((3, 256))
    product = product_of(AFFINE4)
    for scales, biases in ((mx.float32, mx.float16), (mx.bfloat16, mx.float32), (mx.float16, mx.bfloat16)):
        arrays = matrix.w, matrix.scales.astype(scales), matrix.biases.astype(biases)
        assert_same_bits(product(x, *arrays), product(x, *in_float32(arrays)))
    result = product(x.astype(mx.bfloat16), *matrix.arrays)  # promoted
    assert_same_bits(result, product(x.astype(mx.bfloat16).astype(mx.float32), *matrix.arrays))


@halves
def test_simulated_kernels_get_one_dtype(half, rng):
    matrix, x = draw(AFFINE4, (40, 256), rng, half), normal((3, 256))
    with mlx_anvil.simulate():
        result = product_of(AFFINE4)(x, *matrix.arrays)
        assert conversions(product_of(AFFINE4), x, matrix.arrays) == 2
        np.testing.assert_allclose(to_numpy(result), exact_product(x, matrix), rtol=1e-4, atol=1e-4)
