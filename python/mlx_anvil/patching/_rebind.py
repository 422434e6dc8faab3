"""Copies functions so that they call our ops: the same code, with other globals.

A method looks up ``scaled_dot_product_attention`` or ``mx`` in the globals of its module. Changing those would affect
every model of that architecture. Instead, a copy of the method has its own namespace
(:mod:`~mlx_anvil.patching._namespace`), in which these names refer to our functions.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import mlx.core as mx

from mlx_anvil.patching._code import code_names, contents, obstacle
from mlx_anvil.patching._namespace import Current, Namespace, attribute, live, live_module

Function = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """A function that models call, and the op that can replace it.

    Attributes:
        option: the argument of ``patch`` that enables the replacement.
        what: name of the function in the report. If it begins with ``mx.``, it is also an attribute path in
            ``mlx.core``.
        op: name of our op; empty for what a report does not name.
    """

    option: str
    what: str
    op: str


@dataclass(frozen=True)
class StandIn:
    """A function that models call, and a factory of its replacement."""

    original: Function
    make: Callable[[Current], Function]


@dataclass(frozen=True)
class Reach:
    """The calls that a function makes, itself or through functions that it names.

    Attributes:
        calls: calls that a copy of the function replaces.
        left: calls inside functions that cannot be copied, with the reason.
    """

    calls: frozenset[Call]
    left: Mapping[Call, str]


def attribute_path(call: Call) -> list[str]:
    """``["fast", "rope"]`` for ``mx.fast.rope``; empty if the function is not MLX's."""
    return call.what.split(".")[1:]


class Rebinder:
    """Copies functions so that they call other functions.

    Args:
        stand_ins: the replacement of each call.
    """

    def __init__(self, stand_ins: Mapping[Call, StandIn]) -> None:
        self._calls = {id(stand_in.original): call for call, stand_in in stand_ins.items()}
        self._stand_ins = stand_ins
        self._reached: dict[FunctionType, Reach] = {}
        self._copies: dict[FunctionType, FunctionType] = {}
        self._namespaces: dict[int, Namespace] = {}

    def reach(self, function: FunctionType) -> Reach:
        """The calls of the function that have a stand-in."""
        if function not in self._reached:
            calls, left = self._search(function)
            self._reached[function] = Reach(frozenset(calls), {c: why for c, why in left.items() if c not in calls})
        return self._reached[function]

    def _search(self, function: FunctionType) -> tuple[set[Call], dict[Call, str]]:
        calls: set[Call] = set()
        left: dict[Call, str] = {}
        reached: set[tuple[FunctionType, str]] = set()
        waiting = [(function, "")]
        while waiting:
            function, why = waiting.pop()
            if (function, why) in reached:
                continue
            reached.add((function, why))
            why = why or obstacle(function)
            for value, names in _named(function):
                for call in self._calls_of(value, names):
                    if why:
                        left[call] = why
                    else:
                        calls.add(call)
                if isinstance(value, FunctionType):
                    waiting.append((value, why))
        return calls, left

    def _calls_of(self, value: Any, names: set[str]) -> Iterator[Call]:
        """The call that a value is; for ``mx`` and ``mx.fast``, the calls whose attribute names the code uses."""
        if id(value) in self._calls:
            yield self._calls[id(value)]
        elif value is mx or value is mx.fast:
            for call in self._calls.values():
                path = attribute_path(call)
                if path and names.issuperset(path[-1:] if value is mx.fast else path):
                    yield call

    def rebound(self, function: FunctionType) -> FunctionType:
        """A copy of the function that calls the stand-ins."""
        if function in self._copies:
            return self._copies[function]
        namespace = self._namespace(function.__globals__)
        # A replaced closure variable gets a new cell, filled below, because it may hold the function itself.
        own = {i: cell for i, cell in enumerate(function.__closure__ or ()) if self._is_replaced(contents(cell))}
        cells = tuple(CellType() if i in own else cell for i, cell in enumerate(function.__closure__ or ()))
        copy = FunctionType(
            function.__code__, namespace, function.__name__, function.__defaults__, cells if cells else None
        )
        self._copies[function] = copy
        copy.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(copy, function)
        origin = namespace.origin
        for name in code_names(function.__code__):
            if name in origin and name not in namespace and self._is_replaced(origin[name]):
                namespace[name] = self._replacement(origin[name], functools.partial(origin.get, name))
        for i, cell in own.items():
            cells[i].cell_contents = self._replacement(contents(cell), functools.partial(contents, cell))
        return copy

    def _namespace(self, globals_: dict[str, Any]) -> Namespace:
        """The namespace of a module, which all copies of its functions share."""
        if id(globals_) not in self._namespaces:
            self._namespaces[id(globals_)] = Namespace.of(globals_)
        return self._namespaces[id(globals_)]

    def _is_replaced(self, value: Any) -> bool:
        if isinstance(value, FunctionType) and id(value) not in self._calls:
            return not obstacle(value) and bool(self.reach(value).calls)
        return id(value) in self._calls or value is mx or value is mx.fast

    def _replacement(self, value: Any, current: Current) -> Any:
        if id(value) in self._calls:
            return self._stand_ins[self._calls[id(value)]].make(current)
        if isinstance(value, FunctionType):
            return live(current, value, self.rebound(value))
        fast = {
            path[-1]: stand_in.make(attribute(current, *path[-1:] if value is mx.fast else path))
            for call, stand_in in self._stand_ins.items()
            if (path := attribute_path(call))[:1] == ["fast"]
        }
        if value is mx.fast:
            return live_module(current, fast)
        ours = {
            path[0]: stand_in.make(attribute(current, *path))
            for call, stand_in in self._stand_ins.items()
            if len(path := attribute_path(call)) == 1
        }
        return live_module(current, ours | {"fast": live_module(attribute(current, "fast"), fast)})


def _named(function: FunctionType) -> Iterator[tuple[Any, set[str]]]:
    """Values of the globals and closure variables of a function, each with all names that the function uses."""
    names = code_names(function.__code__)
    for name in names:
        if name in function.__globals__:
            yield function.__globals__[name], names
    for cell in function.__closure__ or ():
        yield contents(cell), names
