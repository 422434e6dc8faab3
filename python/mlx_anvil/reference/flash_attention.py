"""flash_attention: its definition in MLX ops, and its entries in the registry."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64, _paged, _quantized_kv, _ragged


def flash_attention(
    q: mx.array,
    k: _quantized_kv.KeysOrValues,
    v: _quantized_kv.KeysOrValues,
    *,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    lengths: mx.array | None = None,
    q_lengths: mx.array | None = None,
    starts: mx.array | None = None,
    cu_seqlens_q: mx.array | None = None,
    cu_seqlens_k: mx.array | None = None,
    block_table: mx.array | None = None,
    kv_group_size: int | None = None,
    kv_bits: int | tuple[int, int] | None = None,
    kv_mode: str = "affine",
    row_invariant: bool = False,
    plan: None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """``softmax(scale * q k^T + mask) v`` from the full ``[batch, Hq, Lq, Lk]`` matrix of scores.

    ``q`` is ``[batch, Hq, Lq, D]``, ``k`` and ``v`` are ``[batch, Hkv, Lk, D]``. A query without a visible key gives 0.
    With ``return_lse``, also returns the log-sum-exp of the scores, ``[batch, Hq, Lq]``. ``k`` and ``v`` may be
    quantized, as tuples of ``mx.quantize``. In a ragged batch a query sees keys of its own sequence only. With
    ``block_table``, ``k`` and ``v`` are pages ``[pages, Hkv, page_size, D]``. ``row_invariant`` changes nothing
    here, and there are no plans.
    """
    q, k, v = _quantized_kv.as_arrays(q, k, v, kv_group_size, kv_bits, kv_mode)
    k, v = (_paged.gather(x, block_table) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    keys, values = (mx.repeat(x, group, axis=1) if group > 1 else x for x in (k, v))
    scores = (q * scale) @ keys.swapaxes(-1, -2)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    rows = _ragged.Lengths(lengths, q_lengths, cu_seqlens_q, cu_seqlens_k, starts)
    visible = _visible(rows, q, k, mask == "causal" if isinstance(mask, str) else False, window_size)
    if isinstance(mask, mx.array):
        if mask.dtype == mx.bool_:
            visible = visible & mask
        else:
            scores = scores + mask
    hidden = mx.array(-math.inf, scores.dtype)
    scores = mx.where(visible, scores, hidden)
    sink = None if sinks is None else sinks[:, None, None].astype(scores.dtype)
    fixed = mx.stop_gradient(scores)
    top = fixed.max(axis=-1, keepdims=True) if fixed.size else mx.full((*scores.shape[:3], 1), hidden)
    if sink is not None:
        top = mx.maximum(top, sink)
    top = mx.stop_gradient(mx.where(top == hidden, 0, top)).astype(scores.dtype)
    weights = _float64.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + _float64.exp(sink - top)
    some = mx.where(total == 0, 1, total).astype(scores.dtype)
    out = (weights / some) @ values
    if not return_lse:
        return out
    lse = top + mx.log(some)
    # The gradient of mx.where would multiply an infinite gradient of such a row's lse by 0.
    lse[mx.stop_gradient(total == 0)] = hidden
    return out, lse.squeeze(-1)


def _visible(
    rows: _ragged.Lengths, q: mx.array, k: mx.array, causal: bool, window_size: int | tuple[int, int] | None
) -> mx.array:
    """Boolean, broadcasts with the scores: the keys that each query sees. The last query aligns with the last key."""
    if window_size is None:
        window_size = -1
    if isinstance(window_size, int):
        window_size = (window_size - 1,) * 2 if window_size > 0 else (-1, -1)
    left, right = window_size
    right = 0 if causal else right
    if not rows.are_given:
        distance = mx.arange(k.shape[2]) - mx.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        visible = mx.ones(distance.shape, mx.bool_)
    else:
        queries, keys = rows.rows(q.shape[0], q.shape[2], k.shape[2])
        distance = keys.position[:, None, None, :] - queries.position[:, None, :, None]
        sequence = queries.sequence[:, None, :, None]
        visible = (sequence == keys.sequence[:, None, None, :]) & (sequence > 0)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return visible


# ---- flash_attention: a shape is (batch, q heads, kv heads, q length, kv length, head_dim) ---------------------------


def _attention_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, q_heads, kv_heads, q_len, kv_len, dim = shape
    q = mx.random.normal((batch, q_heads, q_len, dim))
    k, v = (mx.random.normal((batch, kv_heads, kv_len, dim)) for _ in range(2))
    return [x.astype(dtype) for x in (q, k, v)]


def _attention_inputs_with_bias(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, q_heads, _, q_len, kv_len, _ = shape
    mask = mx.random.normal((batch, 1, q_len, kv_len)).astype(dtype)
    sinks = mx.random.normal((q_heads,)).astype(dtype)
    return [*_attention_inputs(shape, dtype), mask, sinks]


def _with_bias(attention: Callable[..., Any]) -> Callable[..., mx.array]:
    """Attention as a function of all its arrays, with a window and a softcap."""

    def function(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, sinks: mx.array, **options: Any) -> mx.array:
        result = attention(q, k, v, mask=mask, sinks=sinks, window_size=(40, 9), softcap=3.0, **options)
        return cast(mx.array, result)

    return function


def _attention_spec(variant: str, shapes: tuple[tuple[int, ...], ...], **options: Any) -> OpSpec:
    return OpSpec(
        name="flash_attention",
        variant=variant,
        function=partial(_ext.flash_attention, **options),
        reference=cast(Callable[..., mx.array], partial(flash_attention, **options)),
        make_inputs=_attention_inputs,
        arguments=("q", "k", "v"),
        operands=("q", "k", "v"),
        contract_shapes=(
            (1, 1, 1, 1, 1, 1),
            (0, 2, 1, 3, 5, 8),
            (2, 2, 1, 0, 5, 8),
            (1, 2, 2, 3, 0, 4),
            (1, 4, 2, 37, 70, 72),
            (1, 2, 1, 33, 129, 64),
            (2, 2, 2, 9, 13, 5),
            (1, 4, 2, 5, 31, 6),
            (2, 4, 2, 11, 19, 6),
        ),
        check_shapes=shapes,
        float32_tolerance=2e-5,
        special_values=_MASKED_SPECIAL_VALUES if "mask" in options else _ATTENTION_SPECIAL_VALUES,
    )


# No 1e4: scores of 1e8 have no fractional digits in float32. The tests of the op cover such scores.
_ATTENTION_SPECIAL_VALUES = (math.nan, math.inf, -math.inf, 0.0, -0.0)
# No NaN: the definition multiplies a NaN value by a weight of 0, and returns NaN where the op ignores a hidden key.
_MASKED_SPECIAL_VALUES = (0.0, -0.0, 30.0)


SPECS = (
    _attention_spec("causal", shapes=((1, 4, 2, 65, 67, 40), (1, 8, 8, 512, 512, 64)), mask="causal"),
    _attention_spec("full", shapes=((1, 6, 2, 113, 203, 72), (1, 8, 8, 256, 256, 64))),
    _attention_spec("decode", shapes=((2, 6, 2, 1, 131, 24), (1, 32, 8, 1, 2048, 128))),
    OpSpec(
        name="flash_attention",
        variant="bias",
        function=_with_bias(_ext.flash_attention),
        reference=_with_bias(flash_attention),
        make_inputs=_attention_inputs_with_bias,
        arguments=("q", "k", "v", "mask", "sinks"),
        operands=("q", "k", "v"),
        contract_shapes=((1, 4, 2, 37, 70, 72), (2, 2, 1, 33, 47, 16), (2, 4, 2, 5, 31, 6), (2, 4, 2, 11, 19, 6)),
        check_shapes=((1, 4, 2, 37, 70, 24), (1, 8, 2, 256, 256, 64)),
        float32_tolerance=2e-5,
        special_values=_MASKED_SPECIAL_VALUES,
    ),
    *_quantized_kv.specs(_ext.flash_attention, flash_attention),
)
