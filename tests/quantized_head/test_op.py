"""Tests of quantized_argmax and quantized_topk beyond the contract: the logits have the bits of quantized_matmul in
every format, with ties and NaN, for any number of rows, threads and candidates; memory, derivatives, errors."""

import os
import subprocess
import sys
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES
from quantized_numpy import FORMATS, Format, Matrix, draw
from support import assert_same_bits, kernel_names, max_error, to_numpy

quantized_argmax, quantized_topk = mlx_anvil.quantized_argmax, mlx_anvil.quantized_topk

FOUR_BITS = Format("affine", 64, 4)


def draw_x(rows: int, columns: int, rng: np.random.Generator, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal((rows, columns)).astype(np.float32)).astype(dtype)


def logits_of(x: mx.array, matrix: Matrix) -> np.ndarray:
    """The logits of quantized_gemv, whose bits do not depend on the number of rows. On Apple's GPUs more than 2 rows
    have those of quantized_matmul, here for 8 rows, which MLX's kernel never takes."""
    count = x.shape[0]
    if support.backend in ("simulator", "metal") and count > 2:
        padded = mx.pad(x, [(0, -count % 8), (0, 0)])
        eight = [padded[i : i + 8] for i in range(0, count, 8)]
        products = [mlx_anvil.quantized_matmul(rows, *matrix.arrays, **matrix.format.options) for rows in eight]
        return np.concatenate([to_numpy(product) for product in products])[:count]
    rows = [mlx_anvil.quantized_gemv(x[i : i + 1], *matrix.arrays, **matrix.format.options) for i in range(x.shape[0])]
    return np.concatenate([to_numpy(row) for row in rows])


def best_of(logits: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest logits: NaN first, then by value, then by index."""
    nan = np.isnan(logits)
    return np.lexsort((np.where(nan, 0, -logits), ~nan), axis=-1)[..., :k]


def assert_best(x: mx.array, matrix: Matrix, k: int) -> None:
    logits = logits_of(x, matrix)
    indices, values = quantized_topk(x, *matrix.arrays, k=k, **matrix.format.options)
    assert indices.dtype == mx.uint32
    assert values.dtype == x.dtype
    expected = best_of(logits, k)
    np.testing.assert_array_equal(np.array(indices), expected)
    np.testing.assert_array_equal(to_numpy(values), np.take_along_axis(logits, expected, axis=-1))
    index, value = quantized_argmax(x, *matrix.arrays, return_values=True, **matrix.format.options)
    np.testing.assert_array_equal(np.array(index), expected[:, 0])
    assert_same_bits(value, values[:, 0])
    assert mx.array_equal(quantized_argmax(x, *matrix.arrays, **matrix.format.options), index)


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_matrix_units_store_logits(dtype, rng):
    """One block of logits, several blocks with ties and NaN, and more rows of x than logits are stored for."""
    for rows, outputs, k in ((1, 301, 3), (3, 4100, 1), (2, 4100, 40)):
        matrix, x = draw(FOUR_BITS, (outputs, 256), rng, dtype), draw_x(rows, 256, rng, dtype)
        x[-1, 3:4] = np.nan if rows == 3 else 0
        matrix = Matrix(FOUR_BITS, mx.concatenate([matrix.w, matrix.w[:1]]), *(
            mx.concatenate([part, part[:1]]) for part in matrix.arrays[1:]
        ))  # fmt: skip
        with mlx_anvil.trace() as trace:
            assert_best(x, matrix, k)
        assert any(name.startswith("quantized_head_logits_") for name in trace.kernels)
    with mlx_anvil.trace() as trace:
        mx.eval(quantized_argmax(draw_x(9, 256, rng, dtype), *matrix.arrays, **FOUR_BITS.options))
    assert not any(name.startswith("quantized_head_logits_") for name in trace.kernels)


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_store_logits(dtype, rng):
    """On Apple's GPUs, more than 2 rows go through the tiles of quantized_matmul: with a tie, a NaN, and more than one
    block. More than 128 rows would store too many logits."""

    def kernels(rows: int, outputs: int) -> list[str]:
        matrix, x = draw(FOUR_BITS, (outputs, 192), rng, dtype), draw_x(rows, 192, rng, dtype)
        x[-1, 3:4] = np.nan
        arrays = [mx.concatenate([part, part[:1]]) for part in matrix.arrays]
        with mlx_anvil.simulate(checked=True), mlx_anvil.trace() as trace:
            indices, values = quantized_topk(x, *arrays, k=5, **FOUR_BITS.options)
            mx.eval(indices, values)
        logits = to_numpy(x)[:-1].astype(np.float64) @ np.concatenate([matrix.weights, matrix.weights[:1]]).T
        assert indices[-1].tolist() == [0, 1, 2, 3, 4]
        expected = -np.sort(-logits)[:, :5]
        tolerance = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype] * np.abs(expected).max()
        np.testing.assert_allclose(to_numpy(values)[:-1], expected, rtol=0, atol=tolerance)
        return trace.kernels

    for rows, outputs in ((3, 77), (8, 4100), (35, 40)):
        names = kernels(rows, outputs)
        assert names[0].startswith(f"quantized_tiles_{'transposed' if rows > 32 else 'few'}_")
        assert names[1].startswith("quantized_head_logits_")
    for rows in (2, 129):
        assert kernels(rows, 40)[0].startswith("quantized_head_")


# ---- values ----------------------------------------------------------------------------------------------------------


def formats_and_dtypes() -> Iterator[object]:
    """All combinations on the CPU. Elsewhere, each format in one dtype and each dtype in several formats."""
    for i, format in enumerate(FORMATS):
        for j, dtype in enumerate(DTYPES):
            marks = () if i % len(DTYPES) == j else pytest.mark.cpu_only
            yield pytest.param(format, dtype, marks=marks, id=f"{format}-{dtype}")


@pytest.mark.parametrize(("format", "dtype"), list(formats_and_dtypes()))
def test_every_format(format, dtype, rng):
    assert_best(draw_x(3, 128, rng, dtype), draw(format, (77, 128), rng, dtype), k=5)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 21])
def test_any_number_of_rows(rows, rng):
    assert_best(draw_x(rows, 192, rng), draw(FOUR_BITS, (301, 192), rng), k=7)


@pytest.mark.parametrize("k", [1, 2, 3, 31, 64, 65, 100, 128, 200, 256])
@pytest.mark.parametrize("rows", [1, 8])
def test_any_k(k, rows, rng):
    """k equal to the number of rows of w, and k over several blocks."""
    for outputs in (k, 1100):
        assert_best(draw_x(rows, 64, rng, mx.float16), draw(FOUR_BITS, (outputs, 64), rng, mx.float16), k)


def test_several_passes(rng):
    """More candidates than one threadgroup merges, and SIMD groups that do not share columns."""
    assert_best(draw_x(2, 64, rng), draw(FOUR_BITS, (8200, 64), rng), k=200)


@pytest.mark.parametrize("outputs", [1, 2, 63, 64, 65, 255, 256, 257])
def test_edges_of_blocks(outputs, rng):
    for rows in (1, 4):
        assert_best(draw_x(rows, 64, rng), draw(FOUR_BITS, (outputs, 64), rng), k=min(outputs, 3))


def test_x_of_any_shape(rng):
    matrix = draw(FOUR_BITS, (40, 64), rng)
    x = draw_x(12, 64, rng)
    indices, values = quantized_topk(x, *matrix.arrays, k=3)
    for shape in ((2, 6), (2, 1, 3, 2)):
        shaped = quantized_topk(x.reshape(*shape, 64), *matrix.arrays, k=3)
        assert mx.array_equal(shaped[0], indices.reshape(*shape, 3))
        assert_same_bits(shaped[1], values.reshape(*shape, 3))
    index, value = quantized_argmax(x[4], *matrix.arrays, return_values=True)
    assert index.shape == value.shape == ()
    assert index == indices[4, 0]
    assert quantized_topk(x[4], *matrix.arrays, k=3)[0].tolist() == indices[4].tolist()
    assert quantized_argmax(x[:0], *matrix.arrays).shape == (0,)


def test_dtypes_promote(rng):
    matrix = draw(FOUR_BITS, (40, 64), rng, mx.float16)
    x = draw_x(2, 64, rng, mx.bfloat16)
    ours = quantized_topk(x, *matrix.arrays, k=2)[1]
    assert ours.dtype == mlx_anvil.quantized_gemv(x, *matrix.arrays).dtype == mx.float32


# ---- ties, NaN, infinities -------------------------------------------------------------------------------------------


def with_logits(rows_of_w: np.ndarray) -> tuple[mx.array, Matrix]:
    """x of ones, and a matrix with one number per row, so that the logits are 64 times these numbers."""
    outputs = len(rows_of_w)
    matrix = Matrix.of_codes(FOUR_BITS, np.ones((outputs, 64), int))
    matrix.scales, matrix.biases = mx.array(rows_of_w[:, None].astype(np.float32)), mx.zeros((outputs, 1))
    return mx.ones((1, 64)), matrix


@pytest.mark.parametrize("outputs", [5, 300, 5000])
def test_equal_logits(outputs, rng):
    """The first of equal logits wins, whether the others are adjacent, in other blocks, or computed by other
    threads."""
    for levels in (1, 2, 40):
        x, matrix = with_logits(rng.integers(0, levels, outputs).astype(float))
        assert_best(x, matrix, k=min(outputs, 60))


def test_zeros_of_both_signs():
    numbers = np.where(np.arange(300) % 2, 0.0, -0.0)
    x, matrix = with_logits(numbers)
    assert quantized_topk(x, *matrix.arrays, k=20)[0].tolist() == [list(range(20))]


def test_equal_after_rounding(rng):
    """Logits that differ in float32 but not in x's dtype count as equal, as if they had been stored."""
    for dtype in (mx.float16, mx.bfloat16):
        x, matrix = draw_x(4, 64, rng, dtype), draw(FOUR_BITS, (2000, 64), rng, dtype)
        logits = logits_of(x, matrix)
        assert len(np.unique(logits[0])) < logits.shape[1]
        assert_best(x, matrix, k=256)


def test_nan_is_above_all(rng):
    """As in mx.argmax, the first NaN wins. Infinities are compared as numbers."""
    for count in (1, 3, 30):
        numbers = rng.standard_normal(700)
        numbers[rng.integers(0, 700, 4)] = np.inf
        numbers[rng.integers(0, 700, 4)] = -np.inf
        numbers[rng.integers(0, 700, count)] = np.nan
        x, matrix = with_logits(numbers)
        assert_best(x, matrix, k=20)
        # Under its name until it was read: MLX's build for CUDA reads it when the graph is evaluated.
        logits = logits_of(x, matrix).astype(np.float32)
        with mx.stream(mx.cpu):
            theirs = mx.argmax(mx.array(logits), axis=-1)
        assert mx.array_equal(quantized_argmax(x, *matrix.arrays), theirs)


def test_nothing_but_nan_or_minus_infinity():
    for number in (np.nan, -np.inf, np.inf):
        x, matrix = with_logits(np.full(300, number))
        assert_best(x, matrix, k=9)


def test_row_of_x_that_is_not_finite(rng):
    """A row of x that is not finite does not affect other rows."""
    x, matrix = draw_x(3, 64, rng), draw(FOUR_BITS, (90, 64), rng)
    alone = quantized_topk(x, *matrix.arrays, k=4)
    spoilt = mx.where(mx.arange(3)[:, None] == 1, mx.nan, x)
    indices, values = quantized_topk(spoilt, *matrix.arrays, k=4)
    assert indices[1].tolist() == [0, 1, 2, 3]
    assert mx.isnan(values[1]).all()
    for row in (0, 2):
        assert_same_bits(values[row], alone[1][row])
        assert indices[row].tolist() == alone[0][row].tolist()


@pytest.mark.cpu_only
def test_same_for_any_number_of_threads():
    program = """
import mlx.core as mx, mlx_anvil
mx.random.seed(7)
w, scales, biases = mx.quantize(mx.random.normal((3000, 128)).astype(mx.bfloat16))
indices, values = mlx_anvil.quantized_topk(mx.random.normal((11, 128)).astype(mx.bfloat16), w, scales, biases, k=50)
print(indices.tolist(), values.tolist())
"""
    results = set()
    for threads in "1", "2", "5":
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        results.add(run.stdout)
    assert len(results) == 1


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_logits_are_not_stored(rng):
    """Of two rows: tiles store those of more on Apple's GPUs."""
    matrix, x = draw(FOUR_BITS, (20000, 64), rng), draw_x(2, 64, rng)
    mx.eval(x, *matrix.arrays)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(quantized_argmax(x, *matrix.arrays))
    assert mx.get_peak_memory() - before <= 2 * 20000 * 4 / 4
    names = ["quantized_head_float32_affine4_g64"]
    if support.backend != "cpu":
        names = ["quantized_head_float32_affine4_r2", "quantized_head_merge_float32"]
    assert kernel_names(trace) == names


# ---- transformations -------------------------------------------------------------------------------------------------


def test_gradient_of_indices_is_zero(rng):
    """As with mx.argmax. Derivatives in arguments that have none raise an error."""
    x, matrix = draw_x(3, 64, rng), draw(FOUR_BITS, (20, 64), rng)
    gradient = mx.grad(lambda x: quantized_argmax(x, *matrix.arrays).astype(mx.float32).sum())(x)
    assert mx.array_equal(gradient, mx.zeros_like(x))
    derivative = mx.jvp(lambda x: quantized_topk(x, *matrix.arrays, k=2)[0], [x], [x])[1][0]
    assert not np.array(derivative).any()
    with pytest.raises(ValueError, match=r"^\[quantized_argmax\] no gradient in w, which holds integer codes"):
        mx.vjp(
            lambda w: quantized_argmax(x, w, *matrix.arrays[1:], return_values=True)[1], [matrix.w], [mx.zeros((3,))]
        )


@pytest.mark.parametrize("format", [FOUR_BITS, Format("mxfp4", 32, 4), Format("nvfp4", 16, 4)], ids=str)
def test_gradient_in_x(format, rng):
    """The gradient is a sum of the selected rows of W."""
    x, matrix = draw_x(3, 128, rng), draw(format, (50, 128), rng)
    dy = draw_x(3, 4, rng)
    indices = np.array(quantized_topk(x, *matrix.arrays, k=4, **format.options)[0])

    def values(x: mx.array) -> mx.array:
        return quantized_topk(x, *matrix.arrays, k=4, **format.options)[1]

    exact = np.einsum("mk,mkc->mc", to_numpy(dy), matrix.weights[indices])
    assert max_error(mx.vjp(values, [x], [dy])[1][0], mx.array(exact.astype(np.float32))) <= 1e-5
    tangent = np.einsum("mc,mkc->mk", to_numpy(x), matrix.weights[indices])
    assert max_error(mx.jvp(values, [x], [x])[1][0], mx.array(tangent.astype(np.float32))) <= 1e-5


def test_vmap_gives_indices_too(rng):
    matrix = draw(FOUR_BITS, (50, 64), rng)
    x = draw_x(6, 64, rng).reshape(2, 3, 64)
    expected = quantized_topk(x, *matrix.arrays, k=3)
    for axis in (0, 1):
        mapped = mx.vmap(lambda x: quantized_topk(x, *matrix.arrays, k=3), in_axes=axis, out_axes=axis)(x)
        assert mx.array_equal(mapped[0], expected[0])
        assert_same_bits(mapped[1], expected[1])
    several = [draw(FOUR_BITS, (50, 64), rng) for _ in range(2)]
    stacked = [mx.stack(arrays) for arrays in zip(*(m.arrays for m in several), strict=True)]
    mapped = mx.vmap(lambda *arrays: quantized_topk(x[0], *arrays, k=3)[0])(*stacked)
    for own, matrix in zip(mapped, several, strict=True):
        assert mx.array_equal(own, quantized_topk(x[0], *matrix.arrays, k=3)[0])


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_vmap_over_matrices_without_rows_of_x(rng):
    matrices = [draw(FOUR_BITS, (9, 64), rng) for _ in range(2)]
    stacked = [mx.stack(parts) for parts in zip(*(m.arrays for m in matrices), strict=True)]
    indices, values = mx.vmap(lambda x, *arrays: quantized_topk(x, *arrays, k=3))(mx.zeros((2, 0, 64)), *stacked)
    assert indices.shape == values.shape == (2, 0, 3)


def test_bad_arguments(rng):
    x, matrix = draw_x(2, 64, rng), draw(FOUR_BITS, (9, 64), rng)
    topk, argmax = r"^\[quantized_topk\] ", r"^\[quantized_argmax\] "
    for k in (0, -1, 10, 2**40):
        with pytest.raises(ValueError, match=topk + rf"k is {k} and w has shape \(9, 8\); allowed: 1 to 9\."):
            quantized_topk(x, *matrix.arrays, k=k)
    large = draw(FOUR_BITS, (300, 64), rng)
    with pytest.raises(ValueError, match=topk + r"k is 257 and w has shape \(300, 8\); allowed: 1 to 256\."):
        quantized_topk(x, *large.arrays, k=257)
    for bad in (None, 1.5, "2", True):
        with pytest.raises(TypeError, match=topk + r"k is a.*; allowed: an int\."):
            quantized_topk(x, *matrix.arrays, k=bad)
    with pytest.raises(TypeError, match=argmax + r"return_values is an? int; allowed: a bool\."):
        quantized_argmax(x, *matrix.arrays, return_values=1)
    with pytest.raises(ValueError, match=argmax + r"w has shape \(1, 9, 8\); allowed: rank 2, \[N, packed K\], with"):
        quantized_argmax(x, *(a[None] for a in matrix.arrays))
    with pytest.raises(ValueError, match=argmax + r"w has shape \(0, 8\); allowed: rank 2, .* at least one row"):
        quantized_argmax(x, *(a[:0] for a in matrix.arrays))
    with pytest.raises(ValueError, match=argmax + r"x has shape \(2, 32\) and w has .*; allowed: x \[\.\.\., 64\]\."):
        quantized_argmax(x[:, :32], *matrix.arrays)
    with pytest.raises(ValueError, match=argmax + r"bits is 7; allowed in mode 'affine': 2, 3, 4, 5, 6, 8\."):
        quantized_argmax(x, *matrix.arrays, bits=7)
    with pytest.raises(ValueError, match=argmax + r"biases is None; mode 'affine' needs an array\."):
        quantized_argmax(x, matrix.w, matrix.scales)
