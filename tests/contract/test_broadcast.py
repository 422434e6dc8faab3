"""Gradients of broadcast arrays are sums whose error does not grow with their length, under every transformation."""

import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import reference
from mlx_anvil.reference import DTYPES
from support import assert_accurate, assert_same_bits, jvp_of, max_error, to_numpy, vjp_of, without_copies

silu_gate = mlx_anvil.silu_gate

MANY = 10**6
# Shapes of gate and up: one axis or several, between others, of length 1, in front.
SHAPES = [
    ((1,), (1003, 1)),
    ((3,), (401, 3)),
    ((1, 4, 1), (30, 4, 70)),
    ((129,), (503, 129)),
    ((5, 1, 7, 1), (5, 11, 7, 13)),
    ((97, 1), (97, 130)),
    ((97, 1), (97, 16)),
    ((1, 2000), (70, 2000)),
    ((1, 3), (3, 1)),
    ((), (5, 6)),
    ((1, 1, 3), (3,)),
    ((1, 3), (0, 3)),
]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def relative_error(result: mx.array, exact: np.ndarray) -> float:
    return float(np.abs(to_numpy(result) - exact).max() / np.abs(exact).max())


# ---- digits ----------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only  # many elements for the simulator
@pytest.mark.parametrize("columns", [1, 3])
def test_a_million_rows(columns):
    """Terms of one sign: a sequential sum loses digits, 1e-4 here and 9 % with 16 million terms."""
    x = mx.random.uniform(0.5, 1.5, (MANY, columns))
    up = mx.random.uniform(0.5, 1.5, (columns,))
    exact = to_numpy(x)
    of_up = mx.grad(lambda up: silu_gate(x, up).sum())(up)
    assert relative_error(of_up, (exact * sigmoid(exact)).sum(axis=0)) <= 1e-6
    of_gate = mx.grad(lambda gate: silu_gate(gate, x).sum())(up)
    derivative = sigmoid(to_numpy(up)) * (1 + to_numpy(up) * (1 - sigmoid(to_numpy(up))))
    assert relative_error(of_gate, exact.sum(axis=0) * derivative) <= 1e-6


@pytest.mark.cpu_only
def test_sixteen_million_equal_terms():
    """Beyond 2^24 a sequential sum of ones stops growing."""
    rows = 17 * 10**6
    ones = mx.broadcast_to(mx.array([1.0], mx.float16), (rows, 1))
    gradient = mx.grad(lambda up: silu_gate(ones, up).sum())(mx.ones((1,)))
    assert relative_error(gradient, np.array([rows * sigmoid(1.0)])) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradients_of_every_shape(shapes, dtype):
    for gate_shape, up_shape in (shapes, shapes[::-1]):
        gate, up = (mx.random.normal(shape).astype(dtype) for shape in (gate_shape, up_shape))
        cotangent = mx.random.normal(np.broadcast_shapes(gate_shape, up_shape)).astype(dtype)
        for arrays in ([gate, up, cotangent], [gate, up, mx.abs(cotangent)]):
            assert_accurate(vjp_of(silu_gate, 2), vjp_of(reference.silu_gate, 2), arrays, factor=3)


@pytest.mark.cpu_only
def test_norms_weight_and_bias():
    x = mx.random.uniform(0.5, 1.5, (MANY // 4, 16))
    cotangent = mx.random.uniform(0.5, 1.5, x.shape)
    weight, bias = mx.ones((16,)), mx.zeros((16,))
    of_bias = mx.vjp(lambda w, b: mlx_anvil.layer_norm(x, w, b), [weight, bias], [cotangent])[1][1]
    assert relative_error(of_bias, to_numpy(cotangent).sum(axis=0)) <= 1e-6
    of_weight = mx.vjp(lambda w: mlx_anvil.rms_norm(x, w), [weight], [cotangent])[1][0]
    exact = to_numpy(x)
    normed = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5)
    assert relative_error(of_weight, (to_numpy(cotangent) * normed).sum(axis=0)) <= 1e-6


@pytest.mark.cpu_only
def test_attention_mask_and_sinks():
    """A mask that all batch rows and heads share, and sinks that all rows share."""
    batch, length = 6000, 8
    q = k = mx.zeros((batch, 4, length, 8))
    v = mx.random.uniform(0.5, 1.5, k.shape)
    mask, sinks = mx.random.normal((length, length)), mx.random.normal((4,))
    cotangent = mx.broadcast_to(mx.array([1.0, -1.0] * 4), q.shape)

    def ours(mask, sinks):
        return mlx_anvil.flash_attention(q, k, v, mask=mask, sinks=sinks)

    scores = to_numpy(mask)[None, None]
    sink = np.broadcast_to(to_numpy(sinks)[None, :, None, None], (1, 4, length, 1))
    weights = np.exp(np.concatenate([np.broadcast_to(scores, (1, 4, length, length)), sink], axis=-1))
    weights /= weights.sum(axis=-1, keepdims=True)
    d_weights = np.einsum("bhqd,bhkd->bhqk", to_numpy(cotangent), to_numpy(v), optimize=True)
    d_scores = weights[..., :-1] * (d_weights - (weights[..., :-1] * d_weights).sum(axis=-1, keepdims=True))
    d_sink = -weights[..., -1] * (weights[..., :-1] * d_weights).sum(axis=-1)
    of_mask, of_sinks = mx.vjp(ours, [mask, sinks], [cotangent])[1]
    terms = np.abs(d_scores).sum(axis=(0, 1)).max()  # of either sign
    assert np.abs(to_numpy(of_mask) - d_scores.sum(axis=(0, 1))).max() <= 1e-6 * terms
    assert np.abs(to_numpy(of_sinks) - d_sink.sum(axis=(0, 2))).max() <= 1e-6 * np.abs(d_sink).sum(axis=(0, 2)).max()


@pytest.mark.cpu_only
def test_what_vmap_shares():
    """The gradient in an array that all elements of a vmap share is a sum over the elements."""
    x, up = mx.random.uniform(0.5, 1.5, (MANY,)), mx.array(0.75)
    exact = to_numpy(x)
    gradient = mx.grad(lambda up: mx.vmap(silu_gate, in_axes=(0, None))(x, up).sum())(up)
    assert relative_error(gradient, (exact * sigmoid(exact)).sum()) <= 1e-6


def test_infinities_and_nan():
    """A compensated sum must not turn infinity into NaN."""
    gate = mx.ones((40, 4))
    cotangent = np.ones((40, 4), np.float32)
    cotangent[3, 0] = cotangent[30, 1] = np.inf
    cotangent[5, 1], cotangent[7, 2], cotangent[8, 3] = -np.inf, np.nan, 3e38
    cotangent[9, 3] = 3e38
    (gradient,) = mx.vjp(lambda up: silu_gate(gate, up), [mx.ones((4,))], [mx.array(cotangent)])[1]
    np.testing.assert_array_equal(np.array(gradient), [np.inf, np.nan, np.nan, np.inf])


# ---- transformations -------------------------------------------------------------------------------------------------


def loss(gate: mx.array, up: mx.array) -> mx.array:
    return (silu_gate(gate, up) ** 2).sum()


def plain_loss(gate: mx.array, up: mx.array) -> mx.array:
    return (reference.silu_gate(gate, up) ** 2).sum()


def gradients_of(function: Callable[..., mx.array]) -> Callable[..., tuple[mx.array, ...]]:
    return mx.grad(function, argnums=(0, 1))


@pytest.mark.parametrize("shapes", [((3, 1), (4, 3, 5)), ((1, 5), (4, 1)), ((), (2, 3))], ids=str)
def test_transformations(shapes):
    gate, up = (mx.random.uniform(0.5, 1.5, shape) for shape in shapes)  # sums that do not cancel
    arrays = [gate, up]
    expected = gradients_of(plain_loss)(*arrays)
    for ours in (gradients_of(loss), mx.compile(gradients_of(loss)), gradients_of(mx.checkpoint(loss))):
        for result, exact in zip(ours(*arrays), expected, strict=True):
            assert max_error(result, exact) <= 1e-5

    def of_gradients(function):
        return lambda gate, up: sum((g**2).sum() for g in gradients_of(function)(gate, up))

    twice, exact_twice = gradients_of(of_gradients(loss)), gradients_of(of_gradients(plain_loss))
    for result, exact in zip(twice(*arrays), exact_twice(*arrays), strict=True):
        assert max_error(result, exact) <= 2e-5
    tangents = [mx.ones_like(gate), mx.ones_like(up)]
    assert_accurate(jvp_of(silu_gate, 2), jvp_of(reference.silu_gate, 2), [*arrays, *tangents])
    forward_over_reverse = mx.jvp(lambda up: gradients_of(loss)(gate, up)[1], [up], [mx.ones_like(up)])[1][0]
    exact = mx.jvp(lambda up: gradients_of(plain_loss)(gate, up)[1], [up], [mx.ones_like(up)])[1][0]
    assert max_error(forward_over_reverse, exact) <= 2e-5


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 0), (-1, 1)], ids=str)
def test_vmap_of_gradients(axes):
    """Elements of different ranks whose shapes broadcast."""
    gate, up = mx.random.normal((3, 1)), mx.random.normal((4, 3, 5))
    batched = [x if a is None else mx.stack([x, 2 * x], axis=a) for x, a in zip((gate, up), axes, strict=True)]
    results = mx.vmap(gradients_of(loss), in_axes=axes)(*batched)
    for i in range(2):
        one = [x if a is None else mx.take(x, i, axis=a) for x, a in zip(batched, axes, strict=True)]
        for result, exact in zip(results, gradients_of(plain_loss)(*one), strict=True):
            assert max_error(result[i], exact) <= 1e-5
    nested = mx.vmap(mx.vmap(gradients_of(loss), in_axes=axes))(*(mx.stack([x, x]) for x in batched))
    for result, of_both in zip(results, nested, strict=True):
        assert_same_bits(of_both[1], result)


def test_shapeless_compile():
    compiled = mx.compile(gradients_of(loss), shapeless=True)
    for rows, columns in itertools.product((4, 9), (5, 3)):
        gate, up = mx.random.normal((1, columns)), mx.random.normal((rows, columns))
        for result, exact in zip(compiled(gate, up), gradients_of(plain_loss)(gate, up), strict=True):
            assert result.shape == exact.shape
            assert max_error(result, exact) <= 1e-5


@pytest.mark.cpu_only
def test_a_broadcast_array_is_read_in_place():
    gate, up = mx.random.normal((1000, 256)), mx.random.normal((256,))
    without_copies(silu_gate, gate, up)
