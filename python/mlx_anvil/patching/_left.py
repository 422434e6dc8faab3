"""Calls that ``patch`` cannot swap, because there is no op for them, and the reasons that its report gives."""

import dis
import re
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import mlx.nn as nn

from mlx_anvil import _ext
from mlx_anvil.patching._code import code_names, nested_code
from mlx_anvil.patching._recurrences import OPS as _OPS
from mlx_anvil.patching._routers import is_router

EXPERTS_MODULE = "mlx_lm.models.switch_layers"
OTHER_ACTIVATION = "no kernel for this activation"
NO_GATE = "no kernel for an activation without a gate"
OTHER_FORM = "not in the form down({name}(gate(x)) * up(x)), or inside a compiled function"
CLAMPS_AFTER = "in layers with a limit, which clamp the result of SiLU: no kernel"
OWN_ROUTER = "written out in the model's own code; softmax_topk computes it in one kernel"
OTHER_ROUTER = "chooses experts with a bias, by groups or by a mask, in the model's own code"
CHOICE_OF_KEYS = "the choice of a sparse attention: no kernel"
RECURRENCE = "a recurrence, not attention: no kernel"
OWN_SOFTMAX = "attention written out in the model's own code"

_ACTIVATION = re.compile(r"gelu|glu|silu|relu|xielu")
_RECURRENT = re.compile(r"(Mamba\w*Mixer|Mamba2?Block|Delta\w+|LinearAttention|TimeMixing|RecurrentBlock)$")
_RECURRENCES = {"ssm_update", "ssm_step", "gated_delta_update", "recurrent_gla", "rnn_scan"}
_CHOICE = {"argpartition", "topk", "mlx_topk", "expert_routing"}
_SWAPPED = {"swiglu", "precise_swiglu", "swiglu_oai", "geglu"}
_EXPERTS = {"experts", "switch_mlp"}
_CLAMPED = {"clamped_swiglu": CLAMPS_AFTER}  # Step 3.5
_SCORES = {"softmax", "sigmoid"}
_OTHER_CHOICE = re.compile(r"(expert|correction|router)_bias|biased|group_(scores|idx)|^put_along_axis$")


def is_of_experts(cls: type[nn.Module]) -> bool:
    """True for mlx-lm's experts, their projections and their usual activation."""
    return cls.__module__ == EXPERTS_MODULE


def is_shared(cls: type[nn.Module]) -> bool:
    """True for that activation, a single object that the experts of all models may share."""
    return is_of_experts(cls) and cls.__name__ == "SwiGLU"


def is_activation_of_experts(cls: type[nn.Module]) -> bool:
    """True for an activation of a model's own. One of ``switch_layers`` or ``mlx.nn`` may be shared by all models."""
    return cls.__module__.startswith("mlx_lm.models.") and not is_of_experts(cls)


def reasons(cls: type[nn.Module], methods: Mapping[str, FunctionType]) -> Iterator[tuple[str, str, str]]:
    """Yields what the methods call, the op for it or an empty string, and why it is not swapped."""
    if is_of_experts(cls):
        return
    names: set[str] = set()
    for method in methods.values():
        names |= code_names(method.__code__)
    for name in sorted(filter(_ACTIVATION.search, names - _SWAPPED)):
        if callers := [method for method in methods.values() if _calls_by_name(method, name)]:
            yield name, "", _CLAMPED.get(name) or _why_not_fused(name, callers)
    yield from _choices_and_attention(methods)
    is_attention = "scaled_dot_product_attention" in names
    is_recurrent = names & _RECURRENCES or (_RECURRENT.search(cls.__name__) and not is_attention)
    if is_recurrent and not any(map(_calls_op, _with_helpers(methods.values()))):
        yield cls.__name__, "", RECURRENCE


def _calls_op(function: FunctionType) -> bool:
    """True if the model's own code calls one of our recurrences, by its name or as an attribute of a module."""
    names = code_names(function.__code__)
    ours = {name: getattr(_ext, name) for name in _OPS}
    values = [function.__globals__.get(name) for name in names]
    return any(
        any(value is op for op in ours.values())
        or (isinstance(value, ModuleType) and any(getattr(value, name, None) is ours[name] for name in names & _OPS))
        for value in values
    )


def _why_not_fused(activation: str, callers: Iterable[FunctionType]) -> str:
    if activation not in ("gelu", "gelu_approx", "relu2") and "silu" not in activation:
        return OTHER_ACTIVATION
    if not any(map(_multiplies, callers)):
        return NO_GATE
    return OTHER_FORM.format(name=activation.strip("_"))


def _multiplies(function: FunctionType) -> bool:
    products = ("BINARY_MULTIPLY", "INPLACE_MULTIPLY")  # of Python 3.10; later BINARY_OP
    return "multiply" in code_names(function.__code__) or any(
        instruction.opname in products or (instruction.opname == "BINARY_OP" and "*" in instruction.argrepr)
        for code in nested_code(function.__code__)
        for instruction in dis.get_instructions(code)
    )


def _choices_and_attention(methods: Mapping[str, FunctionType]) -> Iterator[tuple[str, str, str]]:
    """Routers and attention in the methods and in their helper functions, which are often compiled."""
    names: set[str] = set()
    variables: set[str] = set()
    for function in _with_helpers(methods.values()):
        names |= code_names(function.__code__)
        variables |= {name for code in nested_code(function.__code__) for name in code.co_varnames}
    if names >= {"softmax", "rope"}:
        yield "attention", "", OWN_SOFTMAX
        return
    # argmax, then a mask over the scores, chooses one expert after the other.
    if names & _CHOICE or names >= {"argmax", "put_along_axis", "softmax"}:
        if "rope" not in names and names & (_SCORES | _EXPERTS):
            is_other = any(map(_OTHER_CHOICE.search, names | variables))
            yield "router", *(("", OTHER_ROUTER) if is_other else ("softmax_topk", OWN_ROUTER))
        else:
            yield "choice of keys", "", CHOICE_OF_KEYS


def _with_helpers(methods: Iterable[FunctionType]) -> list[Any]:
    """The functions, and those of their module that they name, including results of ``mx.compile``."""
    found: list[Any] = list(methods)
    for function in found:  # grows
        for name in code_names(function.__code__):
            value: Any = function.__globals__.get(name)
            is_own = getattr(value, "__globals__", None) is function.__globals__ and not is_router(value)
            if is_own and not any(value is f for f in found):
                found.append(value)
    return found


def _calls_by_name(method: FunctionType, name: str) -> bool:
    """True if the name refers to a function of ``mlx.nn`` or of the method's module, not to an attribute."""
    names = code_names(method.__code__)
    is_of_nn = method.__globals__.get("nn") is nn and "nn" in names and hasattr(nn, name)
    return name in names and (is_of_nn or callable(method.__globals__.get(name)))
