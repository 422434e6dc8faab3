"""The functions that definitions use are exact in float64, because definitions in float64 are the reference."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_anvil.reference import _float64

pytestmark = pytest.mark.cpu_only


def softmax_of(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def slope_of_softmax(x: np.ndarray) -> np.ndarray:
    """The derivative of the sum of ``cos(k)`` times the k-th number."""
    y, weight = softmax_of(x), np.cos(np.arange(x.shape[-1]))
    return y * (weight - (y * weight).sum(axis=-1, keepdims=True))


def sigmoid_of(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("ours", "exact", "slope"),
    [
        (_float64.exp, np.exp, np.exp),
        (_float64.sigmoid, sigmoid_of, lambda x: sigmoid_of(x) * sigmoid_of(-x)),
        (_float64.softplus, lambda x: np.logaddexp(x, 0), sigmoid_of),
        (_float64.softmax, softmax_of, slope_of_softmax),
        (_float64.erf, np.vectorize(math.erf), lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
        (lambda x: _float64.cos_sin(x)[0], np.cos, lambda x: -np.sin(x)),
        (lambda x: _float64.cos_sin(x)[1], np.sin, np.cos),
    ],
    ids=["exp", "sigmoid", "softplus", "softmax", "erf", "cos", "sin"],
)
def test_functions_in_float64(ours, exact, slope, rng):
    numbers = rng.uniform(-math.pi, math.pi, (7, 33))
    x = mx.array(numbers, mx.float64)
    weight = mx.array(np.cos(np.arange(33)) if ours is _float64.softmax else np.ones(33), mx.float64)
    with mx.stream(mx.cpu):
        value, gradient = ours(x), mx.grad(lambda x: (ours(x) * weight).sum())(x)
        assert np.abs(np.array(value) - exact(numbers)).max() <= 1e-13
        assert np.abs(np.array(gradient) - slope(numbers)).max() <= 1e-13


def test_far_from_zero():
    with mx.stream(mx.cpu):
        x = mx.array([-1e4, -40.0, 40.0, 1e4], mx.float64)
        value, gradient = _float64.sigmoid(x), mx.grad(lambda x: _float64.sigmoid(x).sum())(x)
        second = mx.grad(lambda x: mx.grad(lambda x: _float64.sigmoid(x).sum())(x).sum())(x)
        np.testing.assert_allclose(np.array(value), [0, math.exp(-40), 1, 1], rtol=1e-13, atol=1e-150)
        np.testing.assert_allclose(np.array(gradient), [0, math.exp(-40), math.exp(-40), 0], rtol=1e-13, atol=1e-150)
        np.testing.assert_allclose(np.array(second), [0, math.exp(-40), -math.exp(-40), 0], rtol=1e-13, atol=1e-150)
        x = mx.array([-math.inf, -1e4, -5.5, 5.5, 1e4, math.inf, math.nan], mx.float64)
        np.testing.assert_allclose(np.array(_float64.erf(x)), [math.erf(v) for v in np.array(x)], rtol=1e-14)
        second = mx.grad(lambda x: mx.grad(lambda x: _float64.erf(x).sum())(x).sum())(x[1:-2])
        slopes = [-4 * v / math.sqrt(math.pi) * math.exp(-v * v) for v in np.array(x[1:-2])]
        np.testing.assert_allclose(np.array(second), slopes, rtol=1e-12, atol=1e-150)
        assert np.array(_float64.exp(mx.array([-math.inf, -800.0], mx.float64))).tolist() == [0, 0]
