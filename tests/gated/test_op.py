"""Tests of gated beyond the contract: every activation with and without a limit, values at the limit, extremes,
fusion."""

import itertools
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import gated as reference
from support import (
    GRADIENT_FACTOR,
    assert_accurate,
    assert_same_bits,
    jvp_of,
    kernel_names,
    max_error,
    normal,
    vjp_of,
    without_copies,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def both(activation, limit=None):
    """The op and its definition, as functions of gate and up."""

    def ours(gate, up):
        return mlx_anvil.gated(gate, up, activation=activation, limit=limit)

    return ours, lambda gate, up: reference(gate, up, activation=activation, limit=limit)


# ---- values ----------------------------------------------------------------------------------------------------------


@each_activation
@pytest.mark.parametrize("limit", [None, 0.5, 3.0])
@each_dtype
def test_limits(activation, limit, dtype):
    ours, exact = both(activation, limit)
    gate, up, dy, tangent = (normal(9, 131, dtype=dtype, scale=2.0) for _ in range(4))
    assert_accurate(ours, exact, [gate, up])
    assert_accurate(vjp_of(ours, 2), vjp_of(exact, 2), [gate, up, dy], factor=GRADIENT_FACTOR)
    assert_accurate(jvp_of(ours, 2), jvp_of(exact, 2), [gate, up, dy, tangent], factor=GRADIENT_FACTOR)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("activation", "of_mlx"), [("silu", nn.silu), ("gelu", nn.gelu), ("gelu_tanh", nn.gelu_approx), ("relu2", nn.relu2)]
)
def test_functions_of_mlx(activation, of_mlx):
    gate, up = normal(7, 100), normal(7, 100)
    with mx.stream(mx.cpu):
        assert max_error(mlx_anvil.gated(gate, up, activation=activation, stream=mx.cpu), of_mlx(gate) * up) <= 1e-6


@pytest.mark.cpu_only
def test_functions_of_mlx_lm():
    activations = pytest.importorskip("mlx_lm.models.activations")
    gate, up = normal(7, 100, scale=6), normal(7, 100, scale=6)
    with mx.stream(mx.cpu):
        ours = mlx_anvil.gated(gate, up, activation="swiglu_oai", stream=mx.cpu)
        assert max_error(ours, activations.swiglu_oai(gate, up)) <= 1e-6


def test_the_default_is_silu_gate():
    gate, up = normal(5, 33), normal(5, 33)
    assert_same_bits(mlx_anvil.gated(gate, up), mlx_anvil.silu_gate(gate, up))


@each_activation
def test_gradients_at_the_limit_are_those_of_mlx(activation):
    """At the limit itself MLX's ``minimum`` and ``clip`` pass no gradient."""
    ours, theirs = both(activation, 2.0)
    values = [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    gate, up = (mx.array(x) for x in zip(*itertools.product(values, values), strict=True))
    dy = mx.ones_like(gate)
    with mx.stream(mx.cpu):
        wanted = vjp_of(theirs, 2)(gate, up, dy)
    for ours_of, wanted_of in zip(vjp_of(ours, 2)(gate, up, dy), wanted, strict=True):
        np.testing.assert_allclose(np.array(ours_of), np.array(wanted_of), rtol=1e-5, atol=1e-6)
    assert not np.array(vjp_of(ours, 2)(gate, up, dy)[0])[np.array(gate) >= 2].any()


@each_activation
@each_dtype
def test_small_tails(activation, dtype):
    """Small values keep their relative accuracy, which MLX's GELU loses in float32."""
    gate = mx.linspace(-5, -2, 301).astype(dtype)
    up = mx.ones_like(gate)
    with mx.stream(mx.cpu):
        exact = np.array(reference(gate.astype(mx.float64), up.astype(mx.float64), activation=activation, limit=20.0))
    given = np.array(mlx_anvil.gated(gate, up, activation=activation, limit=20.0).astype(mx.float32))
    tolerance = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 8e-3}[dtype]
    np.testing.assert_allclose(given, exact, rtol=tolerance, atol=1e-7 if dtype == mx.float16 else 0)


# ---- extreme values --------------------------------------------------------------------------------------------------


@each_activation
@pytest.mark.parametrize("limit", [None, 2.0])
@each_dtype
def test_infinities_and_nan(activation, limit, dtype):
    """Values are NaN where the definition in float32 is NaN. MLX adds two terms of a gradient, which may be opposite
    infinities; ours is infinite there."""
    ours, theirs = both(activation, limit)
    values = [0.0, -0.0, 1.0, -1.0, 3.0, -3.0, math.inf, -math.inf, math.nan]
    gate, up = (mx.array(x).astype(dtype) for x in zip(*itertools.product(values, values), strict=True))
    dy = mx.ones_like(gate)
    wide = [x.astype(mx.float32) for x in (gate, up, dy)]
    with mx.stream(mx.cpu):
        wanted = [theirs(*wide[:2]), *vjp_of(theirs, 2)(*wide)]
    results = [np.array(x.astype(mx.float32)) for x in (ours(gate, up), *vjp_of(ours, 2)(gate, up, dy))]
    value, *gradients = (np.isnan(x) for x in results)
    np.testing.assert_array_equal(value, np.isnan(np.array(wanted[0])))
    for nan, result, want in zip(gradients, results[1:], wanted[1:], strict=True):
        theirs_nan = np.isnan(np.array(want))
        assert not np.any(nan & ~theirs_nan)
        assert not np.any(np.isfinite(result) & theirs_nan)


@each_activation
@pytest.mark.parametrize("limit", [None, 2.0])
def test_finite_numbers_never_give_nan(activation, limit):
    ours, _ = both(activation, limit)
    gate = mx.concatenate([mx.linspace(-1e4, 1e4, 20001), mx.array([3e38, -3e38, 1e-45, -1e-45])])
    if activation == "relu2":
        gate = mx.minimum(gate, 1e18)  # its square is finite
    up, dy = normal(*gate.shape), normal(*gate.shape)
    for result in (ours(gate, up), *vjp_of(ours, 2)(gate, up, dy)):
        assert not mx.any(mx.isnan(result)).item()


# ---- layouts and fusion ----------------------------------------------------------------------------------------------


@each_activation
@pytest.mark.parametrize(("gate_shape", "up_shape"), [((4, 1, 6), (5, 1)), ((), (3, 4)), ((64, 130), (130,))])
def test_broadcast(activation, gate_shape, up_shape):
    ours, exact = both(activation, 1.0)
    gate, up = normal(*gate_shape), normal(*up_shape)
    assert_accurate(ours, exact, [gate, up])
    dy = normal(*ours(gate, up).shape)
    gradients = vjp_of(ours, 2)(gate, up, dy)
    assert [g.shape for g in gradients] == [gate_shape, up_shape]
    assert_accurate(vjp_of(ours, 2), vjp_of(exact, 2), [gate, up, dy], float32_tolerance=1e-4)


def test_split_projection_is_read_in_place():
    gate, up = mx.split(normal(33, 2 * 1024), 2, axis=-1)
    ours, exact = both("gelu_tanh")
    without_copies(ours, gate, up)
    assert_accurate(ours, exact, [gate, up])


@each_activation
def test_one_kernel_each_way(activation):
    ours, _ = both(activation, 1.5)
    gate, up, dy = (normal(64, 64) for _ in range(3))
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(ours(gate, up))
        mx.eval(mx.vjp(ours, [gate, up], [dy])[1])
        mx.eval(mx.jvp(ours, [gate, up], [dy, dy])[1])
        mx.eval(mx.vmap(ours, in_axes=(0, None))(gate, up[0]))
    directions = ("forward_float32_flat", "backward_float32_flat", "jvp_float32_flat", "forward_float32_strided")
    assert kernel_names(trace) == [f"gated_{activation}_{direction}" for direction in directions]


def test_calls_of_one_graph_with_other_limits():
    """mx.compile merges equal nodes. Nodes with different limits or activations are not equal."""
    gate, up = normal(50, scale=3.0), normal(50, scale=3.0)

    def function(gate, up):
        return [both("silu", limit)[0](gate, up) for limit in (None, 1.0, 2.0)] + [both("relu2", 1.0)[0](gate, up)]

    compiled, plain = mx.compile(function)(gate, up), function(gate, up)
    for a, b in itertools.pairwise(plain):
        assert max_error(a, b) > 0.01
    for a, b in zip(compiled, plain, strict=True):
        assert_same_bits(a, b)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_unknown_activation():
    allowed = "allowed: 'silu', 'gelu', 'gelu_tanh', 'relu2' or 'swiglu_oai'"
    with pytest.raises(ValueError, match=rf"^\[gated\] activation is 'geglu'; {allowed}\.$"):
        mlx_anvil.gated(normal(3), normal(3), activation="geglu")
    with pytest.raises(TypeError, match=rf"^\[gated\] activation is a NoneType; {allowed}"):
        mlx_anvil.gated(normal(3), normal(3), activation=None)


@pytest.mark.parametrize("limit", [0, -1.0, math.inf, math.nan])
def test_limits_that_bound_nothing(limit):
    with pytest.raises(ValueError, match=r"^\[gated\] limit is .*; allowed: None, or a finite number above 0\."):
        mlx_anvil.gated(normal(3), normal(3), limit=limit)


def test_shapes_that_do_not_broadcast():
    with pytest.raises(
        ValueError, match=r"^\[gated\] gate has shape \(2, 3\) and up has shape \(4,\); allowed: shapes"
    ):
        mlx_anvil.gated(mx.zeros((2, 3)), mx.zeros((4,)), activation="gelu")


def test_an_mlp_trains():
    """Gemma's MLP with our gate has the same losses as MLX's in a short training."""
    mx.random.seed(7)
    layers = [nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)]

    class Mlp(nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*layer.weight.shape[::-1]) for layer in layers)
            for own, layer in zip((self.gate_proj, self.up_proj, self.down_proj), layers, strict=True):
                own.update(layer.parameters())
            self._gate = gate

        def __call__(self, x):
            return self.down_proj(self._gate(self.gate_proj(x), self.up_proj(x)))

    x = normal(64, 16)
    y = mx.sin(x)
    losses = []
    for gate in (both("gelu_tanh")[0], lambda gate, up: nn.gelu_approx(gate) * up):
        model = Mlp(gate)
        step = nn.value_and_grad(model, lambda m: nn.losses.mse_loss(m(x), y))
        losses.append([])
        for _ in range(20):
            loss, gradients = step(model)
            model.update(nn.utils.tree_map(lambda p, g: p - 1.0 * g, model.parameters(), gradients))
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.95 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
