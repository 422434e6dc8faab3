"""Routes: methods that run another function for patched instances of a class.

A route replaces a method in the class that defines it. It looks up the instance by identity, so a patched module stores
nothing: its copies and pickles are not patched, and ``type(module)`` does not change.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import mlx.nn as nn

Function = Callable[..., Any]

_MARK = "_mlx_anvil_route"


@dataclass(eq=False)
class Route:
    """A method of a class, and the functions that patched instances run instead.

    Attributes:
        cls: the class that defines the method.
        name: name of the method.
        original: the method.
        functions: replacement functions, by the id of the instance.
        call: the function that replaces the method in the class.
    """

    cls: type[nn.Module]
    name: str
    original: FunctionType
    functions: dict[int, Function] = field(default_factory=dict)
    call: FunctionType = field(init=False)

    def __post_init__(self) -> None:
        original, find = self.original, self.functions.get

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                return find(id(args[0]) if args else 0, original)(*args, **kwargs)
            return find(id(args[0]) if args else 0, original)(*args)

        setattr(call, _MARK, self)
        self.call = call  # type: ignore[assignment]

    @property
    def is_installed(self) -> bool:
        """True if the class currently has the route."""
        return vars(self.cls).get(self.name) is self.call


def route_of(function: FunctionType) -> Route | None:
    """The route of a function, or None. A wrapper by ``functools.wraps`` has the attributes of a route, but is none."""
    route: Route | None = function.__dict__.get(_MARK)
    return route if route is not None and route.call is function else None


def unrouted(function: FunctionType) -> FunctionType:
    """The original method of a route; any other function unchanged."""
    route = route_of(function)
    return function if route is None else route.original


def runs(module: nn.Module, method: Function) -> bool:
    """True if the class has this ``__call__``, which may be routed."""
    call = type(module).__call__
    return isinstance(call, FunctionType) and unrouted(call) is method


def route_to(cls: type[nn.Module], name: str) -> Route:
    """The route that the class has for a method, or a new one, which is not installed."""
    method = vars(cls)[name]
    return route_of(method) or Route(cls, name, method)


_installed: set[Route] = set()


def install(routes: Iterable[Route]) -> None:
    """Installs all routes in their classes, or none if a class raises."""
    done: list[Route] = []
    try:
        for route in routes:
            if not route.is_installed:
                done.append(route)
                _installed.add(route)
                setattr(route.cls, route.name, route.call)
                if not route.is_installed:
                    raise TypeError(f"assigning {route.cls.__name__}.{route.name} had no effect")
    except BaseException:
        _remove(done)
        raise


def sweep() -> None:
    """Restores methods whose route no instance needs, unless another package replaced them.

    The deletion of the last instance does not restore them, because that can happen in the middle of a ``patch``.
    """
    _remove(route for route in list(_installed) if not route.functions)


def _remove(routes: Iterable[Route]) -> None:
    for route in routes:
        _installed.discard(route)
        if route.is_installed:
            setattr(route.cls, route.name, route.original)


@dataclass
class _Patched:
    """One patched module, and the function that it runs for each route."""

    reference: weakref.ref[nn.Module]
    functions: Mapping[Route, Function]


_patched: dict[int, _Patched] = {}


def is_patched(module: nn.Module) -> bool:
    """True if the instance runs other functions than its class."""
    return id(module) in _patched


def assign(functions: Iterable[tuple[nn.Module, Mapping[Route, Function]]]) -> None:
    """Sets the functions of all modules, or of none if one fails. An empty mapping restores a module's methods."""
    before: list[tuple[nn.Module, Mapping[Route, Function]]] = []
    try:
        for module, ours in functions:
            entry = _patched.get(id(module))
            before.append((module, {} if entry is None else entry.functions))
            _assign(module, ours)
    except BaseException:
        for module, theirs in before:
            _assign(module, theirs)
        raise
    sweep()


def _assign(module: nn.Module, functions: Mapping[Route, Function]) -> None:
    key = id(module)
    entry = _patched.get(key)
    if functions:
        _patched[key] = _Patched(weakref.ref(module, functools.partial(_forget, key)), functions)
    for route, function in functions.items():
        route.functions[key] = function
    for route in entry.functions if entry else ():
        if route not in functions:
            route.functions.pop(key, None)
    if not functions:
        _patched.pop(key, None)


def _forget(key: int, reference: weakref.ref[nn.Module]) -> None:
    """Removes a deleted module, because another object can get the same id."""
    entry = _patched.get(key)
    if entry is not None and entry.reference is reference:
        del _patched[key]
        for route in entry.functions:
            route.functions.pop(key, None)
