"""What ``patch`` leaves alone whatever its options, and why: calls of the kinds that it is about, with no op for them."""

import re
from collections.abc import Iterator, Mapping
from types import FunctionType

import mlx.nn as nn

from mlx_anvil.patching._code import code_names

NO_EXPERTS = "no kernel for products with the weights of chosen experts yet"
OTHER_ACTIVATION = "no kernel for this activation"
OTHER_SILU = "not in the form down(silu(gate(x)) * up(x)), or inside a compiled function"
OWN_ROUTER = "written out in the model's own code; softmax_topk computes it in one kernel"
RECURRENCE = "a recurrence, not attention: no kernel"
OWN_SOFTMAX = "attention written out in the model's own code"

_ACTIVATION = re.compile(r"gelu|glu|silu|relu|xielu")
_RECURRENT = re.compile(r"(Mamba\w*Mixer|Mamba2?Block|Delta\w+|LinearAttention|TimeMixing|RecurrentBlock)$")
_ROUTER = {"argpartition", "argsort", "topk", "mlx_topk"}


def is_of_experts(cls: type[nn.Module]) -> bool:
    """Whether modules of the class, and all in them, are left alone: mlx-lm's products with the weights of chosen experts,
    whose activation may be one object for every model."""
    return cls.__module__ == "mlx_lm.models.switch_layers"


def reasons(cls: type[nn.Module], methods: Mapping[str, FunctionType]) -> Iterator[tuple[str, str, str]]:
    """What methods call, our op for it or an empty string, and why it stays; ``methods`` are those that will not change."""
    if is_of_experts(cls):
        yield cls.__name__, "", NO_EXPERTS
        return
    names: set[str] = set()
    for method in methods.values():
        names |= code_names(method.__code__)
    for name in sorted(names & {"gather_qmm", "gather_mm"}):
        yield f"mx.{name}", "", NO_EXPERTS
    for name in sorted(filter(_ACTIVATION.search, names - {"swiglu"})):
        if any(_calls_by_name(method, name) for method in methods.values()):
            yield name, "", OTHER_SILU if "silu" in name else OTHER_ACTIVATION
    if "softmax" in names and names & _ROUTER:
        yield "router", "softmax_topk", OWN_ROUTER
    elif "softmax" in names and "rope" in names and "scaled_dot_product_attention" not in names:
        yield "attention", "", OWN_SOFTMAX
    if _RECURRENT.search(cls.__name__) and "scaled_dot_product_attention" not in names:
        yield cls.__name__, "", RECURRENCE


def _calls_by_name(method: FunctionType, name: str) -> bool:
    """Whether a name in the method's code is a function of ``mlx.nn`` or of the method's module, not an attribute."""
    names = code_names(method.__code__)
    is_of_nn = method.__globals__.get("nn") is nn and "nn" in names and hasattr(nn, name)
    return name in names and (is_of_nn or callable(method.__globals__.get(name)))
