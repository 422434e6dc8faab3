"""Rewritten methods, for what an op computes in one call and a model in several.

Most are found by the code of the method, not by the name of its class.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext, reference
from mlx_anvil._quantized_layers import format_of
from mlx_anvil.patching._code import names_of_form
from mlx_anvil.patching._experts import EXPERTS, experts, is_experts
from mlx_anvil.patching._gates import gates
from mlx_anvil.patching._quantized_ops import QuantizedOps
from mlx_anvil.patching._rebind import Call, Function
from mlx_anvil.patching._report import FallbackLog
from mlx_anvil.patching._shards import products_of_shards
from mlx_anvil.patching._stand_ins import (
    ATTENTION,
    RMS_NORM,
    attention_of_masks,
    guarded,
    stand_in,
    takes_cache_keys,
    widened,
)

Methods = Mapping[str, FunctionType]

# MLX's functions as they are on import, before another package replaces them.
_EMBEDDING = nn.QuantizedEmbedding.__call__

QUANTIZED_EMBEDDING = Call("quantized", "mx.dequantize", "quantized_embedding")
SOFTCAPPED_ATTENTION = Call(ATTENTION.option, "softcap attention", ATTENTION.op)
NORM_OF_WEIGHT_LESS_ONE = Call(RMS_NORM.option, "rms_norm (1 + w)", RMS_NORM.op)


@dataclass(frozen=True)
class Adapter:
    """Rewritten methods of a class, by name, and the call that they replace."""

    call: Call
    methods: dict[str, Function]


def adapters(cls: type[nn.Module], methods: Methods, quantized: QuantizedOps, log: FallbackLog) -> Iterator[Adapter]:
    """The adapters that apply to a class. ``methods`` are the methods that its instances run."""
    call = methods.get("__call__")
    if call is None:
        return

    def adapter(what: Call, ours: Function) -> Adapter:
        return Adapter(what, {"__call__": guarded(what.op.partition(",")[0], call, ours, log)})

    if call is _EMBEDDING:
        yield adapter(QUANTIZED_EMBEDDING, stand_in(QUANTIZED_EMBEDDING.op, call, _embed, log))
    elif names_of_form(call, _norm_of_weight_less_one):
        yield adapter(NORM_OF_WEIGHT_LESS_ONE, stand_in(RMS_NORM.op, call, _gemma_norm, log))
    elif row_sharded := products_of_shards(call, quantized, log):
        yield adapter(*row_sharded)
    elif is_experts(cls, call):
        yield Adapter(EXPERTS, {"__call__": experts(call, quantized, log)})
    elif cls.__name__ == "Attention" and _is_written_in(call, "mlx_lm.models.gemma2"):
        yield adapter(SOFTCAPPED_ATTENTION, _softcapped_attention(log))
    else:
        for gate in gates(cls, call, quantized, log):
            yield adapter(gate.call, gate.function)


def _is_written_in(method: FunctionType, module: str) -> bool:
    """True if the module defines the method, and no other package has wrapped it."""
    return bool(method.__globals__.get("__name__") == module) and method.__code__.co_name == "__call__"


# Forms: a method has one if its bytecode is equal. They never run.


def _norm_of_weight_less_one(self, x):  # type: ignore[no-untyped-def]
    return mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)


# Rewritten methods.


def _embed(self: nn.QuantizedEmbedding, ids: mx.array) -> mx.array:
    return _ext.quantized_embedding(ids, self["weight"], self["scales"], self.get("biases"), **format_of(self))


def _gemma_norm(self: nn.Module, x: mx.array) -> mx.array:
    return _ext._rms_norm_after_sum(widened(x, self["weight"]), self["weight"], self.eps, weight_offset=1.0)


def _softcapped_attention(log: FallbackLog) -> Function:
    """Gemma 2's attention, which caps the scores before it adds the mask. ``mx.fast`` has no such function."""
    attention = takes_cache_keys(stand_in(ATTENTION.op, reference.flash_attention, attention_of_masks, log))

    def heads(x: mx.array, count: int) -> mx.array:
        return mx.unflatten(x, -1, (count, -1)).swapaxes(1, 2)

    def __call__(self: nn.Module, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        queries = heads(self.q_proj(x), self.n_heads)
        keys, values = heads(self.k_proj(x), self.n_kv_heads), heads(self.v_proj(x), self.n_kv_heads)
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        softcap = self.attn_logit_softcapping
        attended = attention(queries, keys, values, scale=self.scale, mask=mask, softcap=softcap)
        result: mx.array = self.o_proj(attended.swapaxes(1, 2).flatten(-2))
        return result

    return __call__
