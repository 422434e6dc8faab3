"""Products by MLX's own kernel, on Apple's GPUs with neural accelerators. The simulator presents itself as such a GPU;
MLX's CPU ops stand in for its Metal kernels."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from quantized_numpy import AFFINE_FORMATS, FLOAT_FORMATS, Format, Matrix, draw
from support import assert_same_bits, to_numpy

pytestmark = pytest.mark.cpu_only

MLX = "mx.quantized_matmul"
FOUR_BITS = Format("affine", 64, 4)
HALVES = (mx.float16, mx.bfloat16)


def draw_x(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def on_chip(call, *args, chip: str = "M5", **options) -> tuple[mx.array, list[str]]:
    """The result on a chip, where nothing falls back, and the kernels that ran."""
    with mlx_anvil.simulate(chip=chip), mlx_anvil.strict(), mlx_anvil.trace() as trace:
        result = call(*args, **options)
        mx.eval(result)
    return result, trace.kernels


def assert_product(result: mx.array, x: mx.array, matrix: Matrix, transpose: bool = True) -> None:
    """MLX's CPU kernels add in 16 bits, so the limit is that of their sums."""
    weights = matrix.weights.swapaxes(-1, -2) if transpose else matrix.weights
    exact, terms = to_numpy(x) @ weights, np.abs(to_numpy(x)) @ np.abs(weights)
    unit = 2.0**-11 if x.dtype == mx.float16 else 2.0**-8
    assert (np.abs(to_numpy(result) - exact) <= 8 * unit * terms + 1e-6 * terms.max()).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", [*AFFINE_FORMATS, *FLOAT_FORMATS], ids=str)
def test_every_format(format, dtype, rng):
    matrix, x = draw(format, (37, 128), rng, dtype), draw_x(rng, (9, 128), dtype)
    result, kernels = on_chip(mlx_anvil.quantized_matmul, x, *matrix.arrays, **format.options)
    assert kernels == [MLX]
    assert_same_bits(result, mx.quantized_matmul(x, *matrix.arrays, **format.options, stream=mx.cpu))
    assert_product(result, x, matrix)


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "dtype", "transpose", "by_mlx"),
    [
        (9, 40, 128, mx.float16, True, True),
        (8, 40, 128, mx.float16, True, False),
        (9, 40, 128, mx.float32, True, False),  # TF32 there
        (9, 64, 128, mx.float16, False, True),
        (9, 40, 128, mx.float16, False, False),  # sums over no whole tile
        (9, 40, 96, mx.float16, True, False),
    ],
)
def test_which_products(rows, outputs, columns, dtype, transpose, by_mlx, rng):
    format = Format("affine", 32, 4)
    matrix = draw(format, (outputs, columns), rng, dtype)
    x = draw_x(rng, (rows, columns if transpose else outputs), dtype)
    result, kernels = on_chip(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=transpose, **format.options)
    assert (kernels == [MLX]) == by_mlx
    assert_product(result, x.astype(mx.float16), matrix, transpose)


def test_formats_without_a_plain_kernel(rng):
    format = FLOAT_FORMATS[0]
    matrix, x = draw(format, (64, 64), rng, mx.float16), draw_x(rng, (9, 64), mx.float16)
    result, kernels = on_chip(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=False, **format.options)
    assert MLX not in kernels
    assert_product(result, x, matrix, transpose=False)


@pytest.mark.parametrize("chip", ["M1", "M2 Ultra", "M3 Pro", "M4 Max"])
def test_older_chips(chip, rng):
    matrix, x = draw(FOUR_BITS, (40, 128), rng, mx.float16), draw_x(rng, (9, 128), mx.float16)
    result, kernels = on_chip(mlx_anvil.quantized_matmul, x, *matrix.arrays, chip=chip)
    assert kernels
    assert MLX not in kernels
    assert_product(result, x, matrix)


def test_a_batch_of_matrices(rng):
    matrix, x = draw(FOUR_BITS, (3, 40, 128), rng, mx.bfloat16), draw_x(rng, (3, 12, 128), mx.bfloat16)
    result, kernels = on_chip(mlx_anvil.quantized_matmul, x, *matrix.arrays)
    assert kernels == [MLX]
    assert_product(result, x, matrix)


def test_trace_says_why(rng):
    matrix, x = draw(FOUR_BITS, (40, 128), rng, mx.float16), draw_x(rng, (2, 5, 128), mx.float16)
    with mlx_anvil.simulate(chip="M5"), mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.quantized_matmul(x, *matrix.arrays))
    (event,) = trace.events
    assert (event.op, event.kernel, event.device) == ("quantized_matmul", MLX, "simulator")
    assert event.reason == "MLX's kernel uses the GPU's neural accelerators"


def test_transformations(rng):
    """Gradients in x, vmap, compile and shapeless compile take the same route, by the shapes of the call."""
    matrix = draw(FOUR_BITS, (64, 128), rng, mx.float16)
    x, y = draw_x(rng, (12, 128), mx.float16), draw_x(rng, (12, 64), mx.float16)

    def product(x: mx.array) -> mx.array:
        return mlx_anvil.quantized_matmul(x, *matrix.arrays)

    result, _ = on_chip(product, x)
    gradient, kernels = on_chip(lambda: mx.vjp(product, [x], [y])[1][0])
    assert kernels
    assert set(kernels) == {MLX}
    assert_product(gradient, y, matrix, transpose=False)
    for call in (mx.compile(product), mx.compile(product, shapeless=True), mx.vmap(product)):
        other, kernels = on_chip(call, x)
        assert kernels == [MLX]
        assert_same_bits(other, result)
    shapeless = mx.compile(product, shapeless=True)
    for rows, by_mlx in ((12, True), (6, False), (30, True)):
        other, kernels = on_chip(shapeless, draw_x(rng, (rows, 128), mx.float16))
        assert (kernels == [MLX]) == by_mlx


FEW = "MLX's kernel for few rows is faster, by estimate or the tuning file"


@pytest.mark.parametrize("chip", ["M3", "M4 Max", "M5"])
def test_few_rows(chip, rng):
    """From the M3 on, 2 to 4 rows with 4-bit and 2-bit codes are left to MLX."""
    for rows, format, dtype, by_mlx in (
        (1, FOUR_BITS, mx.float16, False),
        (2, FOUR_BITS, mx.float16, True),
        (4, FOUR_BITS, mx.bfloat16, True),
        (5, FOUR_BITS, mx.float16, False),
        (3, Format("affine", 32, 2), mx.float16, True),
        (2, Format("affine", 64, 8), mx.float16, False),
        (2, Format("mxfp4", 32, 4), mx.float16, False),
        (2, FOUR_BITS, mx.float32, False),
    ):
        matrix, x = draw(format, (40, 128), rng, dtype), draw_x(rng, (rows, 128), dtype)
        result, kernels = on_chip(mlx_anvil.quantized_matmul, x, *matrix.arrays, chip=chip, **format.options)
        assert (kernels == [MLX]) == by_mlx
        assert_product(result, x if dtype != mx.float32 else x.astype(mx.float16), matrix)
        _, kernels = on_chip(mlx_anvil.quantized_gemv, x, *matrix.arrays, chip=chip, **format.options)
        assert MLX not in kernels
    x, y = draw_x(rng, (3, 128), mx.float16), draw_x(rng, (3, 40), mx.float16)
    matrix = draw(FOUR_BITS, (40, 128), rng, mx.float16)
    _, kernels = on_chip(mlx_anvil.quantized_matmul, y, *matrix.arrays, transpose=False, chip=chip)
    assert MLX not in kernels
    with mlx_anvil.simulate(chip=chip), mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.quantized_matmul(x, *matrix.arrays))
    assert [(event.kernel, event.reason) for event in trace.events] == [(MLX, FEW)]


@pytest.mark.parametrize("chip", ["M2 Max", "M3", "M4 Pro"])
def test_gated_products_of_few_rows(chip, rng):
    """Fused, 4 rows are at least as fast as MLX's products."""
    gate, up = (draw(FOUR_BITS, (40, 128), rng, mx.float16) for _ in range(2))
    for rows in (1, 2, 3, 4):
        x = draw_x(rng, (rows, 128), mx.float16)
        result, kernels = on_chip(mlx_anvil.quantized_swiglu, x, gate.arrays, up.arrays, chip=chip)
        assert kernels.count(MLX) == (2 if rows in (2, 3) and chip[1] > "2" else 0)
        g, u = (to_numpy(x).astype(np.float64) @ matrix.weights.T for matrix in (gate, up))
        exact = g / (1 + np.exp(-g)) * u
        assert np.abs(to_numpy(result) - exact).max() <= 0.02 * np.abs(exact).max()


def test_gated_products_of_many_rows(rng):
    gate, up = (draw(FOUR_BITS, (40, 128), rng, mx.float16) for _ in range(2))
    x = draw_x(rng, (9, 128), mx.float16)
    _, kernels = on_chip(mlx_anvil.quantized_swiglu, x, gate.arrays, up.arrays)
    assert kernels.count(MLX) == 2
