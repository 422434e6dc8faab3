"""Tests of gated_delta_gates beyond the contract: mlx-lm's functions, far arguments, dtypes of weights, errors."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_anvil import gated_delta_gates
from mlx_anvil.reference import DTYPES
from support import to_numpy


def of_numpy(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None = None, scale: float = 1
) -> tuple[np.ndarray, np.ndarray]:
    speed = np.exp(to_numpy(A_log)).reshape(-1, *(1,) * (a.ndim - b.ndim))
    x = to_numpy(a) + to_numpy(dt_bias)
    logarithm = -speed * np.logaddexp(x, 0) if lower_bound is None else lower_bound / (1 + np.exp(-speed * x))
    return np.exp(logarithm), scale / (1 + np.exp(-to_numpy(b)))


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 2, 4, 18), (7,), (3, 33)], ids=str)
def test_values(shape: tuple[int, ...], dtype: mx.Dtype, weights: mx.Dtype):
    """From where g is 1 to where it is 0, in float32 whatever the dtypes are."""
    heads = shape[-2:] if len(shape) == 4 else shape[-1:]
    a, b = (4 * mx.random.normal(x) for x in (shape, shape[:3] if len(shape) == 4 else shape))
    a_log, dt_bias = mx.random.normal(heads[:1]), 10 * mx.random.normal(heads)
    arrays = [a.astype(dtype), b.astype(dtype), a_log.astype(weights), dt_bias.astype(weights)]
    for options, exact in (
        ({}, of_numpy(*arrays)),
        ({"lower_bound": -5.0, "allow_neg_eigval": True}, of_numpy(*arrays, lower_bound=-5.0, scale=2)),
    ):
        results = gated_delta_gates(*arrays, **options)
        assert all(x.dtype == mx.float32 for x in results)
        for ours, wanted in zip(results, exact, strict=True):
            np.testing.assert_allclose(to_numpy(ours), wanted, rtol=2e-5, atol=1e-7)


def test_small_decays_keep_their_digits():
    """log g, where softplus is about e^x."""
    x = mx.linspace(-60, -5, 56)
    g, _ = gated_delta_gates(x, x, mx.full((56,), 10.0), mx.zeros((56,)))
    decay = 1 - to_numpy(g)
    np.testing.assert_allclose(decay, -np.expm1(-np.exp(10) * np.logaddexp(to_numpy(x), 0)), rtol=1e-5, atol=2.0**-23)


def test_far_arguments():
    x = mx.array([-math.inf, -1e30, -200.0, 200.0, 1e30, math.inf, math.nan])
    g, beta = gated_delta_gates(x, x, mx.zeros((7,)), mx.zeros((7,)))
    np.testing.assert_array_equal(to_numpy(g), [1, 1, 1, 0, 0, 0, np.nan])
    np.testing.assert_array_equal(to_numpy(beta), [0, 0, 0, 1, 1, 1, np.nan])
    bounded, _ = gated_delta_gates(x, x, mx.zeros((7,)), mx.zeros((7,)), lower_bound=-5.0)
    least = math.exp(-5)
    np.testing.assert_allclose(to_numpy(bounded), [1, 1, 1, least, least, least, np.nan], rtol=1e-6)


def test_slope_at_zero():
    """Where a definition of softplus in pieces has none."""
    a, weights = mx.array([-1e-6, 0.0, 1e-6]), mx.zeros((3,))
    slope = mx.grad(lambda a: gated_delta_gates(a, a, weights, weights)[0].sum())(a)
    np.testing.assert_allclose(to_numpy(slope), -0.25, rtol=1e-5)  # -sigmoid(0) e^-log(2)


def test_as_mlx_lm():
    theirs = pytest.importorskip("mlx_lm.models.gated_delta", reason="mlx-lm is not installed")
    a, b, a_log = mx.random.normal((2, 3, 4, 8)), mx.random.normal((2, 3, 4)), mx.random.normal((4, 1))
    dt_bias = mx.random.normal((4, 8))
    g, beta = gated_delta_gates(a, b, a_log, dt_bias)
    np.testing.assert_allclose(to_numpy(g), to_numpy(theirs.compute_g(a_log, a, dt_bias)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(to_numpy(beta), to_numpy(mx.sigmoid(b)), rtol=1e-6)
    bounded, _ = gated_delta_gates(a, b, a_log, dt_bias, lower_bound=-5.0)
    wanted = theirs.compute_lower_bound_g(a_log, a, dt_bias, -5.0)
    np.testing.assert_allclose(to_numpy(bounded), to_numpy(wanted), rtol=1e-5)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": mx.zeros((2, 3))}, r"a has shape \(2, 3\); allowed: the shape of b, \(2, 4\), or one axis more"),
        ({"a": mx.zeros((2, 4, 0)), "dt_bias": mx.zeros((4, 0))}, r"a has shape \(2, 4, 0\)"),
        ({"b": mx.zeros(())}, r"b has shape \(\); allowed: \[..., heads\]"),
        ({"A_log": mx.zeros((1, 4))}, r"A_log has shape \(1, 4\); allowed: \(4,?\).* or \(4, 1\)"),
        ({"dt_bias": mx.zeros((1,))}, r"dt_bias has shape \(1,?\); allowed: \(4,?\)"),
        ({"lower_bound": math.inf}, r"lower_bound is inf; allowed: None, or a finite number"),
        ({"a": mx.zeros((2, 4), mx.int32)}, r"a has dtype int32"),
    ],
    ids=str,
)
def test_errors(given: dict[str, Any], message: str):
    arrays = {"a": mx.zeros((2, 4)), "b": mx.zeros((2, 4)), "A_log": mx.zeros((4,)), "dt_bias": mx.zeros((4,))}
    with pytest.raises(ValueError, match=r"^\[gated_delta_gates\] " + message):
        gated_delta_gates(**{**arrays, **given})
