"""Tests of causal_conv1d beyond the contract: the definition in NumPy, states, lengths, layouts, errors, fusion."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import causal_conv1d as reference
from support import (
    GRADIENT_FACTOR,
    OTHER_KERNEL,
    assert_accurate,
    assert_same_bits,
    kernel_names,
    max_error,
    normal,
    to_numpy,
    vjp_of,
    without_copies,
)

causal_conv1d = mlx_anvil.causal_conv1d
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_width = pytest.mark.parametrize("width", range(2, 9))
each_activation = pytest.mark.parametrize("activation", ["silu", None])


def draw(batch, length, channels, width, dtype=mx.float32):
    """x, weight, bias and state."""
    shapes = (batch, length, channels), (channels, width), (channels,), (batch, width - 1, channels)
    return [normal(*shape, dtype=dtype) for shape in shapes]


def in_numpy(x, weight, bias=None, state=None, *, activation="silu", lengths=None):
    """The definition as a loop over rows, in float64."""
    x, weight = to_numpy(x), to_numpy(weight)
    (batch, length, channels), width = x.shape, weight.shape[1]
    state = np.zeros((batch, width - 1, channels)) if state is None else to_numpy(state)
    bias = np.zeros(channels) if bias is None else to_numpy(bias)
    y, new_state = np.zeros(x.shape), np.zeros(state.shape)
    for b in range(batch):
        window = list(state[b])
        end = length if lengths is None else min(max(lengths[b], 0), length)
        for t in range(end):
            window = [*window[1 - width :], x[b, t]]
            z = bias + sum(weight[:, w] * window[w] for w in range(width))
            y[b, t] = z / (1 + np.exp(-z)) if activation == "silu" else z
        new_state[b] = window[len(window) - (width - 1) :]
    return y, new_state


# ---- values ----------------------------------------------------------------------------------------------------------


@each_width
@each_activation
@pytest.mark.parametrize("channels", [1, 4, 31, 33, 130])
def test_definition(width, activation, channels):
    arrays = draw(2, 11, channels, width)
    for given in (arrays[:2], arrays[:3], arrays, [*arrays[:2], None, arrays[3]]):
        ours = causal_conv1d(*given, activation=activation)
        for result, wanted in zip(ours, in_numpy(*given, activation=activation), strict=True):
            np.testing.assert_allclose(to_numpy(result), wanted, rtol=1e-5, atol=1e-5)


@each_width
@each_activation
@each_dtype
def test_every_width_and_dtype(width, activation, dtype):
    """More rows than a tile and a run of rows have."""
    ours, exact = (partial(f, activation=activation) for f in (causal_conv1d, reference))
    arrays = draw(2, 75, 37, width, dtype)
    cotangents = [normal(2, rows, 37, dtype=dtype) for rows in (75, width - 1)]
    assert_accurate(ours, exact, arrays)
    assert_accurate(vjp_of(ours, 4), vjp_of(exact, 4), [*arrays, *cotangents], factor=GRADIENT_FACTOR)


@pytest.mark.cpu_only
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_mlx(bias):
    """What models write: nn.Conv1d with as many groups as channels, of the state and x."""
    layer = nn.Conv1d(24, 24, 4, groups=24, bias=bias)
    x, weight, _, state = draw(2, 9, 24, 4)
    weight = layer.weight.squeeze(-1)
    with mx.stream(mx.cpu):
        wanted = nn.silu(layer(mx.concatenate([state, x], axis=1)))
        y, new_state = causal_conv1d(x, weight, layer.bias if bias else None, state, stream=mx.cpu)
        assert max_error(y, wanted) <= 1e-5
        assert_same_bits(new_state, x[:, -3:])


@each_dtype
def test_promotion(dtype):
    x, weight, bias, state = draw(1, 5, 9, 3)
    results = causal_conv1d(x.astype(dtype), weight.astype(mx.bfloat16), bias.astype(dtype), state.astype(dtype))
    promoted = (mx.zeros((), dtype) + mx.zeros((), mx.bfloat16)).dtype
    assert [r.dtype for r in results] == [promoted, promoted]


# ---- states ----------------------------------------------------------------------------------------------------------


@each_width
@each_dtype
def test_pieces_are_one_call(width, dtype):
    """A sequence in pieces, shorter than the state too, has the bits of one call."""
    x, weight, bias, state = draw(2, 40, 20, width, dtype)
    whole, end = causal_conv1d(x, weight, bias, state)
    parts, at = [], 0
    for length in (1, 1, 2, 0, 5, 1, 30):
        y, state = causal_conv1d(x[:, at : at + length], weight, bias, state)
        parts.append(y)
        at += length
    assert_same_bits(mx.concatenate(parts, axis=1), whole)
    assert_same_bits(state, end)


def test_no_state_is_zeros():
    x, weight, bias, state = draw(2, 9, 12, 4)
    for ours, wanted in zip(causal_conv1d(x, weight, bias), causal_conv1d(x, weight, bias, 0 * state), strict=True):
        assert_same_bits(ours, wanted)


def test_gradient_through_the_state():
    """Pieces and their states have the gradients of one call."""
    arrays = draw(2, 12, 20, 4)
    d_y, d_state = normal(2, 12, 20), normal(2, 3, 20)

    def in_pieces(x, weight, bias, state):
        first, between = causal_conv1d(x[:, :2], weight, bias, state)
        second, end = causal_conv1d(x[:, 2:], weight, bias, between)
        return mx.concatenate([first, second], axis=1), end

    ours = vjp_of(in_pieces, 4)(*arrays, d_y, d_state)
    for a, b in zip(ours, vjp_of(causal_conv1d, 4)(*arrays, d_y, d_state), strict=True):
        assert max_error(a, b) <= OTHER_KERNEL


# ---- lengths ---------------------------------------------------------------------------------------------------------

LENGTHS = [0, 1, 2, 7, 40, 41, -3, 99]


@each_width
@each_activation
@each_dtype
def test_lengths(width, activation, dtype):
    arrays = draw(len(LENGTHS), 41, 9, width, dtype)
    options = {"activation": activation, "lengths": mx.array(LENGTHS)}
    ours, exact = (partial(f, **options) for f in (causal_conv1d, reference))
    assert_accurate(ours, exact, arrays)
    cotangents = [normal(len(LENGTHS), rows, 9, dtype=dtype) for rows in (41, width - 1)]
    assert_accurate(vjp_of(ours, 4), vjp_of(exact, 4), [*arrays, *cotangents], factor=GRADIENT_FACTOR)
    if dtype == mx.float32:
        wanted = in_numpy(*arrays, activation=activation, lengths=LENGTHS)
        for result, want in zip(ours(*arrays), wanted, strict=True):
            np.testing.assert_allclose(to_numpy(result), want, rtol=1e-5, atol=1e-5)


def test_a_padded_batch_is_its_sequences():
    x, weight, bias, state = draw(3, 20, 12, 4)
    lengths = [20, 0, 7]
    y, ends = causal_conv1d(x, weight, bias, state, lengths=mx.array(lengths))
    for b, length in enumerate(lengths):
        own, end = causal_conv1d(x[b : b + 1, :length], weight, bias, state[b : b + 1])
        assert_same_bits(y[b, :length], own[0])
        assert_same_bits(ends[b], end[0])
        assert not np.any(to_numpy(y[b, length:]))


def test_padding_is_never_read():
    """NaN in the padding of x and of the cotangent stays there."""
    arrays = draw(2, 20, 12, 4)
    d_y, d_state = normal(2, 20, 12), normal(2, 3, 12)
    function = partial(causal_conv1d, lengths=mx.array([5, 17]))
    clean = [*function(*arrays), *vjp_of(function, 4)(*arrays, d_y, d_state)]
    padding = mx.arange(20)[None, :, None] >= mx.array([5, 17])[:, None, None]
    arrays[0], d_y = (mx.where(padding, float("nan"), x) for x in (arrays[0], d_y))
    given = [*function(*arrays), *vjp_of(function, 4)(*arrays, d_y, d_state)]
    for a, b in zip(given, clean, strict=True):
        assert_same_bits(a, b)
    assert not np.any(to_numpy(mx.where(padding, given[2], 0)))


@pytest.mark.parametrize("dtype", [mx.int8, mx.int64, mx.uint8, mx.uint32, mx.uint64], ids=str)
def test_dtypes_of_lengths(dtype):
    x, weight, *_ = draw(2, 9, 5, 4)
    wanted = causal_conv1d(x, weight, lengths=mx.array([3, 9]))
    for ours, want in zip(causal_conv1d(x, weight, lengths=mx.array([3, 100], dtype)), wanted, strict=True):
        assert_same_bits(ours, want)


def test_lengths_that_int32_cannot_hold():
    x, weight, *_ = draw(3, 9, 5, 4)
    lengths = mx.array([2**40, -(2**40), 2**32 + 1], mx.int64)
    y, _ = causal_conv1d(x, weight, lengths=lengths)
    assert_same_bits(y, causal_conv1d(x, weight, lengths=mx.array([9, 0, 9]))[0])
    y, _ = causal_conv1d(x, weight, lengths=mx.array([2**31 + 1, 2**32 - 1, 4], mx.uint32))
    assert_same_bits(y, causal_conv1d(x, weight, lengths=mx.array([9, 9, 4]))[0])


# ---- layouts and fusion ----------------------------------------------------------------------------------------------


@each_dtype
def test_views_are_read_in_place(dtype):
    """A slice of a joint projection, and a batch behind time."""
    _, weight, bias, state = draw(3, 17, 64, 4, dtype)
    sliced = normal(3, 700, 200, dtype=dtype)[..., 40:104]
    behind = normal(700, 3, 64, dtype=dtype).swapaxes(0, 1)
    odd = normal(3, 1400, 200, dtype=dtype)[:, ::2, 7:71]
    for x in (sliced, behind, odd):
        without_copies(causal_conv1d, x, weight, bias, state)
        dense = mx.contiguous(x)
        for a, b in zip(causal_conv1d(x, weight, bias, state), causal_conv1d(dense, weight, bias, state), strict=True):
            assert_same_bits(a, b)


def test_one_kernel_each_way():
    x, weight, bias, state = draw(2, 9, 64, 4)
    d_y, d_state = normal(2, 9, 64), normal(2, 3, 64)
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(causal_conv1d(x, weight, bias, state))
        mx.eval(mx.vmap(causal_conv1d, in_axes=(0, None))(mx.stack([x, x]), weight))
        mx.eval(mx.vjp(lambda x: causal_conv1d(x, weight, bias, state), [x], [d_y, d_state])[1])
    names = [name.removesuffix("_w4") for name in kernel_names(trace)]
    forward, backward = (f"causal_conv1d_{direction}_float32" for direction in ("forward", "backward"))
    assert names == [forward, forward, backward]


@each_dtype
def test_long_sums_of_the_weight(dtype):
    """The error of a gradient does not grow with the number of rows, and its bits do not change."""
    x, weight, bias, _ = draw(1, 50_000, 3, 4, dtype)
    given = [x, weight, bias, normal(1, 50_000, 3, dtype=dtype), normal(1, 3, 3, dtype=dtype)]
    gradients = vjp_of(causal_conv1d, 3)
    ours = gradients(*given)
    assert_accurate(gradients, vjp_of(reference, 3), given, factor=GRADIENT_FACTOR, float32_tolerance=2e-5)
    for a, b in zip(gradients(*given), ours, strict=True):
        assert_same_bits(a, b)


def test_vmap_of_weights_and_lengths():
    x, _, bias, state = draw(2, 9, 12, 4)
    weights, lengths = normal(3, 12, 4), mx.array([[9, 2], [0, 1], [5, 7]])

    def function(weight, lengths):
        return causal_conv1d(x, weight, bias, state, lengths=lengths)

    ours = mx.vmap(function)(weights, lengths)
    for i in range(3):
        for a, b in zip(ours, function(weights[i], lengths[i]), strict=True):
            assert_same_bits(a[i], b)


def test_second_derivative_is_composed_and_says_so():
    x, weight, *_ = draw(1, 5, 8, 4)
    with mlx_anvil.trace() as trace:
        mx.eval(mx.grad(lambda x: mx.grad(lambda y: causal_conv1d(y, weight)[0].sum())(x).sum())(x))
    assert [event.reason for event in trace.fallbacks] == ["the gradient of CausalConv1dBackward is a graph of MLX ops"]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": (3, 4)}, r"x has shape \(3, 4\); allowed: rank 3, \[batch, time, channels\]\."),
        ({"weight": (4, 1)}, r"x has shape \(2, 3, 4\) and weight has shape \(4, 1\); allowed: a weight \(4, width\)"),
        ({"weight": (4, 9)}, r"x has .* and weight has shape \(4, 9\); .* with a width of 2 to 8\."),
        ({"weight": (4, 3, 1)}, r"x has .* and weight has shape \(4, 3, 1\); allowed: a weight \(4, width\)"),
        ({"weight": (5, 3)}, r"x has .* and weight has shape \(5, 3\); allowed: a weight \(4, width\)"),
        ({"bias": (3,)}, r"bias has shape \(3,\); allowed: \(4,\), the channels of x\."),
        ({"state": (2, 3, 4)}, r"state has shape \(2, 3, 4\); allowed: \(2, 2, 4\), \[batch, width - 1, channels\]\."),
        ({"lengths": (3,)}, r"lengths has shape \(3,\); allowed: \(2,\), the batch of x\."),
    ],
    ids=str,
)
def test_shapes(changed, text):
    shapes = {"x": (2, 3, 4), "weight": (4, 3)} | changed
    arrays = {name: mx.zeros(shape, mx.int32 if name == "lengths" else mx.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=rf"^\[causal_conv1d\] {text}"):
        causal_conv1d(**arrays)


def test_other_errors():
    x, weight, bias, state = draw(2, 3, 4, 3)
    for bad in (mx.zeros((2,)), mx.zeros((2,), mx.bool_)):
        with pytest.raises(ValueError, match=r"^\[causal_conv1d\] lengths has dtype .*; allowed: integers"):
            causal_conv1d(x, weight, lengths=bad)
    for name, given in (("bias", bias), ("state", state)):
        with pytest.raises(ValueError, match=rf"^\[causal_conv1d\] {name} has dtype int32; allowed: float32"):
            causal_conv1d(x, weight, **{name: given.astype(mx.int32)})
        with pytest.raises(TypeError, match=rf"^\[causal_conv1d\] {name} is .*; allowed: mlx\.core\.array"):
            causal_conv1d(x, weight, **{name: [1.0]})
    with pytest.raises(ValueError, match=r"^\[causal_conv1d\] activation is 'gelu'; allowed: 'silu' or None\."):
        causal_conv1d(x, weight, activation="gelu")
