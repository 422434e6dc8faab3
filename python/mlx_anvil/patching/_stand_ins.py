"""Stand-ins: functions that call our op, or the original function if the op does not support the call."""

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil.patching import _latent_rules, _recurrences
from mlx_anvil.patching._code import unchanged
from mlx_anvil.patching._masks import MASK, mask_stand_in, takes_masks
from mlx_anvil.patching._namespace import Current
from mlx_anvil.patching._quantized_ops import QuantizedOps
from mlx_anvil.patching._rebind import Call, Function, StandIn
from mlx_anvil.patching._report import FallbackLog
from mlx_anvil.patching._routers import NAME, route, route_by_ops, routers, swapped

OPTIONS = ("attention", "swiglu", "quantized", "norm", "rope", "router", "experts", "recurrence", "sharded")

ATTENTION = Call("attention", "mx.fast.scaled_dot_product_attention", "flash_attention")
QUANTIZED_ATTENTION = Call("attention", "quantized_scaled_dot_product_attention", "flash_attention")
QUANTIZED_MATMUL = Call("quantized", "mx.quantized_matmul", "quantized_matmul")
RMS_NORM = Call("norm", "mx.fast.rms_norm", "rms_norm")
LAYER_NORM = Call("norm", "mx.fast.layer_norm", "layer_norm")
ROPE = Call("rope", "mx.fast.rope", "rope")
SWIGLU = Call("swiglu", "swiglu", "silu_gate")
PRECISE_SWIGLU = Call("swiglu", "precise_swiglu", "silu_gate")
SWIGLU_OAI = Call("swiglu", "swiglu_oai", "gated")
GEGLU = Call("swiglu", "geglu", "gated")
GATHER_QMM = Call("experts", "mx.gather_qmm", "gather_quantized_matmul")
GATHER_MM = Call("experts", "mx.gather_mm", "gather_matmul")

REPLACED = "the function that the model calls was replaced after patch(); call patch() again"


attention_of_masks = takes_masks(_ext.flash_attention)


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    return _ext._rms_norm_after_sum(widened(x, weight), weight, eps, stream=stream)


def _layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, stream: Any = None
) -> mx.array:
    return _ext._layer_norm_after_sum(widened(x, weight, bias), weight, bias, eps, stream=stream)


def _precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Float32 arithmetic, and the result in the dtype of ``h``."""
    if h.dtype == gate.dtype == x.dtype:
        return _ext.silu_gate(gate, x)
    return _ext.silu_gate(gate.astype(mx.float32), x.astype(mx.float32)).astype(h.dtype)


def _swiglu_oai(gate: mx.array, x: mx.array, alpha: float = 1.702, limit: float = 7.0) -> mx.array:
    if alpha != 1.702:
        raise ValueError(f"[gated] alpha is {alpha}; allowed: 1.702.")
    return _ext.gated(gate, x, activation="swiglu_oai", limit=limit)


def _quantized_attention(
    queries: mx.array,
    q_keys: tuple[mx.array, ...],
    q_values: tuple[mx.array, ...],
    scale: float,
    mask: Any,
    group_size: int = 64,
    bits: int = 8,
) -> mx.array:
    """Attention over a quantized cache of mlx-lm."""
    result: mx.array = attention_of_masks(
        queries, q_keys, q_values, scale=scale, mask=mask, kv_group_size=group_size, kv_bits=bits
    )
    return result


class CacheKeys:
    """What a cache of this package gives to attention as keys, in place of an array."""

    def attend(self, queries: mx.array, values: Any, *, mask: Any = None, **options: Any) -> Any:
        """Attention to them; ``options`` are those of flash_attention."""
        raise NotImplementedError


@dataclass(frozen=True)
class Pages(CacheKeys):
    """What a paged cache gives to attention as keys.

    Attributes:
        keys: the pages of the keys.
        options: the arguments of flash_attention that say what is in them.
    """

    keys: mx.array | tuple[mx.array, ...]
    options: Mapping[str, Any]

    def attend(self, queries: mx.array, values: Any, *, mask: Any = None, **options: Any) -> Any:
        window = getattr(mask, "window", None)  # of the mask that the cache made
        return _ext.flash_attention(
            queries, self.keys, values, mask=mask, window_size=window, **options, **self.options
        )


def takes_cache_keys(attention: Function) -> Function:
    """Attention that also takes the keys and values of a cache of this package."""

    @functools.wraps(attention)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and isinstance(args[1], CacheKeys):
            queries, keys, *rest = args
            return keys.attend(queries, *rest, **kwargs)
        return attention(*args, **kwargs)

    return call


def _geglu(gate: mx.array, x: mx.array) -> mx.array:
    return _ext.gated(gate, x, activation="gelu_tanh")


def widened(x: mx.array, *parameters: mx.array | None) -> mx.array:
    """Casts ``x`` to the dtype of MLX's result: wider parameters widen the result of MLX's norms, but not of ours."""
    dtype = x.dtype
    for parameter in parameters:
        if parameter is not None and parameter.dtype != dtype:
            dtype = mx.result_type(dtype, parameter.dtype)
    return x if dtype == x.dtype else x.astype(dtype)


def originals(quantized: QuantizedOps | None = None) -> dict[Call, tuple[Function, Function]]:
    """The function and our op for each call. mlx-lm's functions are included only if mlx-lm was imported."""
    quantized = quantized or QuantizedOps()
    pairs: dict[Call, tuple[Function, Function]] = {
        ATTENTION: (mx.fast.scaled_dot_product_attention, attention_of_masks),
        QUANTIZED_MATMUL: (mx.quantized_matmul, quantized.matmul),
        RMS_NORM: (mx.fast.rms_norm, _rms_norm),
        LAYER_NORM: (mx.fast.layer_norm, _layer_norm),
        ROPE: (mx.fast.rope, _ext.rope),
        GATHER_QMM: (mx.gather_qmm, quantized.gather_qmm),
        GATHER_MM: (mx.gather_mm, _ext.gather_matmul),
    }
    if base := sys.modules.get("mlx_lm.models.base"):
        pairs[QUANTIZED_ATTENTION] = (base.quantized_scaled_dot_product_attention, _quantized_attention)
    if activations := sys.modules.get("mlx_lm.models.activations"):
        pairs[SWIGLU] = (activations.swiglu, _ext.silu_gate)
        pairs[PRECISE_SWIGLU] = (activations.precise_swiglu, _precise_swiglu)
        pairs[SWIGLU_OAI] = (activations.swiglu_oai, _swiglu_oai)
    if gemma4 := sys.modules.get("mlx_lm.models.gemma4_text"):
        pairs[GEGLU] = (gemma4.geglu, _geglu)
    pairs |= _recurrences.functions_of_models(sys.modules)
    for name, router in routers():
        pairs[Call("router", name, "softmax_topk")] = (router, swapped(router))
    return pairs


def stand_in(op: str, original: Function, ours: Function, log: FallbackLog, current: Current | None = None) -> Function:
    """Returns a function that calls ``ours``, or ``original`` if ours rejects the call or would fall back to MLX ops.

    MLX is lazy, so trying ours costs nothing if its graph is dropped. If ``current`` reads a function other than
    ``original``, another package has replaced it, and that one is called.
    """

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current is not None and (now := current()) is not original:
            log.note(op, REPLACED)
            return now(*args, **kwargs)
        before = _ext._fallback_count()
        try:
            result = ours(*args, **kwargs)
        except (TypeError, ValueError) as error:
            refusal = _reason(op, error)
        else:
            if _ext._fallback_count() == before:
                return result
            log.add(*_ext._last_fallback())
            return original(*args, **kwargs)
        result = original(*args, **kwargs)  # an invalid call raises its usual error
        log.note(op, refusal)
        return result

    return call


def stand_ins(log: FallbackLog, quantized: QuantizedOps) -> Mapping[Call, StandIn]:
    """The stand-in of each call."""

    def made(call: Call, original: Function, ours: Function) -> StandIn:
        def make(current: Current) -> Function:
            function = stand_in(call.op, original, ours, log, current)
            return takes_cache_keys(function) if call is ATTENTION else function

        return StandIn(original, make)

    made_of = {call: made(call, *pair) for call, pair in originals(quantized).items()}
    if base := sys.modules.get("mlx_lm.models.base"):
        made_of[MASK] = mask_stand_in(base)
    if gated_delta := sys.modules.get("mlx_lm.models.gated_delta"):
        made_of[_recurrences.NORMALIZED] = _recurrences.normalize_stand_in(gated_delta.normalize_qk)
    return made_of


def functions_of_rules(log: FallbackLog) -> Mapping[str, Function]:
    """The functions that rules for routers, latent attention and recurrences call."""
    return {
        **{
            name: stand_in(op, theirs, ours, log)
            for name, (op, theirs, ours) in _recurrences.FUNCTIONS_OF_RULES.items()
        },
        NAME: stand_in("softmax_topk", route_by_ops, route, log),
        _latent_rules.NAME: stand_in(
            "mla_decode", _latent_rules.latent_attention_by_ops, _latent_rules.latent_attention, log
        ),
    }


def guarded(op: str, method: FunctionType, ours: Function, log: FallbackLog) -> Function:
    """Calls the rewritten method as long as the globals that the original method names have not been replaced."""
    is_unchanged = unchanged(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_unchanged():
            return ours(*args, **kwargs)
        log.note(op, REPLACED)
        return method(*args, **kwargs)

    return call


def _reason(op: str, error: Exception) -> str:
    """The error text without the name of the op, and without its signature."""
    text = str(error).strip()
    if "unexpected keyword" in text:
        return f"arguments that {op} does not take"
    return text.removeprefix(f"[{op}]").partition(f"; allowed: {op}(")[0].strip()
