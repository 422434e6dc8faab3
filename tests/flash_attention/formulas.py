"""Attention and its gradients in NumPy: the reference in float64, and the result of a composed graph in a 16-bit
format, with every intermediate result rounded to that format."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from support import to_numpy

Rounding = Callable[[np.ndarray], np.ndarray]


def exactly(x: np.ndarray) -> np.ndarray:
    return x


def to_float16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds to nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x.astype(np.float32))


ROUNDING = {mx.float16: to_float16, mx.bfloat16: to_bfloat16}


@dataclass
class Attention:
    """Results of one call, named as the arguments and results of the public function."""

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]
    terms: dict[str, np.ndarray]  # what gradients of few numbers add up, or round, all made positive


def window_of(options: dict[str, Any]) -> tuple[float, float]:
    """How many keys a query sees to its left and right."""
    size = options.get("window_size")
    left, right = (-1, -1) if size is None else (size - 1, size - 1) if isinstance(size, int) else size
    if isinstance(options.get("mask"), str):
        right = 0
    return (np.inf if left < 0 else left, np.inf if right < 0 else right)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    d_out: mx.array,
    d_lse: mx.array | None = None,
    *,
    round_to: Rounding = exactly,
    **options: Any,
) -> Attention:
    """``flash_attention(q, k, v, **options)`` and its gradients for the cotangents ``d_out`` and ``d_lse``."""
    width = np.float64 if round_to is exactly else np.float32
    groups = q.shape[1] // k.shape[1]

    def heads(x: mx.array, kv_heads: int) -> np.ndarray:
        values = to_numpy(x).astype(width)
        return values.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])

    def joined(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])

    def swap(x: np.ndarray) -> np.ndarray:
        return x.swapaxes(-1, -2)

    q_, k_, v_, d_out_ = (heads(x, k.shape[1]) for x in (q, k, v, d_out))
    scale = width(options.get("scale") or q.shape[-1] ** -0.5)
    cap = options.get("softcap")
    capped = round_to(round_to(q_ * scale) @ swap(k_))
    if cap:
        capped = round_to(width(cap) * round_to(np.tanh(round_to(capped / width(cap)))))

    distance = np.arange(k.shape[2]) - np.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    left, right = window_of(options)
    visible = (distance >= -left) & (distance <= right)
    scores = capped
    mask = options.get("mask")
    if isinstance(mask, mx.array):
        full = np.broadcast_to(np.array(mask) if mask.dtype == mx.bool_ else to_numpy(mask), scores_shape(q, k))
        full = full.reshape(scores.shape)
        if mask.dtype == mx.bool_:
            visible = visible & full
        else:
            scores = round_to(scores + full.astype(width))
    scores = np.where(visible, scores, -np.inf)

    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    sinks = options.get("sinks")
    sink = None
    if sinks is not None:
        sink = to_numpy(sinks).astype(width).reshape(k.shape[1], groups, 1, 1)
        top = np.maximum(top, sink)
    top = np.where(np.isneginf(top), 0, top)
    weights = round_to(np.exp(scores - top))
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    empty = total == 0
    some = np.where(empty, 1, total)
    p = round_to(weights / some)
    out = round_to(p @ v_)
    lse = np.where(empty, -np.inf, top + np.log(some))

    delta = round_to((d_out_ * out).sum(axis=-1, keepdims=True))
    if d_lse is not None:
        delta = delta - to_numpy(d_lse).astype(width).reshape(*delta.shape)
    d_scores = round_to(p * round_to(round_to(d_out_ @ swap(v_)) - delta))
    d_product = d_scores * scale
    if cap:
        d_product = d_product * (1 - (capped / width(cap)) ** 2)
    d_product = round_to(d_product)
    gradients = {
        "q": joined(round_to(d_product @ k_)),
        "k": round_to((swap(d_product) @ q_).sum(axis=2)),
        "v": round_to((swap(p) @ d_out_).sum(axis=2)),
    }
    terms = {}
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        dense = joined(d_scores)
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        axes = tuple(i for i in range(4) if shape[i] == 1)
        gradients["mask"] = round_to(dense.sum(axis=axes, keepdims=True)).reshape(mask.shape)
        # Each is p * (d_out . v - delta), and delta has the rounding of `out`, number by number.
        in_delta = np.sqrt(((d_out_ * out) ** 2).sum(axis=-1, keepdims=True))
        terms["mask"] = joined(p * in_delta).sum(axis=axes, keepdims=True).reshape(mask.shape)
    if sink is not None:
        per_row = -np.exp(sink - np.where(np.isneginf(lse), 0, lse)) * delta
        gradients["sinks"] = round_to(per_row.sum(axis=(0, 3, 4)).reshape(-1))
        terms["sinks"] = np.abs(per_row).sum(axis=(0, 3, 4)).reshape(-1)
    return Attention(joined(out), joined(lse).squeeze(-1), gradients, terms)


def scores_shape(q: mx.array, k: mx.array) -> tuple[int, ...]:
    """The shape of the scores: batch, query heads, queries, keys."""
    return (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
