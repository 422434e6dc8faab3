"""Lengths that a call rejects."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_anvil import flash_attention

Q, K = (2, 4, 5, 8), (2, 2, 7, 8)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": mx.array([1.0, 2.0])}, r"lengths has dtype float32; allowed: integers"),
        ({"lengths": mx.array([1, 2, 3])}, r"lengths has shape \(3,\); allowed: one length per batch, \(2,\)"),
        ({"lengths": mx.array([1, 8])}, r"lengths has 8; allowed: 0 to 7"),
        ({"starts": mx.array([0, 8])}, r"starts has 8; allowed: 0 to 7"),
        ({"starts": mx.array([1]), "lengths": mx.array([1, 2])}, r"starts has shape \(1,\); allowed: one length"),
        (
            {"starts": mx.array([1, 0]), "lengths": mx.array([1, 2]), "block_table": mx.array([[0], [1]])},
            r"starts is given with block_table; allowed: one of them",
        ),
        ({"starts": mx.array([1, 2]), "cu_seqlens_q": mx.array([0, 5])}, r"lengths and cu_seqlens are both given"),
        ({"q_lengths": mx.array([-1, 2])}, r"q_lengths has -1; allowed: 0 to 5"),
        ({"lengths": mx.array([1, 2]), "cu_seqlens_q": mx.array([0, 5])}, r"lengths and cu_seqlens are both given"),
        ({"cu_seqlens_q": mx.array([0, 5])}, r"q has shape \(2, 4, 5, 8\) and cu_seqlens_q is given; allowed: a batch"),
    ],
)
def test_bad_lengths(options: dict[str, mx.array], message: str):
    with pytest.raises(ValueError, match=r"^\[flash_attention\] " + message):
        flash_attention(mx.zeros(Q), mx.zeros(K), mx.zeros(K), **options)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens_k": mx.array([0, 5])}, r"cu_seqlens_k is given without cu_seqlens_q"),
        ({"cu_seqlens_q": mx.array([5])}, r"cu_seqlens_q has shape \(1,\); allowed: \(sequences \+ 1,\)"),
        ({"cu_seqlens_q": mx.array([0, 4, 3])}, r"cu_seqlens_q has 3 after 4; allowed: numbers that do not decrease"),
        ({"cu_seqlens_q": mx.array([0, 6])}, r"cu_seqlens_q has 6 after 0; allowed: .* from 0 to 5"),
        (
            {"cu_seqlens_q": mx.array([0, 5]), "cu_seqlens_k": mx.array([0, 2, 7])},
            r"cu_seqlens_k has shape \(3,\); allowed: that of cu_seqlens_q, \(2,\)",
        ),
        ({"cu_seqlens_q": [0, 5]}, None),
    ],
)
def test_bad_ends(options: dict[str, Any], message: str | None):
    q, k = mx.zeros((1, 4, 5, 8)), mx.zeros((1, 2, 7, 8))
    error = ValueError if message else TypeError
    with pytest.raises(error, match=r"^\[flash_attention\] " + (message or "cu_seqlens_q")):
        flash_attention(q, k, k, **options)
