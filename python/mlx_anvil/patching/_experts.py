"""mlx-lm's experts: ``SwitchGLU``, which ``quantized_experts`` computes in one call, with the sum over a token's experts.

Experts that are not quantized, or have LoRA, run in the steps of mlx-lm, with our products and gates.
"""

import functools
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext
from mlx_anvil._quantized_layers import format_of, matrix_of
from mlx_anvil.patching._code import names_of_form, unchanged
from mlx_anvil.patching._left import EXPERTS_MODULE as MODULE
from mlx_anvil.patching._quantized_ops import QuantizedOps
from mlx_anvil.patching._rebind import Call, Function
from mlx_anvil.patching._report import FallbackLog
from mlx_anvil.patching._routes import route_of, unrouted
from mlx_anvil.patching._stand_ins import REPLACED, stand_in, widened

EXPERTS = Call("experts", "SwitchGLU", "quantized_experts")
SORTED_PAIRS = 64  # as in mlx-lm: from here on, pairs of token and expert are sorted by expert

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def is_experts(cls: type[nn.Module], method: FunctionType) -> bool:
    """True for mlx-lm's SwitchGLU, unless another package wrapped its method."""
    return cls.__name__ == "SwitchGLU" and method.__globals__.get("__name__") == MODULE


def has_experts(method: FunctionType) -> bool:
    """True for a method of a module that imports mlx-lm's experts."""
    return any(
        isinstance(method.__globals__.get(name), type) and method.__globals__[name].__module__ == MODULE
        for name in ("SwitchGLU", "SwitchMLP")
    )


def experts(method: FunctionType, quantized: QuantizedOps, log: FallbackLog) -> Function:
    """The ``__call__`` of SwitchGLU. With ``weights``, it returns the weighted sum of the rows, as ``_fused`` does."""
    theirs, in_steps, is_unchanged = _summed_rows(method), _summed_rows(_in_steps), unchanged(method)
    fused = stand_in(EXPERTS.op, theirs, functools.partial(_fused, quantized), log)

    @functools.wraps(method)
    def __call__(self: nn.Module, x: mx.array, indices: mx.array, *sum_and_shared: mx.array | None) -> mx.array:
        if not is_unchanged():
            log.note(EXPERTS.op, REPLACED)
            result: mx.array = theirs(self, x, indices, *sum_and_shared)
        else:
            result = (fused if _is_fused(self) else in_steps)(self, x, indices, *sum_and_shared)
        return result

    return __call__


def summed(
    experts: nn.Module,
    x: mx.array,
    ids: mx.array,
    scores: mx.array | None,
    rounded: bool | mx.Dtype = False,
    shared: Any = None,
    gate: mx.array | None = None,
) -> mx.array:
    """``(experts(x, ids) * scores[..., None]).sum(axis=-2)``, plus what a shared expert made, times a sigmoid's gate.

    Args:
        experts: the layer.
        x: tokens.
        ids: their experts.
        scores: the factors of those; None if each token has one, and the model did not multiply.
        rounded: the dtype of the sum; True for that of the rows, False for the promoted one.
        shared: added to the sum; None adds nothing.
        gate: the logit of its gate; None for no gate.
    """
    if _is_swapped(experts) and _is_fused(experts):
        dtype = _dtype(experts, x)
        wanted = dtype if rounded is True else rounded or mx.result_type(dtype, *([] if scores is None else [scores]))
        if mx.result_type(dtype, wanted) == dtype:
            if scores is None:
                scores = mx.ones(ids.shape, dtype)
            if shared is None or not _fits(shared, gate, ids.shape[:-1], experts):
                total: mx.array = experts(x, ids, scores).astype(wanted)
                return total if shared is None else total + _gated_by(gate, shared)
            result: mx.array = experts(x, ids, scores, shared, gate)
            return result.astype(mx.result_type(wanted, shared))
    rows = experts(x, ids)
    total = rows.squeeze(-2) if scores is None else (rows * scores[..., None]).sum(axis=-2)
    if rounded is not False:
        total = total.astype(rows.dtype if rounded is True else rounded)
    return total if shared is None else total + _gated_by(gate, shared)


def block_and_shared(block: nn.Module, x: mx.array, shared: mx.array) -> mx.array:
    """``block(x) + shared``, where the block is a router, experts and their sum."""
    call = type(block).__call__
    if isinstance(call, FunctionType) and names_of_form(unrouted(call), _block_of_granite) is not None:
        ids, scores = block.router(x)
        return summed(block.switch_mlp, x, ids, scores, False, shared)
    result: mx.array = block(x) + shared
    return result


def _block_of_granite(self: Any, x: mx.array) -> mx.array:
    token_ids, gates = self.router(x)
    y = self.switch_mlp(x, token_ids)
    return (y * gates[..., None]).sum(axis=-2)  # type: ignore[no-any-return]


def _fits(shared: Any, gate: mx.array | None, tokens: tuple[int, ...], experts: nn.Module) -> bool:
    """True if the shared expert has an output for each token, and its gate does not widen it."""
    is_one = isinstance(shared, mx.array) and shared.shape == (*tokens, experts.down_proj["weight"].shape[1])
    return is_one and (gate is None or (gate.shape == (*tokens, 1) and mx.result_type(gate, shared) == shared.dtype))


def _gated_by(gate: mx.array | None, shared: Any) -> Any:
    return shared if gate is None else mx.sigmoid(gate) * shared


def _summed_rows(method: Function) -> Function:
    def call(
        self: nn.Module,
        x: mx.array,
        indices: mx.array,
        weights: mx.array | None = None,
        shared: mx.array | None = None,
        gate: mx.array | None = None,
    ) -> mx.array:
        rows: mx.array = method(self, x, indices)
        if weights is None:
            return rows
        total: mx.array = (rows * weights[..., None]).sum(axis=-2).astype(rows.dtype)
        return total if shared is None else total + _gated_by(gate, shared)

    return call


def _is_swapped(experts: nn.Module) -> bool:
    call = type(experts).__call__
    route = route_of(call) if isinstance(call, FunctionType) else None
    return route is not None and route.cls.__module__ == MODULE and id(experts) in route.functions


# ---- quantized experts -----------------------------------------------------------------------------------------------


def _is_fused(experts: nn.Module) -> bool:
    """True if the projections are plain quantized ones. Asked at every call, because layers can be replaced."""
    gate, up, down = (getattr(experts, name) for name in _PROJECTIONS)
    return (
        all(_is_product(layer) for layer in (gate, up, down))
        and format_of(gate) == format_of(up)
        and gate["weight"].shape == up["weight"].shape
        and _activation(experts.activation) is not None
    )


def _is_product(layer: nn.Module) -> bool:
    return _is_written_in(layer, "QuantizedSwitchLinear", MODULE) and layer.get("global_scale") is None


def _is_written_in(layer: nn.Module, name: str, module: str) -> bool:
    """True for an instance of that class whose ``__call__`` is the one of that module."""
    call = type(layer).__call__
    return (
        type(layer).__name__ == name
        and isinstance(call, FunctionType)
        and unrouted(call).__globals__.get("__name__") == module
        and unrouted(call).__code__.co_name == "__call__"
    )


def _activation(layer: nn.Module) -> dict[str, Any] | None:
    """The options of the activation; None if it is not one of ``gated``."""
    if _is_written_in(layer, "SwiGLU", MODULE) or _is_written_in(layer, "PreciseSwiGLU", "mlx_lm.models.muse_spark"):
        return {"activation": "silu"}
    if _is_written_in(layer, "SwigluOAI", "mlx_lm.models.activations"):
        return {"activation": "swiglu_oai", "limit": layer._limit} if layer._alpha == 1.702 else None
    if _is_written_in(layer, "GeGLU", "mlx_lm.models.gemma4_text"):
        return {"activation": "gelu_tanh"}
    if _is_written_in(layer, "DeepseekV41SwiGLU", "mlx_lm.models.deepseek_v41"):
        return {"activation": "silu", "limit": layer.limit if layer.limit > 0 else None}
    return None


def _dtype(experts: nn.Module, x: mx.array) -> mx.Dtype:
    """The dtype of the rows."""
    dtype = x.dtype
    for name in _PROJECTIONS:
        layer = getattr(experts, name)
        floats = ("scales", "biases", "bias") if layer.get("biases") is not None else ("bias",)
        for array in (layer.get(key) for key in floats):
            dtype = dtype if array is None else mx.result_type(dtype, array.dtype)
    return dtype


def _fused(
    quantized: QuantizedOps,
    self: nn.Module,
    x: mx.array,
    indices: mx.array,
    weights: mx.array | None = None,
    shared: mx.array | None = None,
    gate: mx.array | None = None,
) -> mx.array:
    projections = [getattr(self, name) for name in _PROJECTIONS]
    sides = ("gate_bias", "up_bias", "down_bias")
    biases = {side: layer.get("bias") for side, layer in zip(sides, projections, strict=True)}
    options = format_of(projections[0]) | {f"down_{key}": value for key, value in format_of(projections[2]).items()}
    options |= _activation(self.activation) or {}
    x = widened(x, *biases.values())
    options |= {"shared": shared, "shared_gate": gate}
    of_gate, of_up, of_down = map(matrix_of, projections)
    return quantized.experts(x, indices, weights, of_gate, of_up, of_down, **biases, **options)


# ---- other experts ---------------------------------------------------------------------------------------------------


def _in_steps(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    """What mlx-lm does. The projections are modules with routes of their own."""
    x, indices = mx.expand_dims(x, (-2, -3)), mx.stop_gradient(indices)
    shape, inverse = indices.shape, None
    is_sorted = indices.size >= SORTED_PAIRS
    if is_sorted:
        flat = indices.flatten()
        order = mx.argsort(flat)
        inverse = mx.argsort(order)
        x, indices = x.flatten(0, -3)[order // shape[-1]], flat[order]
    gate = self.gate_proj(x, indices, sorted_indices=is_sorted)
    up = self.up_proj(x, indices, sorted_indices=is_sorted)
    options = _activation(self.activation)
    hidden = self.activation(up, gate) if options is None else _gated(gate, up, options)
    out: mx.array = self.down_proj(hidden, indices, sorted_indices=is_sorted)
    if inverse is not None:
        out = mx.unflatten(out[inverse], 0, shape)
    return out.squeeze(-2)


def _gated(gate: mx.array, up: mx.array, options: dict[str, Any]) -> mx.array:
    return _ext.silu_gate(gate, up) if options == {"activation": "silu"} else _ext.gated(gate, up, **options)
