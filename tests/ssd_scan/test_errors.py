"""Errors of ssd_scan for bad arguments: raised at the call, with what was given and what is allowed."""

import math
from typing import Any

import mlx.core as mx
import pytest

from mlx_anvil import ssd_scan

pytestmark = pytest.mark.cpu_only

SHAPES = {
    "x": (2, 5, 4, 8),
    "dt": (2, 5, 4),
    "A": (4,),
    "B": (2, 5, 2, 16),
    "C": (2, 5, 2, 16),
    "D": (4,),
    "z": (2, 5, 4, 8),
    "state": (2, 4, 8, 16),
    "dt_bias": (4,),
}


def refused(message: str, error: type[Exception] = ValueError, **given: Any) -> None:
    arrays = {name: mx.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(error, match=r"^\[ssd_scan\] " + message):
        ssd_scan(**{**arrays, **given})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("x", (5, 4, 8), r"x has shape \(5, 4, 8\); allowed: rank 4, \[batch, length, heads, dim\]"),
        ("x", (2, 5, 0, 8), r"x has shape .*one head or more"),
        ("x", (2, 5, 4, 0), r"x has shape .*a last axis of at least 1"),
        ("dt", (2, 5), r"dt has shape \(2, 5\); allowed: \(2, 5, 4\), one number per head of x"),
        ("A", (2, 5, 4), r"A has shape .*; allowed: \(4,?\), one number per head of x"),
        ("B", (2, 5, 16), r"B has shape \(2, 5, 16\) and x has shape .*; allowed: \[batch, length, groups, states\]"),
        ("B", (2, 5, 3, 16), r"B has shape .*groups that divide its heads"),
        ("B", (2, 5, 0, 16), r"B has shape .*groups that divide its heads"),
        ("B", (2, 6, 2, 16), r"B has shape .*the batch and length of x"),
        ("B", (2, 5, 2, 0), r"B has shape .*a state or more"),
        ("C", (2, 5, 2, 8), r"C has shape \(2, 5, 2, 8\); allowed: \(2, 5, 2, 16\), the shape of B"),
        ("D", (5,), r"D has shape .*allowed: \(4,?\), one number per head of x"),
        ("z", (2, 5, 4), r"z has shape .*allowed: \(2, 5, 4, 8\), the shape of x"),
        ("state", (2, 4, 16, 8), r"state has shape .*allowed: \(2, 4, 8, 16\), \[batch, heads, dim, states\]"),
        ("dt_bias", (1,), r"dt_bias has shape .*allowed: \(4,?\), one number per head of x"),
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
        ({"return_states": [0, 5]}, ValueError, r"return_states has 5; allowed: 0 to 4"),
        ({"return_states": mx.array([0, 7])}, ValueError, r"return_states has 7; allowed: 0 to 4"),
        ({"return_states": 3}, TypeError, r"return_states is a int; allowed: None, a list of ints, or mlx.core.array"),
        ({"dt_limit": (2.0, 1.0)}, ValueError, r"dt_limit is \(2.*, 1.*\); allowed: None, or two numbers, the first"),
        ({"dt_limit": (math.nan, 1.0)}, ValueError, r"dt_limit is \(nan"),
        ({"dt_limit": (1.0,)}, TypeError, r"dt_limit is a tuple; allowed: None, or a tuple of two numbers"),
        ({"dt_limit": 1.0}, TypeError, r"dt_limit is a float; allowed: None, or a tuple of two numbers"),
        ({"dt_limit": (0.0, "1")}, TypeError, r"dt_limit is a str"),
        ({"dt_softplus": 1}, TypeError, r"dt_softplus is a int"),
        ({"A": mx.zeros((4,), mx.int32)}, ValueError, r"A has dtype int32; allowed: float32"),
        ({"state": mx.zeros((2, 4, 8, 16), mx.int32)}, ValueError, r"state has dtype int32; allowed: float32"),
        ({"z": 3}, TypeError, r"z is a int"),
        ({"B": None}, TypeError, r"B is a NoneType"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str):
    refused(message, error, **options)


def test_positions_without_steps():
    empty = {name: mx.zeros((2, 0, *SHAPES[name][2:])) for name in ("x", "dt", "B", "C", "z")}
    refused(r"return_states has 0 and x has no steps; allowed: no positions", **empty, return_states=[0])
