"""Tests of sigmoid_gate beyond the contract: broadcasting, small values, extremes, layouts, fusion."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import sigmoid_gate as reference
from support import (
    GRADIENT_FACTOR,
    assert_accurate,
    kernel_names,
    max_error,
    normal,
    vjp_of,
    without_copies,
)

sigmoid_gate = mlx_anvil.sigmoid_gate
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.cpu_only
def test_as_models_write_it():
    """The output gate of attention in Qwen3-Next."""
    x, gate = normal(2, 7, 100), normal(2, 7, 100, scale=6)
    with mx.stream(mx.cpu):
        assert max_error(sigmoid_gate(x, gate, stream=mx.cpu), x * mx.sigmoid(gate)) <= 1e-6


@pytest.mark.parametrize(("x_shape", "gate_shape"), [((4, 6), (4, 1)), ((3, 4), ()), ((), (3, 4)), ((5, 1), (4, 1, 6))])
@each_dtype
def test_broadcast(x_shape, gate_shape, dtype):
    """A gate per head or per row is a broadcast one."""
    x, gate = normal(*x_shape, dtype=dtype), normal(*gate_shape, dtype=dtype)
    assert_accurate(sigmoid_gate, reference, [x, gate])
    dy = normal(*sigmoid_gate(x, gate).shape, dtype=dtype)
    assert [g.shape for g in vjp_of(sigmoid_gate, 2)(x, gate, dy)] == [x_shape, gate_shape]
    if dtype == mx.float32:  # MLX sums a broadcast gradient in the dtype
        assert_accurate(vjp_of(sigmoid_gate, 2), vjp_of(reference, 2), [x, gate, dy], float32_tolerance=1e-4)


def test_shapes_that_do_not_broadcast():
    with pytest.raises(
        ValueError, match=r"^\[sigmoid_gate\] x has shape \(2, 3\) and gate has shape \(4,\); allowed: shapes"
    ):
        sigmoid_gate(mx.zeros((2, 3)), mx.zeros((4,)))


@pytest.mark.parametrize("columns", [1, 3, 7, 8, 9, 63, 65, 129])
@each_dtype
def test_every_tail(columns, dtype):
    wide = normal(9, 2 * columns + 3, dtype=dtype)
    x, gate = wide[:, :columns], wide[:, columns + 1 : 2 * columns + 1]
    dy = normal(9, columns, dtype=dtype)
    assert_accurate(sigmoid_gate, reference, [x, gate])
    assert_accurate(vjp_of(sigmoid_gate, 2), vjp_of(reference, 2), [x, gate, dy], factor=GRADIENT_FACTOR)


@each_dtype
def test_small_tails(dtype):
    """A gate that is almost closed keeps its relative accuracy, and so do the slopes of both ends."""
    gate = mx.concatenate([mx.linspace(-15, -5, 301), mx.linspace(5, 9, 100)]).astype(dtype)
    x = mx.ones_like(gate)
    wide = np.array(gate.astype(mx.float32)).astype(np.float64)
    value = 1 / (1 + np.exp(-wide))
    slope = value / (1 + np.exp(wide))
    d_x, d_gate = vjp_of(sigmoid_gate, 2)(x, gate, x)
    tolerance = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 8e-3}[dtype]
    for ours, exact in ((sigmoid_gate(x, gate), value), (d_x, value), (d_gate, slope)):
        np.testing.assert_allclose(
            np.array(ours.astype(mx.float32)), exact, rtol=tolerance, atol=1e-7 if dtype == mx.float16 else 0
        )


@each_dtype
def test_infinities_and_nan(dtype):
    """NaN and infinities as in the definition, and nowhere else."""
    values = [0.0, -0.0, 1.0, -1.0, 100.0, -100.0, math.inf, -math.inf, math.nan]
    x, gate = (mx.array(x).astype(dtype) for x in zip(*itertools.product(values, values), strict=True))
    dy = mx.ones_like(x)
    with np.errstate(invalid="ignore"):
        wide, of_gate = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, gate))
        small = np.exp(-np.abs(of_gate))
        value = np.where(of_gate < 0, small, 1) / (1 + small)
        wanted = [wide * value, value, wide * (small / (1 + small) ** 2)]
    results = [sigmoid_gate(x, gate), *vjp_of(sigmoid_gate, 2)(x, gate, dy)]
    for ours, want in zip(results, wanted, strict=True):
        # e^-100 is 0 in float32, as GPUs flush what is below its normal numbers.
        flushed = np.where(np.abs(want) < 2.0**-126, 0, want)
        infinite = np.isinf(wide) & (np.abs(of_gate) == 100)
        given = np.array(ours.astype(mx.float32))
        np.testing.assert_array_equal(np.isnan(given) | infinite, np.isnan(want) | infinite)
        np.testing.assert_allclose(given[~infinite], flushed[~infinite], rtol=1e-2, atol=1e-6)


def test_finite_numbers_never_give_nan():
    gate = mx.concatenate([mx.linspace(-1e4, 1e4, 20001), mx.array([3e38, -3e38, 1e-45, -1e-45])])
    x, dy = normal(*gate.shape), normal(*gate.shape)
    for result in (sigmoid_gate(x, gate), *vjp_of(sigmoid_gate, 2)(x, gate, dy)):
        assert not mx.any(mx.isnan(result)).item()


def test_gate_of_a_joint_projection_is_read_in_place():
    """Qwen3-Next projects queries and gates together."""
    q, gate = mx.split(normal(33, 4, 2 * 64), 2, axis=-1)
    without_copies(sigmoid_gate, q, gate)
    assert_accurate(sigmoid_gate, reference, [q, gate])


def test_one_kernel_each_way():
    x, gate, dy = (normal(64, 64) for _ in range(3))
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(sigmoid_gate(x, gate))
        mx.eval(mx.vjp(sigmoid_gate, [x, gate], [dy])[1])
        mx.eval(mx.jvp(sigmoid_gate, [x, gate], [dy, dy])[1])
        mx.eval(mx.vmap(sigmoid_gate, in_axes=(0, None))(x, gate[0]))
    directions = ("forward_float32_flat", "backward_float32_flat", "jvp_float32_flat", "forward_float32_strided")
    assert kernel_names(trace) == [f"sigmoid_gate_{direction}" for direction in directions]
