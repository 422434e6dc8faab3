"""The classes that ``patch`` gives to modules, and the way back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.nn as nn

from mlx_anvil.patching._rebind import Function

_MARK = "_mlx_anvil_swap"


@dataclass(frozen=True)
class Swap:
    """Held by a class that ``patch`` made: the class it stands for."""

    original: type[nn.Module]


def swapped_class(original: type[nn.Module], methods: Mapping[str, Function]) -> type[nn.Module]:
    """A subclass with other methods that otherwise passes for the class itself: in name, in ``isinstance``, and in what
    its instances hold. Copies and pickles of an instance are of the original class."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], original.__reduce_ex__(self, protocol))
        return original.__new__, (original,), *state

    body: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": __reduce_ex__,
        _MARK: Swap(original),
    }
    metaclass: Any = type(original)
    return cast(type[nn.Module], metaclass(original.__name__, (original,), body | dict(methods)))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before ``patch``."""
    cls = type(module)
    swap = vars(cls).get(_MARK)
    return swap.original if swap else cls
