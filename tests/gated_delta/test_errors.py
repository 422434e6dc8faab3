"""Errors of gated_delta for bad arguments: raised at the call, with what was given and what is allowed."""

import math
from typing import Any

import mlx.core as mx
import pytest

from mlx_anvil import gated_delta

pytestmark = pytest.mark.cpu_only

SHAPES = {
    "q": (2, 5, 2, 16),
    "k": (2, 5, 2, 16),
    "v": (2, 5, 4, 8),
    "g": (2, 5, 4),
    "beta": (2, 5, 4),
    "state": (2, 4, 8, 16),
}


def refused(message: str, error: type[Exception] = ValueError, **given: Any) -> None:
    arrays = {name: mx.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(error, match=r"^\[gated_delta\] " + message):
        gated_delta(**{**arrays, **given})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (5, 2, 16), r"q has shape \(5, 2, 16\); allowed: rank 4, \[batch, length, heads, dim\]"),
        ("q", (2, 5, 0, 16), r"q has shape .*one head or more"),
        ("q", (2, 5, 2, 0), r"q has shape .*a last axis of at least 1"),
        ("k", (2, 5, 2, 32), r"k has shape \(2, 5, 2, 32\); allowed: \(2, 5, 2, 16\), the shape of q"),
        ("v", (2, 5, 4), r"v has shape .*rank 4"),
        ("v", (2, 5, 3, 8), r"v has shape .* and q has shape .*a multiple of those of q"),
        ("v", (2, 6, 4, 8), r"v has shape .* and q has shape .*one batch and length"),
        ("v", (1, 5, 4, 8), r"v has shape .* and q has shape .*one batch and length"),
        ("g", (2, 5, 2), r"g has shape \(2, 5, 2\); allowed: \(2, 5, 4\), a factor per head, or \(2, 5, 4, 16\)"),
        ("g", (2, 5, 4, 1), r"g has shape .*a factor per channel"),
        ("beta", (2, 5, 4, 1), r"beta has shape .*allowed: \(2, 5, 4\), one number per head of v"),
        (
            "state",
            (2, 4, 16, 8),
            r"state has shape .*allowed: \(2, 4, 8, 16\), \[batch, heads of v, dim of v, dim of q",
        ),
    ],
)
def test_bad_shapes(name: str, shape: tuple[int, ...], message: str):
    refused(message, **{name: mx.zeros(shape)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": mx.array([1.0, 2.0])}, ValueError, r"lengths has dtype float32; allowed: integers"),
        ({"lengths": mx.array([1, 2, 3])}, ValueError, r"lengths has shape \(3,?\); allowed: \(2,?\), one length per"),
        ({"lengths": mx.array([1, 6])}, ValueError, r"lengths has 6; allowed: 0 to 5"),
        ({"lengths": [1, 2]}, TypeError, r"lengths is a list"),
        ({"return_states": [0, 5]}, ValueError, r"return_states has 5; allowed: 0 to 4"),
        ({"return_states": [-1]}, ValueError, r"return_states has -1; allowed: 0 to 4"),
        ({"return_states": mx.array([0, 7])}, ValueError, r"return_states has 7; allowed: 0 to 4"),
        ({"return_states": mx.array([0.5])}, ValueError, r"return_states has dtype float32; allowed: integers"),
        ({"return_states": mx.zeros((3, 1), mx.int32)}, ValueError, r"return_states has shape \(3, 1\).*a batch of 2"),
        ({"return_states": mx.array(1)}, ValueError, r"return_states has shape \(\)"),
        ({"return_states": 3}, TypeError, r"return_states is a int; allowed: None, a list of ints, or mlx.core.array"),
        ({"return_states": [0.5]}, TypeError, r"return_states is a float"),
        ({"return_states": [True]}, TypeError, r"return_states is a bool"),
        ({"normalize_eps": -1.0}, ValueError, r"normalize_eps is -1.*; allowed: None, or a finite number, 0 or more"),
        ({"normalize_eps": math.nan}, ValueError, r"normalize_eps is nan"),
        ({"normalize_eps": True}, TypeError, r"normalize_eps is a bool"),
        ({"state": mx.zeros((2, 4, 8, 16), mx.int32)}, ValueError, r"state has dtype int32; allowed: float32"),
        ({"state": 3}, TypeError, r"state is a int"),
        ({"g": None}, TypeError, r"g is a NoneType"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str):
    refused(message, error, **options)


def test_positions_without_steps():
    empty = {name: mx.zeros((2, 0, *shape[2:])) for name, shape in SHAPES.items() if name != "state"}
    refused(r"return_states has 0 and q has no steps; allowed: no positions", **empty, return_states=[0])
