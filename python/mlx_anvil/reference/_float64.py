"""Functions that definitions are made of, in float64 to its last digits.

MLX 0.32.4 computes ``exp``, ``sigmoid``, ``softmax``, ``sin`` and ``cos`` of float64 arrays in float32, so that a truth
made of them is off by a float32 rounding or more. ``power``, ``tanh``, ``log`` and ``rsqrt`` are exact. In other dtypes
these are MLX's own functions.
"""

import math
from typing import cast

import mlx.core as mx


def exp(x: mx.array) -> mx.array:
    return mx.power(mx.array(math.e, mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def sigmoid(x: mx.array) -> mx.array:
    if x.dtype != mx.float64:
        return mx.sigmoid(x)
    return 1 / (1 + exp(mx.minimum(-x, 350)))  # finite in derivatives, which hold its square


def softplus(x: mx.array) -> mx.array:
    """log(1 + e^x), up to 350 in float64."""
    return -mx.log(sigmoid(-x)) if x.dtype == mx.float64 else mx.logaddexp(x, 0)


def softmax(x: mx.array) -> mx.array:
    """Along the last axis."""
    if x.dtype != mx.float64:
        return mx.softmax(x, axis=-1)
    weights = exp(x - mx.max(mx.stop_gradient(x), axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def cos_sin(angles: mx.array) -> tuple[mx.array, mx.array]:
    """Of angles in float64 from -pi to pi, by their Taylor series."""
    square = angles * angles
    cos = sin = mx.zeros_like(angles)
    for k in reversed(range(16)):
        cos = mx.array((-1.0) ** k / math.factorial(2 * k), mx.float64) + cos * square
        sin = mx.array((-1.0) ** k / math.factorial(2 * k + 1), mx.float64) + sin * square
    return cos, sin * angles


def erf(x: mx.array) -> mx.array:
    return cast(mx.array, _erf_in_float64(x)) if x.dtype == mx.float64 else mx.erf(x)


@mx.custom_function
def _erf_in_float64(x: mx.array) -> mx.array:
    """2 / sqrt(pi) e^(-x^2) times a series of positive terms, 2^k x^(2k + 1) / (1 * 3 * ... (2k + 1))."""
    near = mx.clip(x, -6, 6)  # 1 - erf(6) is 2e-17
    square = 2 * near * near
    series = mx.ones_like(x)
    for k in reversed(range(1, 130)):
        series = 1 + series * square / (2 * k + 1)
    value = near * exp(-near * near) * series * (2 / math.sqrt(math.pi))
    return mx.where(mx.isnan(x), x, value)


def _slope_of_erf(x: mx.array) -> mx.array:
    return exp(-x * x) * (2 / math.sqrt(math.pi))


@_erf_in_float64.vjp
def _erf_vjp(primal: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
    return cotangent * _slope_of_erf(primal)


@_erf_in_float64.jvp
def _erf_jvp(primal: mx.array, tangent: mx.array) -> mx.array:
    return tangent * _slope_of_erf(primal)
