"""Quantized layers of a patched model. Those of one module that get the same input share one node of the graph.

An attention calls its projections of q, k and v with one array, and other modules have such layers too. Which layers
those are is learned from the calls (csrc/quantized_matmul/shared_input.h).
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext
from mlx_anvil._quantized_layers import format_of
from mlx_anvil.patching._quantized_ops import QuantizedOps
from mlx_anvil.patching._rebind import Function
from mlx_anvil.patching._routes import runs

# As they are on import, before another package replaces them.
_LINEAR = nn.QuantizedLinear.__call__
_MATMUL = mx.quantized_matmul

_MOST_LAYERS = 32  # of one _ext._QuantizedLayers


def is_quantized_linear(module: object) -> bool:
    """True for a quantized layer that runs the method of MLX."""
    return isinstance(module, nn.QuantizedLinear) and runs(module, _LINEAR)


def siblings(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """The quantized layers among the modules' attributes, each once, by module, format and width of their input."""
    seen: set[int] = set()
    for parent in modules:
        groups: dict[Any, list[nn.Module]] = defaultdict(list)
        for child in parent.values():
            if is_quantized_linear(child) and id(child) not in seen:
                seen.add(id(child))
                columns = child["weight"].shape[-1] * 32 // child.bits
                groups[columns, tuple(format_of(child).values())].append(child)
        for group in groups.values():
            yield from (group[at : at + _MOST_LAYERS] for at in range(0, len(group), _MOST_LAYERS))


def linear_functions(layers: list[nn.Module], quantized: QuantizedOps) -> Iterator[Callable[[Function], Function]]:
    """For each of these siblings a factory of its function, from the copy of MLX's method. That runs what needs its
    checks.
    """
    if layers:
        references = [weakref.ref(layer) for layer in layers]
        options = format_of(layers[0]) | {"activation_bits": quantized.activation_bits}
        shared = _ext._QuantizedLayers(references, **options)
        for index in range(len(layers)):
            yield functools.partial(_linear, index, shared.multiply)


def _linear(index: int, multiply: Any, ours: Function) -> Function:
    globals_of_mlx = _LINEAR.__globals__

    @functools.wraps(ours)
    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        y = multiply(index, self, x) if globals_of_mlx["mx"].quantized_matmul is _MATMUL else None
        if y is None:
            y = ours(self, x)
        elif "bias" in self:
            y = y + self["bias"]
        result: mx.array = y
        return result

    return __call__
