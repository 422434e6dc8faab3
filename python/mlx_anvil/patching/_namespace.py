"""The globals of a copied function: those of its module, as they are when they are read, with ours among them."""

import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

Current = Callable[[], Any]  # reads what the model's own code would find now

# Read by the interpreter itself, which does not ask __missing__.
_OF_THE_INTERPRETER = ("__builtins__", "__name__", "__package__", "__spec__", "__file__")


class Namespace(dict[str, Any]):
    """Holds what differs from the module's globals; all other names are looked up there, each time.

    Attributes:
        origin: the module's globals.
    """

    origin: dict[str, Any]

    @staticmethod
    def of(origin: dict[str, Any]) -> "Namespace":
        # A class of its own, for __missing__ is looked up in the class: a method of the dict itself costs no Python call.
        cls = type("Namespace", (Namespace,), {"__missing__": origin.__getitem__, "origin": origin})
        return cls({name: origin[name] for name in _OF_THE_INTERPRETER if name in origin})


class LiveModule(ModuleType):
    """A module with functions of ours in it; all else is that of the module, when it is read or assigned.

    Args:
        current: reads the module.
        ours: what it has in their place.
    """

    def __init__(self, current: Current, ours: dict[str, Any]) -> None:
        super().__init__(current().__name__)
        vars(self).clear()
        vars(self).update(ours)
        vars(self)["__getattr__"] = lambda name: getattr(current(), name)
        vars(self)["__dir__"] = lambda: dir(current())
        object.__setattr__(self, "_current", current)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_current"](), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_current"](), name)


def attribute(current: Current, *path: str) -> Current:
    """Reads an attribute of what ``current`` reads."""
    get = operator.attrgetter(".".join(path))
    return lambda: get(current())


def live(current: Current, original: Callable[..., Any], copy: Callable[..., Any]) -> Callable[..., Any]:
    """The copy of a function, for as long as the module has that function."""

    @functools.wraps(copy)
    def call(*args: Any, **kwargs: Any) -> Any:
        now = current()
        return (copy if now is original else now)(*args, **kwargs)

    return call
