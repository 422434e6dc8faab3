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
        cls: type[Namespace] = type("Namespace", (Namespace,), {"__missing__": origin.__getitem__, "origin": origin})
        return cls({name: origin[name] for name in _OF_THE_INTERPRETER if name in origin})


def live_module(current: Current, ours: dict[str, Any]) -> ModuleType:
    """A module with functions of ours in it; all else is that of the module, when it is read or assigned.

    Args:
        current: reads the module.
        ours: what it has in their place.
    """
    # As in Namespace: attributes are the items of a dict, found with no Python call where they are ours.
    missing = {"__missing__": staticmethod(lambda name: getattr(current(), name))}
    attributes = type("Attributes", (dict,), missing)(ours)
    body = {
        "__getattribute__": attributes.__getitem__,
        "__setattr__": lambda self, name, value: setattr(current(), name, value),
        "__delattr__": lambda self, name: delattr(current(), name),
    }
    module: ModuleType = type("LiveModule", (ModuleType,), body)(current().__name__)
    return module


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
