"""Errors of mla_decode for bad arguments: raised at the call, with what was given and what is allowed."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_anvil import mla_decode

pytestmark = pytest.mark.cpu_only

SHAPES = {"q_nope": (2, 4, 3, 8), "q_rope": (2, 4, 3, 2), "latent": (2, 1, 7, 8), "k_rope": (2, 1, 7, 2)}


def refused(message: str, error: type[Exception] = ValueError, **given: Any) -> None:
    arrays = {name: mx.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(error, match=r"^\[mla_decode\] " + message):
        mla_decode(**{**arrays, "scale": 0.5, **given})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q_nope", (4, 3, 8), r"q_nope has shape \(4, 3, 8\); allowed: rank 4, \[batch, heads, length, dim\]"),
        ("latent", (2, 7, 8), r"latent has shape \(2, 7, 8\); allowed: rank 4, \[batch, 1, length, dim\]"),
        ("latent", (2, 4, 7, 8), r"latent has shape \(2, 4, 7, 8\); allowed: .*all heads share one latent"),
        ("k_rope", (2, 2, 7, 2), r"k_rope has shape .*all heads share one latent"),
        ("latent", (2, 1, 7, 0), r"latent has shape .*a last axis of at least 1"),
        ("q_rope", (2, 5, 3, 2), r"q_nope has shape .* and q_rope has shape .*the same batch, heads and length"),
        ("q_rope", (2, 4, 4, 2), r"q_nope has shape .* and q_rope has shape .*the same batch, heads and length"),
        ("k_rope", (2, 1, 6, 2), r"latent has shape .* and k_rope has shape .*the same batch and length"),
        ("q_nope", (2, 4, 3, 9), r"q_nope has shape .* and latent has shape .*one rank"),
        ("q_rope", (2, 4, 3, 3), r"q_rope has shape .* and k_rope has shape .*one rope dim"),
    ],
)
def test_bad_shapes(name: str, shape: tuple[int, ...], message: str):
    refused(message, **{name: mx.zeros(shape)})


def test_two_batch_sizes():
    queries = {name: mx.zeros((3, *SHAPES[name][1:])) for name in ("q_nope", "q_rope")}
    refused(r"q_nope has shape \(3, .* and latent has shape \(2, .*one batch size", **queries)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": float("nan")}, ValueError, r"scale is nan; allowed: a finite number"),
        ({"scale": None}, TypeError, r"scale is a NoneType"),
        ({"mask": "Causal"}, ValueError, r"mask is 'Causal'; allowed: None, 'causal', or an array"),
        ({"mask": 3}, TypeError, r"mask is a int; allowed: None, 'causal', mlx.core.array"),
        ({"mask": mx.zeros((3, 8))}, ValueError, r"mask has shape \(3, 8\); allowed: .*\(2, 4, 3, 7\)"),
        ({"mask": mx.zeros((3, 7), mx.int32)}, ValueError, r"mask has dtype int32; allowed: bool"),
        ({"mask": mx.zeros((3, 7), mx.complex64)}, ValueError, r"mask has dtype complex64; allowed: .*float32"),
        ({"sinks": mx.zeros((3,))}, ValueError, r"sinks has shape \(3,\) .*allowed: .*\(4,\)"),
        ({"softcap": -1.0}, ValueError, r"softcap is -1.*; allowed: None, or a positive number"),
        ({"lengths": mx.array([1.0, 2.0])}, ValueError, r"lengths has dtype float32; allowed: integers"),
        ({"lengths": mx.array([1, 2, 3])}, ValueError, r"lengths has shape \(3,\); allowed: one length per batch"),
        ({"lengths": mx.array([1, 8])}, ValueError, r"lengths has 8; allowed: 0 to 7"),
        ({"latent": mx.zeros((2, 1, 7, 8), mx.int32)}, ValueError, r"latent has dtype int32"),
        ({"latent": None}, TypeError, r"latent is a NoneType"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str):
    refused(message, error, **options)
