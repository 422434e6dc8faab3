"""Errors of flash_attention for bad arguments: raised at the call, with what was given and what is allowed."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_anvil import flash_attention

pytestmark = pytest.mark.cpu_only

Q, K = (2, 4, 5, 8), (2, 2, 7, 8)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 5, 8), K, K), r"q has shape \(4, 5, 8\); allowed: rank 4"),
        ((Q, (2, 7, 8), K), r"k has shape \(2, 7, 8\); allowed: rank 4"),
        ((Q, K, (7,)), r"v has shape \(7,\); allowed: rank 4"),
        (((2, 4, 5, 0), K, K), r"q has shape \(2, 4, 5, 0\); allowed: a head_dim of at least 1"),
        (((3, 4, 5, 8), K, K), r"q has shape \(3, 4, 5, 8\) and k has shape \(2, 2, 7, 8\); allowed: one batch"),
        (((2, 5, 5, 8), K, K), r"q has shape .* and k has shape .*heads of q a multiple of the heads of k"),
        ((Q, (2, 0, 7, 8), (2, 0, 7, 8)), r"q has shape .* and k has shape .*heads of q a multiple"),
        (((2, 4, 5, 9), K, K), r"q has shape .* and k has shape .*one head_dim"),
        ((Q, K, (2, 2, 6, 8)), r"k has shape \(2, 2, 7, 8\) and v has shape \(2, 2, 6, 8\); allowed: the same length"),
        ((Q, K, (2, 4, 7, 8)), r"k has shape .* and v has shape .*the same number of heads"),
    ],
)
def test_bad_shapes(shapes: tuple[tuple[int, ...], ...], message: str):
    with pytest.raises(ValueError, match=r"^\[flash_attention\] " + message):
        flash_attention(*(mx.zeros(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": mx.zeros((5, 8))}, ValueError, r"mask has shape \(5, 8\); allowed: .*\(2, 4, 5, 7\)"),
        ({"mask": mx.zeros((3, 1, 5, 7))}, ValueError, r"mask has shape \(3, 1, 5, 7\); allowed: "),
        ({"mask": mx.zeros((1, 2, 4, 5, 7))}, ValueError, r"mask has shape \(1, 2, 4, 5, 7\); allowed: "),
        ({"mask": mx.zeros((5, 7), mx.complex64)}, ValueError, r"mask has dtype complex64; allowed: .*float32"),
        ({"mask": "Causal"}, ValueError, r"mask is 'Causal'; allowed: None, 'causal', or an array"),
        ({"mask": 3}, TypeError, r"mask is a int; allowed: None, 'causal', mlx.core.array"),
        ({"sinks": mx.zeros((2,))}, ValueError, r"sinks has shape \(2,\) and q has shape .*allowed: .*\(4,\)"),
        ({"sinks": mx.zeros((4, 1))}, ValueError, r"sinks has shape \(4, 1\)"),
        ({"sinks": 1.0}, TypeError, r"sinks is a float; allowed: mlx.core.array"),
        ({"softcap": -1.0}, ValueError, r"softcap is -1.*; allowed: None, or a positive number"),
        ({"softcap": float("nan")}, ValueError, r"softcap is nan"),
        ({"softcap": "x"}, TypeError, r"softcap is a str; allowed: None, or a number"),
        ({"scale": float("inf")}, ValueError, r"scale is inf; allowed: None, or a finite number"),
        ({"scale": True}, TypeError, r"scale is a bool"),
        ({"window_size": 0}, ValueError, r"window_size is 0; allowed: at least 1"),
        ({"window_size": -2}, ValueError, r"window_size is -2; allowed: "),
        ({"window_size": (3, -2)}, ValueError, r"window_size has -2 on the right; allowed: 0 or more, or -1"),
        ({"window_size": (1, 2, 3)}, ValueError, r"window_size has 3 entries; allowed: "),
        ({"window_size": 2.5}, TypeError, r"window_size is a float; allowed: None, an int, or a pair"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=r"^\[flash_attention\] " + message):
        flash_attention(mx.zeros(Q), mx.zeros(K), mx.zeros(K), **options)


INT_DTYPES = [mx.int8, mx.int32, mx.int64, mx.uint8, mx.uint32]


@pytest.mark.parametrize("dtype", INT_DTYPES, ids=str)
def test_mask_of_zeros_and_ones(dtype: mx.Dtype):
    """An additive mask of zeros and ones would add 1 to scores, where its author means to hide keys."""
    q, k = mx.random.normal(Q), mx.random.normal(K)
    mask = mx.random.bernoulli(0.5, (5, 7)).astype(dtype)
    with pytest.raises(ValueError, match=r"^\[flash_attention\] mask has dtype \w+; allowed: bool, .*mask\.astype\(mx"):
        flash_attention(q, k, k, mask=mask)
    assert flash_attention(q, k, k, mask=mask.astype(mx.bool_)).shape == Q


LAYOUT = r".* They fit as \[batch, length, heads, head_dim\]; give x\.transpose\(0, 2, 1, 3\) of q, k and v\.$"


def test_layout_of_other_libraries():
    """[B, L, H, D]: the error says so if the lengths and heads make no sense as given."""
    q, k = mx.zeros((1, 10, 8, 16)), mx.zeros((1, 24, 2, 16))
    with pytest.raises(ValueError, match=r"heads of q a multiple of the heads of k\." + LAYOUT):
        flash_attention(q, k, k)
    assert flash_attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, k))).shape == (1, 8, 10, 16)
    long = mx.zeros((1, 48, 8, 16))  # 48 heads would do for 24
    with pytest.raises(ValueError, match=r"mask has shape \(48, 24\)" + LAYOUT):
        flash_attention(long, k, k, mask=mx.zeros((48, 24)))
    with pytest.raises(ValueError, match=r"sinks has shape \(8,\)" + LAYOUT):
        flash_attention(long, k, k, sinks=mx.zeros((8,)))


def test_shapes_that_fit_in_no_layout():
    q, k = mx.zeros((1, 10, 7, 16)), mx.zeros((1, 24, 2, 16))
    with pytest.raises(ValueError, match=r"heads of q a multiple of the heads of k\.$"):
        flash_attention(q, k, k)
    with pytest.raises(ValueError, match=r"k length\]\.$"):
        flash_attention(mx.zeros((1, 48, 8, 16)), k, k, mask=mx.zeros((47, 24)))
    with pytest.raises(ValueError, match=r"\(48,\)\.$"):
        flash_attention(mx.zeros((1, 48, 8, 16)), k, k, sinks=mx.zeros((7,)))


def test_mask_dtype_must_promote():
    half = [mx.zeros(shape, mx.float16) for shape in (Q, K, K)]
    with pytest.raises(ValueError, match=r"^\[flash_attention\] mask has dtype float32; allowed: .*float16"):
        flash_attention(*half, mask=mx.zeros((5, 7)))
    with pytest.raises(ValueError, match=r"^\[flash_attention\] sinks has dtype float32; allowed: .*float16"):
        flash_attention(*half, sinks=mx.zeros((4,)))
