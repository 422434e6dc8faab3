"""The globals of a copied function: a live view of its module's globals, with some names overridden."""

import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

Current = Callable[[], Any]  # reads what the model's own code would see now

# The interpreter reads these directly, without __missing__.
_OF_THE_INTERPRETER = ("__builtins__", "__name__", "__package__", "__spec__", "__file__")


class Namespace(dict[str, Any]):
    """Holds the overridden names. All other names are looked up in the module's globals at each access.

    Attributes:
        origin: the module's globals.
    """

    origin: dict[str, Any]

    @staticmethod
    def of(origin: dict[str, Any]) -> "Namespace":
        # One class per namespace, because __missing__ is looked up in the class. A method of dict costs no Python call.
        cls: type[Namespace] = type("Namespace", (Namespace,), {"__missing__": origin.__getitem__, "origin": origin})
        return cls({name: origin[name] for name in _OF_THE_INTERPRETER if name in origin})


def live_module(current: Current, ours: dict[str, Any]) -> ModuleType:
    """A live view of a module with some attributes overridden. Assignments go to the module.

    Args:
        current: reads the module.
        ours: the overriding attributes.
    """
    # As in Namespace, attributes are items of a dict, so that reading ours costs no Python call.
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
    """Returns a function that reads an attribute of what ``current`` reads."""
    get = operator.attrgetter(".".join(path))
    return lambda: get(current())


def live(current: Current, original: Callable[..., Any], copy: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the copy as long as the name still refers to ``original``, and else what it refers to now."""

    @functools.wraps(copy)
    def call(*args: Any, **kwargs: Any) -> Any:
        now = current()
        return (copy if now is original else now)(*args, **kwargs)

    return call
