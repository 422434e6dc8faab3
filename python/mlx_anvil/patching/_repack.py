"""``patch(repack=True)``: stores scales and biases of quantized layers in 16 bits, where that changes no value.

The products on the CPU read them as they are beside float32 inputs. A repacked layer is known by its identity, as a
patched one is: it stores nothing but its arrays.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil.patching._code import code_names
from mlx_anvil.patching._left import EXPERTS_MODULE
from mlx_anvil.patching._routes import unrouted

Change = tuple[nn.Module, dict[str, mx.array]]  # a layer, and its arrays by name

_HALVES = (mx.bfloat16, mx.float16)  # numbers of bfloat16 may all be of float16, too; few are the other way round
_NAMES = ("scales", "biases")
_CLASSES = (nn.QuantizedLinear, nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear)
_CLASSES_BY_NAME = (
    ("mlx_anvil.nn", "QuantizedLinear"),
    ("mlx_anvil.nn", "QuantizedSwitchLinear"),
    (EXPERTS_MODULE, "QuantizedSwitchLinear"),
)

_repacked: dict[int, weakref.ref[nn.Module]] = {}


def is_experts_layer(cls: type[nn.Module]) -> bool:
    """True for quantized linear layers with a matrix for each expert."""
    return cls.__name__ == "QuantizedSwitchLinear"


def is_repacked(module: nn.Module) -> bool:
    """True if the layer has arrays of 16 bits by ``patch``."""
    reference = _repacked.get(id(module))
    return reference is not None and reference() is module and _has_halves(module)


def _has_halves(module: nn.Module) -> bool:
    return "scales" in module and module["scales"].dtype in _HALVES


def changes(modules: Sequence[nn.Module], runs_ours: Callable[[nn.Module], bool]) -> list[Change]:
    """The changes after which the layers of a model have 16 bits where they can, and otherwise what they had before.

    Args:
        modules: all modules of the model, each once.
        runs_ours: whether the products of a quantized layer are ours; False for all takes every repacking back.
    """
    layers = {id(module): module for module in _layers(modules, runs_ours)}
    found: list[Change] = []
    done: dict[tuple[int, int], list[mx.array] | None] = {}  # layers that share arrays go on sharing them
    for module in modules:
        wanted = id(module) in layers
        if wanted == is_repacked(module):
            continue
        pair = [module[name] for name in _NAMES]
        key = id(pair[0]), id(pair[1])
        if key not in done:
            done[key] = _exact_halves(pair) if wanted else [array.astype(mx.float32) for array in pair]
        if (arrays := done[key]) is not None:
            mx.eval(arrays)
            found.append((module, dict(zip(_NAMES, arrays, strict=True))))
    return found


def make(found: Iterable[Change]) -> None:
    """Makes the changes."""
    for module, arrays in found:
        module.update(arrays)
        key = id(module)
        if _has_halves(module):
            _repacked[key] = weakref.ref(module, functools.partial(_forget, key))
        else:
            _repacked.pop(key, None)


def _forget(key: int, reference: weakref.ref[nn.Module]) -> None:
    """Removes a deleted layer, because another object can get the same id."""
    if _repacked.get(key) is reference:
        del _repacked[key]


def _layers(modules: Sequence[nn.Module], runs_ours: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The layers that may have 16 bits. None if other parameters are not float32: inputs of layers may not be, either,
    and then the scales decide on the dtype of results.
    """
    if mx.default_device() != mx.cpu:
        return []
    owners = {cls for cls in {type(module) for module in modules} if _dequantizes(cls)}
    dequantized = {id(child) for module in modules if type(module) in owners for child in module.values()}
    layers = [m for m in modules if _is_affine(m) and id(m) not in dequantized and runs_ours(m)]
    own = {id(layer) for layer in layers}
    others: set[int] = set()
    for module in modules:
        for name, value in module.items():
            if not isinstance(value, mx.array):
                continue
            if not (name in _NAMES and id(module) in own):
                others.add(id(value))
            is_repacked_one = name in _NAMES and is_repacked(module)
            if mx.issubdtype(value.dtype, mx.floating) and value.dtype != mx.float32 and not is_repacked_one:
                return []
    return [layer for layer in layers if not others.intersection(id(layer[name]) for name in _NAMES)]


def _is_affine(module: nn.Module) -> bool:
    """True for frozen quantized linear layers with biases, but no subclasses of them."""
    cls = type(module)
    is_linear = cls in _CLASSES or (cls.__module__, cls.__name__) in _CLASSES_BY_NAME
    if not is_linear or module.get("biases") is None:
        return False
    trainable = module.trainable_parameters()  # type: ignore[no-untyped-call]
    return not any(name in trainable for name in _NAMES)


def _dequantizes(cls: type[nn.Module]) -> bool:
    """True for modules that may dequantize a layer in them, to the dtype of its scales, as LoRA does when it fuses."""
    values = [value for base in cls.__mro__[: cls.__mro__.index(nn.Module)] for value in vars(base).values()]
    methods = [value for value in values if isinstance(value, FunctionType)]
    return any({"dequantize", "scales"} <= code_names(unrouted(method).__code__) for method in methods)


def _exact_halves(arrays: Sequence[mx.array]) -> list[mx.array] | None:
    """The arrays in the first 16-bit dtype that has all of their values; None if none has."""
    for dtype in _HALVES:
        halves = [array.astype(dtype) for array in arrays]
        same = [mx.array_equal(half.astype(mx.float32), a) for half, a in zip(halves, arrays, strict=True)]
        if all(bool(equal.item()) for equal in same):
            return halves
    return None
