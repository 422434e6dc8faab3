"""Sharded layers of ``mlx.nn``: what the row-sharded ones run, and how those that ``model.shard()`` makes are patched.

``shard()`` replaces linear layers by new ones. In a patched model the new layer is patched as the old one was, so that
``patch`` and ``shard`` may come in either order.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._overlap import product_all_sum
from mlx_anvil._quantized_layers import format_of
from mlx_anvil.patching._quantized_ops import QuantizedOps
from mlx_anvil.patching._rebind import Call, Function
from mlx_anvil.patching._report import FallbackLog
from mlx_anvil.patching._stand_ins import QUANTIZED_MATMUL, stand_in

SUMMED_PRODUCT = Call("sharded", "x @ w.T, all_sum", "matmul_all_sum")
SUMMED_QUANTIZED_PRODUCT = Call("sharded", "quantized_matmul, all_sum", QUANTIZED_MATMUL.op)

# MLX's functions as they are on import, before another package replaces them.
_DENSE = nn.ShardedToAllLinear.__call__
_QUANTIZED = nn.QuantizedShardedToAllLinear.__call__


def products_of_shards(method: FunctionType, quantized: QuantizedOps, log: FallbackLog) -> tuple[Call, Function] | None:
    """The call and the replacement of a row-sharded layer's ``__call__``; None for other methods."""
    if method is _DENSE:
        return SUMMED_PRODUCT, _dense
    return (
        (SUMMED_QUANTIZED_PRODUCT, _quantized(quantized, log)) if quantized.swapped and method is _QUANTIZED else None
    )


def _dense(self: nn.Module, x: mx.array) -> mx.array:
    weight = self["weight"]
    return _with_bias(self, product_all_sum(lambda rows: rows @ weight.T, x, weight.shape[0], group=self.group))


def _quantized(quantized: QuantizedOps, log: FallbackLog) -> Function:
    # Only the product may fall back. The sums have to be the same in every process, even if one has no kernel.
    product = stand_in(QUANTIZED_MATMUL.op, mx.quantized_matmul, quantized.matmul, log)

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        matrix, options = (self["weight"], self["scales"], self.get("biases")), format_of(self)

        def of_rows(rows: mx.array) -> mx.array:
            result: mx.array = product(rows, *matrix, transpose=True, **options)
            return result

        return _with_bias(self, product_all_sum(of_rows, x, self["weight"].shape[0], group=self.group))

    return __call__


def _with_bias(layer: nn.Module, y: mx.array) -> mx.array:
    return y + layer["bias"] if "bias" in layer else y


# ---- layers made from patched ones -----------------------------------------------------------------------------------

_MAKERS = (
    (nn.AllToShardedLinear, "from_linear"),
    (nn.ShardedToAllLinear, "from_linear"),
    (nn.QuantizedAllToShardedLinear, "from_quantized_linear"),
    (nn.QuantizedShardedToAllLinear, "from_quantized_linear"),
)

Adopt = Callable[[nn.Module], None]


@dataclass(frozen=True)
class _Source:
    """A linear layer of a patched model, and what patches a layer made from it."""

    reference: weakref.ref[nn.Module]
    adopt: Adopt


_sources: dict[int, _Source] = {}
_installed: dict[tuple[type[nn.Module], str], tuple[Any, Any]] = {}  # the class method of MLX, and ours


def bequeath(modules: Iterable[nn.Module], adopt: Adopt) -> None:
    """Has layers that are later made from the linear ones of these adopted."""
    for module in modules:
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            key = id(module)
            _sources[key] = _Source(weakref.ref(module, functools.partial(_forget, key)), adopt)
    if _sources:
        _install()


def disinherit(modules: Iterable[nn.Module]) -> None:
    """Undoes ``bequeath``."""
    for module in modules:
        _sources.pop(id(module), None)
    if not _sources:
        _uninstall()


def inherit(source: nn.Module, made: nn.Module) -> None:
    """Patches a layer that was made from another one, if that one is patched."""
    entry = _sources.get(id(source))
    if entry is not None and entry.reference() is source:
        entry.adopt(made)


def _forget(key: int, reference: weakref.ref[nn.Module]) -> None:
    """Removes a deleted layer, because another object can get the same id."""
    entry = _sources.get(key)
    if entry is not None and entry.reference is reference:
        del _sources[key]


def _install() -> None:
    for place in _MAKERS:
        cls, name = place
        if place not in _installed or vars(cls)[name] is not _installed[place][1]:
            theirs = vars(cls)[name]
            _installed[place] = theirs, classmethod(_inheriting(theirs.__func__))
            setattr(cls, name, _installed[place][1])


def _uninstall() -> None:
    for (cls, name), (theirs, ours) in _installed.items():
        if vars(cls)[name] is ours:
            setattr(cls, name, theirs)
    _installed.clear()


def _inheriting(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(make)
    def made(cls: type[nn.Module], layer: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        result = make(cls, layer, *args, **kwargs)
        inherit(layer, result)
        return result

    return made
