"""Tests of quantized_swiglu beyond the contract: formats, row counts and dtypes against NumPy in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import gated as gate_of
from quantized_numpy import FLOAT_FORMATS, FORMATS, Format, Matrix, assert_rounded, draw, normal
from support import GRADIENT_FACTOR, assert_same_bits, max_error, poison_memory, to_numpy

quantized_swiglu = mlx_anvil.quantized_swiglu

some_formats = pytest.mark.parametrize(
    "format", [Format("affine", 64, 4), Format("affine", 32, 6), *FLOAT_FORMATS], ids=str
)


def gated(x: mx.array, gate: Matrix, up: Matrix, **options: Any) -> mx.array:
    return quantized_swiglu(x, gate.arrays, up.arrays, **gate.format.options, **options)


def exact_gated(x: mx.array, gate: Matrix, up: Matrix) -> np.ndarray:
    g, u = (to_numpy(x) @ m.weights.swapaxes(-1, -2) for m in (gate, up))
    return g / (1 + np.exp(-g)) * u


def exact_gradient(x: mx.array, gate: Matrix, up: Matrix, dy: np.ndarray) -> np.ndarray:
    g, u = (to_numpy(x) @ m.weights.T for m in (gate, up))
    sigmoid = 1 / (1 + np.exp(-g))
    d_g = dy * u * sigmoid * (1 + g * (1 - sigmoid))
    return d_g @ gate.weights + (dy * g * sigmoid) @ up.weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_forward(format, dtype, rng):
    for rows, outputs, groups in ((1, 37, 3), (3, 1, 1), (8, 64, 5)):
        gate, up = (draw(format, (outputs, groups * format.group_size), rng, dtype) for _ in range(2))
        x = (normal((rows, groups * format.group_size)) * 0.1).astype(dtype)
        poison_memory(2 * rows * outputs)
        with mlx_anvil.trace() as trace, mlx_anvil.strict():
            result = gated(x, gate, up)
            mx.eval(result)
        assert len(trace.kernels) == 1
        # A sum is about s = 0.1 sqrt(columns), silu of one times another about s^2 / 2: three results may all be less.
        typical = 0.01 * groups * format.group_size / 2
        assert_rounded(result, exact_gated(x, gate, up), dtype, terms=typical**2)


@some_formats
def test_more_rows(format, rng):
    gate, up = (draw(format, (21, 2 * format.group_size), rng) for _ in range(2))
    for shape in ((9,), (3, 11), (0,), (2, 4), ()):
        x = normal((*shape, 2 * format.group_size)) * 0.1
        assert_rounded(gated(x, gate, up), exact_gated(x, gate, up), mx.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@some_formats
def test_rows_do_not_depend_on_their_number(format, dtype, rng):
    """On Apple's GPUs, 3 to 8 rows have other bits than 1 or 2."""
    gate, up = (draw(format, (37, 7 * format.group_size), rng, dtype) for _ in range(2))
    x = (normal((8, 7 * format.group_size)) * 0.1).astype(dtype)
    single = mx.concatenate([gated(x[i : i + 1], gate, up) for i in range(8)])
    most = 2 if support.backend in ("simulator", "metal") else 8
    several = single if most == 8 else gated(x, gate, up)
    for count in range(2, 9):
        for first in {0, 8 - count}:
            of_some = (single if count <= most else several)[first : first + count]
            assert_same_bits(gated(x[first : first + count], gate, up), of_some)


@some_formats
def test_gradient_in_x(format, rng):
    gate, up = (draw(format, (21, 2 * format.group_size), rng) for _ in range(2))
    for rows in (2, 12):
        x, dy = normal((rows, 2 * format.group_size)) * 0.1, normal((rows, 21))
        (gradient,) = mx.vjp(lambda x: gated(x, gate, up), [x], [dy])[1]
        assert_rounded(gradient, exact_gradient(x, gate, up, to_numpy(dy)), mx.float32, factor=GRADIENT_FACTOR)


def test_gradients_in_scales_and_biases(rng):
    """Compares with the SwiGLU in steps, whose gradients have their own tests."""
    format = Format("affine", 64, 4)
    gate, up = (draw(format, (9, 128), rng) for _ in range(2))
    x, dy = normal((3, 128)) * 0.1, normal((3, 9))

    def fused(x, *params):
        return quantized_swiglu(x, (gate.w, *params[:2]), (up.w, *params[2:]))

    def in_steps(x, *params):
        g = mlx_anvil.quantized_matmul(x, gate.w, *params[:2])
        return mlx_anvil.silu_gate(g, mlx_anvil.quantized_matmul(x, up.w, *params[2:]))

    primals = [x, *gate.arrays[1:], *up.arrays[1:]]
    tangents = [normal(p.shape) for p in primals]
    for ours, expected in zip(mx.vjp(fused, primals, [dy])[1], mx.vjp(in_steps, primals, [dy])[1], strict=True):
        assert max_error(ours, expected) <= 1e-5
    assert max_error(mx.jvp(fused, primals, tangents)[1][0], mx.jvp(in_steps, primals, tangents)[1][0]) <= 1e-5


def test_finite_gates_never_give_nan(rng):
    """Products far outside the range of exp."""
    format = Format("affine", 64, 4)
    gate, up = (draw(format, (33, 64), rng) for _ in range(2))
    for rows in (1, 8, 20):
        result = gated(normal((rows, 64)) * 1e4, gate, up)
        assert np.isfinite(to_numpy(result)).all()


def test_vmap(rng):
    format = Format("affine", 64, 4)
    gate, up = (draw(format, (9, 128), rng) for _ in range(2))
    x = normal((3, 2, 128)) * 0.1
    mapped = mx.vmap(lambda x: gated(x, gate, up))(x)
    assert max_error(mapped, mx.stack([gated(x[i], gate, up) for i in range(3)])) <= 1e-6


# ---- activations and limits ------------------------------------------------------------------------------------------

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
AFFINE = Format("affine", 64, 4)


def exact_activation(g: np.ndarray, u: np.ndarray, activation: str, limit: float | None) -> np.ndarray:
    """``gated`` in float64."""
    with mx.stream(mx.cpu):
        return np.array(gate_of(*(mx.array(a, mx.float64) for a in (g, u)), activation=activation, limit=limit))


@each_activation
@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@some_formats
def test_activations(activation, limit, format, dtype, rng):
    columns = 3 * format.group_size
    gate, up = (draw(format, (37, columns), rng, dtype) for _ in range(2))
    for rows in (1, 5, 8):
        x = (normal((rows, columns)) * 0.1).astype(dtype)
        g, u = (to_numpy(x) @ m.weights.T for m in (gate, up))
        assert limit is None or rows == 1 or ((g > limit).any() and (abs(u) > limit).any())
        with mlx_anvil.trace() as trace, mlx_anvil.strict():
            result = gated(x, gate, up, activation=activation, limit=limit)
            mx.eval(result)
        assert len(trace.kernels) == 1
        on_tiles = support.backend in ("simulator", "metal") and rows > 2
        assert ("quantized_tiles_gated" if on_tiles else "quantized_swiglu") in trace.kernels[0]
        assert_rounded(result, exact_activation(g, u, activation, limit), dtype, terms=(0.01 * columns / 2) ** 2)


@each_activation
@pytest.mark.parametrize("limit", [None, 0.3])
def test_activations_in_steps(activation, limit, rng):
    """For more rows, and for gradients, the results are those of two products and ``gated``."""
    gate, up = (draw(AFFINE, (21, 128), rng) for _ in range(2))

    def fused(x, *params):
        matrices = (gate.w, *params[:2]), (up.w, *params[2:])
        return quantized_swiglu(x, *matrices, activation=activation, limit=limit)

    def in_steps(x, *params):
        g = mlx_anvil.quantized_matmul(x, gate.w, *params[:2])
        u = mlx_anvil.quantized_matmul(x, up.w, *params[2:])
        return mlx_anvil.gated(g, u, activation=activation, limit=limit)

    params = [*gate.arrays[1:], *up.arrays[1:]]
    for rows in (2, 12):
        x, dy = normal((rows, 128)) * 0.1, normal((rows, 21))
        assert max_error(fused(x, *params), in_steps(x, *params)) <= 1e-5
        primals, tangents = [x, *params], [normal(p.shape) for p in (x, *params)]
        for ours, expected in zip(mx.vjp(fused, primals, [dy])[1], mx.vjp(in_steps, primals, [dy])[1], strict=True):
            assert max_error(ours, expected) <= 1e-5
        assert max_error(mx.jvp(fused, primals, tangents)[1][0], mx.jvp(in_steps, primals, tangents)[1][0]) <= 1e-5
        mapped = mx.vmap(fused, in_axes=(0, *[None] * len(params)))(x[:, None], *params)
        assert max_error(mapped[:, 0], fused(x, *params)) <= 1e-5
        assert max_error(mx.compile(fused)(x, *params), fused(x, *params)) <= 1e-6


def test_equal_calls_with_other_gates_stay_apart(rng):
    """``mx.compile`` merges equal nodes, but not nodes with different activations or limits."""
    gate, up = (draw(AFFINE, (9, 128), rng) for _ in range(2))
    x = normal((2, 128)) * 0.1
    options = [{"activation": name} for name in ACTIVATIONS] + [{"limit": limit} for limit in (0.1, 0.2)]
    results = mx.compile(lambda x: [gated(x, gate, up, **option) for option in options])(x)
    for result, option in zip(results, options, strict=True):
        assert max_error(result, gated(x, gate, up, **option)) <= 1e-6
    assert len({to_numpy(result).tobytes() for result in results}) == len(options)


def test_silu_without_a_limit_has_the_bits_of_the_default(rng):
    gate, up = (draw(AFFINE, (37, 128), rng) for _ in range(2))
    for rows in (1, 8):
        x = normal((rows, 128))
        assert_same_bits(gated(x, gate, up, activation="silu", limit=None), gated(x, gate, up))


@each_activation
@pytest.mark.parametrize("limit", [None, 2.0])
def test_gates_of_nan(activation, limit, rng):
    gate, up = (draw(AFFINE, (9, 64), rng) for _ in range(2))
    x = mx.concatenate([mx.full((1, 64), float("nan")), mx.zeros((1, 64))])
    result = to_numpy(gated(x, gate, up, activation=activation, limit=limit))
    assert np.isnan(result[0]).all()
    assert np.isfinite(result[1]).all()
