"""Gated MLPs and their activations: which methods compute ``activation(gate) * up``, and what they run instead.

Most are found by their code, which has one of the forms in :mod:`~mlx_anvil.patching._forms`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from mlx_anvil import _ext
from mlx_anvil import nn as anvil_nn
from mlx_anvil._gguf_layers import GgufLinear
from mlx_anvil._quantized_layers import format_of, matrix_of
from mlx_anvil.patching import _forms as forms
from mlx_anvil.patching._code import names_of_form
from mlx_anvil.patching._quantized_ops import QuantizedOps
from mlx_anvil.patching._rebind import Call, Function
from mlx_anvil.patching._report import FallbackLog
from mlx_anvil.patching._routes import unrouted
from mlx_anvil.patching._stand_ins import GEGLU, SWIGLU, originals, stand_in

# MLX's functions as they are on import, before another package replaces them, and the activation of gated.
_OF_NN = {
    "silu": (nn.silu, "silu"),
    "gelu": (nn.gelu, "gelu"),
    "gelu_approx": (nn.gelu_approx, "gelu_tanh"),
    "relu2": (nn.relu2, "relu2"),
}
_OF_TWO = {SWIGLU: "silu", GEGLU: "gelu_tanh"}
_PRODUCTS = (nn.QuantizedLinear.__call__, anvil_nn.QuantizedLinear.__call__)
_GGUF_PRODUCTS = (GgufLinear.__call__,)
_SHARDED_PRODUCTS = (nn.QuantizedAllToShardedLinear.__call__,)
_DEEPSEEK = "mlx_lm.models.deepseek_v41"
_GEMMA3N = "mlx_lm.models.gemma3n"
_PHI3SMALL = "mlx_lm.models.phi3small"


@dataclass(frozen=True)
class Gate:
    """A method with a gate: the call that is replaced, and what replaces the method."""

    call: Call
    function: Function


def gates(cls: type[nn.Module], method: FunctionType, quantized: QuantizedOps, log: FallbackLog) -> Iterator[Gate]:
    """The gate of a class with this ``__call__``, if it has one."""
    module = method.__globals__.get("__name__") if method.__code__.co_name == "__call__" else ""
    if module == _DEEPSEEK and cls.__name__ == "DeepseekV41SwiGLU":
        call = Call(SWIGLU.option, "clamped swiglu", "gated")
        yield Gate(call, stand_in("gated", method, _clamped_swiglu, log))
    elif module == _GEMMA3N and cls.__name__ == "MLP":
        yield Gate(_call("gelu_approx", "gelu_tanh"), _of_gemma3n(quantized, log))
    elif module == _PHI3SMALL and cls.__name__ == "MLP":
        yield Gate(Call(SWIGLU.option, "gegelu", "gated"), _of_phi3small(method, log))
    elif cls.__name__ == "MLP" and (chosen := _CHOSEN_BY_NAME.get(module or "")):
        yield Gate(
            Call(SWIGLU.option, "activation gate", "gated, silu_gate, quantized_swiglu"),
            _with_chosen_activation(method, chosen, quantized, log),
        )
    elif found := _mlp_of(method):
        mlp, name, activation = found
        yield Gate(_call(name, activation), mlp.function(activation, quantized, log))


def _call(name: str, activation: str) -> Call:
    if activation == "silu":
        return Call(SWIGLU.option, "silu gate", "silu_gate, quantized_swiglu")
    return Call(SWIGLU.option, f"{name} gate", "gated, quantized_swiglu")


# Names that differ between models.
_FREE = ("activated", "activation", "gate", "up", "norm", "down")


def _mlp_of(method: FunctionType) -> tuple["_Mlp", str, str] | None:
    """The projections of an MLP with a gate, the name of the function that it calls, and the activation."""
    for form in (forms.of_function, forms.in_line, forms.in_steps, forms.with_norm):
        if names := names_of_form(method, form, _FREE):
            found = dict(zip(form.__code__.co_names, names, strict=True))
            mlp = _Mlp(found["gate"], found["up"], found["down"], found.get("norm"))
            name = found.get("activation") or found["activated"]
            activation = _of_two(method, name) if form is forms.of_function else _of_nn(method, name)
            return (mlp, name, activation) if activation else None
    return None


def _of_nn(method: FunctionType, name: str) -> str | None:
    known, activation = _OF_NN.get(name, (None, None))
    unchanged = method.__globals__.get("nn") is nn and known is not None and getattr(nn, name) is known
    return activation if unchanged else None


def _of_two(method: FunctionType, name: str) -> str | None:
    """The activation of a function of gate and up."""
    pairs = originals()
    value = method.__globals__.get(name)
    return next((ours for call, ours in _OF_TWO.items() if call in pairs and pairs[call][0] is value), None)


# Rewritten methods.


def _child(module: nn.Module, name: str) -> Any:
    """An attribute that most modules have as an item of their dict, where Python looks for it last."""
    value = module.get(name)
    return value if value is not None else getattr(module, name)


@dataclass(frozen=True)
class _Mlp:
    """The names of an MLP's layers."""

    gate: str
    up: str
    down: str
    norm: str | None = None

    def function(self, activation: str, quantized: QuantizedOps, log: FallbackLog) -> Function:
        """The ``__call__`` of the MLP with this activation."""
        gate_of_products = _gate(activation, log)

        def products_and_gate(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array:
            result: mx.array = gate_of_products(gate(x), up(x))
            return result

        def sharded_products_and_gate(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array:
            result: mx.array = gate_of_products(_product(quantized, gate, x), _product(quantized, up, x))
            return result

        def ours(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array:
            return quantized.swiglu(x, matrix_of(gate), matrix_of(up), activation=activation, **format_of(gate))

        def of_gguf(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array:
            matrices = (gate["weight"],), (up["weight"],)
            bits = gate.activation_bits
            return _ext.quantized_swiglu(x, *matrices, activation=activation, mode=gate.mode, activation_bits=bits)

        fused = stand_in("quantized_swiglu", products_and_gate, ours, log)
        fused_gguf = stand_in("quantized_swiglu", products_and_gate, of_gguf, log)
        fused_shards = stand_in("quantized_swiglu", sharded_products_and_gate, ours, log)

        def __call__(module: nn.Module, x: mx.array) -> mx.array:
            gate, up = _child(module, self.gate), _child(module, self.up)
            if quantized.swapped and _is_gguf_pair(gate, up):
                hidden = fused_gguf(gate, up, x)
            elif not (quantized.swapped and _is_quantized_pair(gate, up)):
                hidden = products_and_gate(gate, up, x)
            elif _is_product(type(gate), _SHARDED_PRODUCTS):
                # The gradient of x is summed over the processes once, not once for each projection.
                hidden = fused_shards(gate, up, sum_gradients(gate.group)(x))
            else:
                hidden = fused(gate, up, x)
            if self.norm:
                hidden = getattr(module, self.norm)(hidden)
            result: mx.array = _child(module, self.down)(hidden)
            return result

        return __call__


def _gate(activation: str, log: FallbackLog) -> Function:
    of_mlx = next(function for function, ours in _OF_NN.values() if ours == activation)

    def composed(gate: mx.array, up: mx.array) -> mx.array:
        result: mx.array = of_mlx(gate) * up
        return result

    def ours(gate: mx.array, up: mx.array) -> mx.array:
        return _ext.gated(gate, up, activation=activation)

    if activation == "silu":
        return stand_in(SWIGLU.op, composed, _ext.silu_gate, log)
    return stand_in("gated", composed, ours, log)


def _is_quantized_pair(gate: nn.Module, up: nn.Module) -> bool:
    """True if both projections are plain quantized layers of one format, without a bias, or shards of such.

    Checked at every call, because layers can be replaced, for example by LoRA or by ``model.shard()``.
    """
    return (
        _are_products(gate, up)
        and not ("bias" in gate or "bias" in up)
        and (gate.mode, gate.bits, gate.group_size, gate["weight"].shape)
        == (up.mode, up.bits, up.group_size, up["weight"].shape)
    )


def _is_gguf_pair(gate: nn.Module, up: nn.Module) -> bool:
    """The same for layers of a GGUF file."""
    return (
        isinstance(gate, GgufLinear)
        and isinstance(up, GgufLinear)
        and _is_product(type(gate), _GGUF_PRODUCTS)
        and _is_product(type(up), _GGUF_PRODUCTS)
        and not ("bias" in gate or "bias" in up)
        and (gate.mode, gate.activation_bits, gate["weight"].shape) == (up.mode, up.activation_bits, up["weight"].shape)
    )


def _are_products(gate: nn.Module, up: nn.Module) -> bool:
    if _is_product(type(gate)):
        return type(up) is type(gate) or _is_product(type(up))
    return (
        _is_product(type(gate), _SHARDED_PRODUCTS)
        and (type(up) is type(gate) or _is_product(type(up), _SHARDED_PRODUCTS))
        and gate.group is up.group
    )


def _is_product(cls: type[nn.Module], products: tuple[Function, ...] = _PRODUCTS) -> bool:
    call = cls.__call__
    return isinstance(call, FunctionType) and unrouted(call) in products


def _product(quantized: QuantizedOps, layer: nn.Module, x: mx.array) -> mx.array:
    """The product of a sharded layer, which sums no gradients."""
    return quantized.matmul(x, layer["weight"], layer["scales"], layer.get("biases"), **format_of(layer))


# Activations of single models.


def _clamped_swiglu(self: nn.Module, up: mx.array, gate: mx.array) -> mx.array:
    """DeepSeek V4.1's: float32 arithmetic, and the result in the dtype of ``up``. A limit of 0 is none."""
    limit = self.limit if self.limit > 0 else None
    if gate.dtype == up.dtype:
        return _ext.gated(gate, up, limit=limit)
    return _ext.gated(gate.astype(mx.float32), up.astype(mx.float32), limit=limit).astype(up.dtype)


@partial(mx.compile, shapeless=True)
def _largest(gate: mx.array, multiplier: mx.array) -> mx.array:
    """What exceeds the mean by more than ``multiplier`` standard deviations of the row, less that bound; else 0."""
    deviation = mx.std(gate, axis=-1, keepdims=True)
    bound = mx.mean(gate, axis=-1, keepdims=True) + deviation * multiplier.astype(deviation.dtype)
    return mx.maximum(0, gate - bound)


def _of_gemma3n(quantized: QuantizedOps, log: FallbackLog) -> Function:
    """In layers with ``activation_sparsity``, MLX's ops cut the gate by its own statistics before the activation."""
    dense = _Mlp("gate_proj", "up_proj", "down_proj").function("gelu_tanh", quantized, log)
    gate = _gate("gelu_tanh", log)

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        result: mx.array
        if self.activation_sparsity > 0:
            result = self.down_proj(gate(_largest(self.gate_proj(x), self._std_multiplier), self.up_proj(x)))
        else:
            result = dense(self, x)
        return result

    return __call__


def _of_phi3small(method: FunctionType, log: FallbackLog) -> Function:
    """Gate and up are the even and odd columns of one product. The op also clamps infinities, which the model keeps."""

    def ours(gate: mx.array, up: mx.array, limit: float) -> mx.array:
        return _ext.gated(gate, up, activation="swiglu_oai", limit=limit)

    gate = stand_in("gated", method.__globals__["gegelu_impl"], ours, log)

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        both = self.up_proj(x)
        result: mx.array = self.down_proj(gate(both[..., ::2], both[..., 1::2], self.gegelu_limit))
        return result

    return __call__


def _chosen_by_gear(self: nn.Module, names: dict[str, Any]) -> Any:
    return names["_activation"](self.hidden_activation)


def _chosen_by_nemotron_nas(self: nn.Module, names: dict[str, Any]) -> Any:
    return names["_ACT2FN"][self.act_fn]


# MLPs that look up their activation by the name in the configuration.
_CHOSEN_BY_NAME = {
    "mlx_lm.models.gear": _chosen_by_gear,
    "mlx_lm.models.nemotron-nas": _chosen_by_nemotron_nas,
}


def _with_chosen_activation(method: FunctionType, chosen: Any, quantized: QuantizedOps, log: FallbackLog) -> Function:
    mlp = _Mlp("gate_proj", "up_proj", "down_proj")
    ours = {function: mlp.function(activation, quantized, log) for function, activation in _OF_NN.values()}

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        result: mx.array = ours.get(chosen(self, method.__globals__), method)(self, x)
        return result

    return __call__
