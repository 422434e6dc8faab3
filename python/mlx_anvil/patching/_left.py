"""What ``patch`` leaves alone, and why: kinds of calls that its options name and no op of ours computes."""

from collections.abc import Mapping
from types import FunctionType

import mlx.nn as nn

from mlx_anvil.patching._rebind import Call, code_names


def experts(module: nn.Module) -> bool:
    """Whether the module and all in it are left alone: mlx-lm's products with the weights of chosen experts, whose
    activation may be one object for every model."""
    return type(module).__module__ == "mlx_lm.models.switch_layers"


def reasons(cls: type[nn.Module], methods: Mapping[str, FunctionType]) -> list[tuple[Call, str]]:
    """Rows of a class that do not depend on the options."""
    names = set().union(*(code_names(method.__code__) for method in methods.values())) if methods else set()
    left = []
    if cls.__module__ == "mlx_lm.models.switch_layers":
        left.append((Call("quantized", cls.__name__, ""), "no kernel for products with chosen experts yet"))
    elif names & {"gather_qmm", "gather_mm"}:
        left.append((Call("quantized", "mx.gather_qmm", ""), "no kernel for products with chosen experts yet"))
    return left
