"""Rewritten methods, for what an op computes in one call and a model in several.

Most are found by the code of the method, not by the name of its class: a method has a *form* if its bytecode equals
that of an example below, up to the names of its projections.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext, reference
from mlx_anvil import nn as anvil_nn
from mlx_anvil.patching._rebind import Call, Function
from mlx_anvil.patching._report import FallbackLog
from mlx_anvil.patching._routes import unrouted
from mlx_anvil.patching._stand_ins import ATTENTION, RMS_NORM, SWIGLU, guarded, originals, stand_in, widened

Methods = Mapping[str, FunctionType]

# MLX's functions as they are on import, before another package replaces them.
_SILU = nn.silu
_EMBEDDING = nn.QuantizedEmbedding.__call__
_PRODUCTS = (nn.QuantizedLinear.__call__, anvil_nn.QuantizedLinear.__call__)

QUANTIZED_EMBEDDING = Call("quantized", "mx.dequantize", "quantized_embedding")
SOFTCAPPED_ATTENTION = Call(ATTENTION.option, "attention with softcap, in line", ATTENTION.op)
NORM_OF_WEIGHT_LESS_ONE = Call(RMS_NORM.option, "mx.fast.rms_norm of 1 + weight", RMS_NORM.op)
GATED_MLP = Call(SWIGLU.option, "swiglu of two projections", "silu_gate, quantized_swiglu")


@dataclass(frozen=True)
class Adapter:
    """Rewritten methods of a class, by name, and the call that they replace."""

    call: Call
    methods: dict[str, Function]


def adapters(cls: type[nn.Module], methods: Methods, quantized: bool, log: FallbackLog) -> Iterator[Adapter]:
    """The adapters that apply to a class. ``methods`` are the methods that its instances run."""
    call = methods.get("__call__")
    if call is None:
        return

    def adapter(what: Call, ours: Function) -> Adapter:
        return Adapter(what, {"__call__": guarded(what.op.partition(",")[0], call, ours, log)})

    if call is _EMBEDDING:
        yield adapter(QUANTIZED_EMBEDDING, stand_in(QUANTIZED_EMBEDDING.op, call, _embed, log))
    elif _names_of_form(call, _norm_of_weight_less_one):
        yield adapter(NORM_OF_WEIGHT_LESS_ONE, stand_in(RMS_NORM.op, call, _gemma_norm, log))
    elif cls.__name__ == "Attention" and _is_written_in(call, "mlx_lm.models.gemma2"):
        yield adapter(SOFTCAPPED_ATTENTION, _softcapped_attention(log))
    elif projections := _projections_of_mlp(call):
        yield adapter(GATED_MLP, _gated_mlp(*projections, quantized, log))


def _is_written_in(method: FunctionType, module: str) -> bool:
    """True if the module defines the method, and no other package has wrapped it."""
    return bool(method.__globals__.get("__name__") == module) and method.__code__.co_name == "__call__"


# Forms. A method matches one up to the names of its projections. They never run.

swiglu: Any = None


def _mlp(self, x):  # type: ignore[no-untyped-def]
    return self.down(swiglu(self.gate(x), self.up(x)))


def _mlp_in_line(self, x):  # type: ignore[no-untyped-def]
    return self.down(nn.silu(self.gate(x)) * self.up(x))


def _norm_of_weight_less_one(self, x):  # type: ignore[no-untyped-def]
    return mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)


def _names_of_form(method: FunctionType, form: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names that the method uses, in order, if it has the form; else None."""
    code, expected = method.__code__, form.__code__
    if _shape(code) != _shape(expected):
        return None
    names = code.co_names
    free = ("down", "gate", "up")
    return names if all(b in free or a == b for a, b in zip(names, expected.co_names, strict=True)) else None


def _shape(code: Any) -> tuple[Any, ...]:
    constants = tuple(c for c in code.co_consts if c is not None and not isinstance(c, str))  # without the docstring
    return code.co_code, code.co_argcount, code.co_kwonlyargcount, constants, len(code.co_names)


def _projections_of_mlp(method: FunctionType) -> tuple[str, str, str] | None:
    """The attribute names of gate, up and down, if the method is a SwiGLU MLP; else None."""
    if names := _names_of_form(method, _mlp):
        known = originals().get(SWIGLU)
        down, _, gate, up = names
        return (gate, up, down) if known and method.__globals__.get("swiglu") is known[0] else None
    if names := _names_of_form(method, _mlp_in_line):
        down, _, _, gate, up = names
        return (gate, up, down) if method.__globals__.get("nn") is nn and nn.silu is _SILU else None
    return None


# Rewritten methods.


def _format(layer: nn.Module) -> dict[str, Any]:
    return {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}


def _embed(self: nn.QuantizedEmbedding, ids: mx.array) -> mx.array:
    return _ext.quantized_embedding(ids, self["weight"], self["scales"], self.get("biases"), **_format(self))


def _gemma_norm(self: nn.Module, x: mx.array) -> mx.array:
    return _ext.rms_norm(widened(x, self["weight"]), self["weight"], self.eps, weight_offset=1.0)


def _gated_mlp(gate_name: str, up_name: str, down_name: str, quantized: bool, log: FallbackLog) -> Function:
    silu_gate = stand_in(SWIGLU.op, lambda gate, up: nn.silu(gate) * up, _ext.silu_gate, log)

    def products_and_gate(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array:
        result: mx.array = silu_gate(gate(x), up(x))
        return result

    fused = stand_in("quantized_swiglu", products_and_gate, _quantized_swiglu, log)

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        gate, up = getattr(self, gate_name), getattr(self, up_name)
        hidden = (fused if quantized and _is_quantized_pair(gate, up) else products_and_gate)(gate, up, x)
        result: mx.array = getattr(self, down_name)(hidden)
        return result

    return __call__


def _is_quantized_pair(gate: nn.Module, up: nn.Module) -> bool:
    """True if both projections are plain quantized layers of one format, without a bias.

    Checked at every call, because layers can be replaced, for example by LoRA.
    """
    return (
        _is_product(type(gate))
        and (type(up) is type(gate) or _is_product(type(up)))
        and not ("bias" in gate or "bias" in up)
        and (gate.mode, gate.bits, gate.group_size, gate["weight"].shape)
        == (up.mode, up.bits, up.group_size, up["weight"].shape)
    )


def _is_product(cls: type[nn.Module]) -> bool:
    call = cls.__call__
    return isinstance(call, FunctionType) and unrouted(call) in _PRODUCTS


def _quantized_swiglu(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array:
    matrices = (
        tuple(layer[name] for name in ("weight", "scales", "biases") if layer.get(name) is not None)
        for layer in (gate, up)
    )
    return _ext.quantized_swiglu(x, *matrices, **_format(gate))


def _softcapped_attention(log: FallbackLog) -> Function:
    """Gemma 2's attention, which caps the scores before it adds the mask. ``mx.fast`` has no such function."""
    attention = stand_in(ATTENTION.op, reference.flash_attention, _ext.flash_attention, log)

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
