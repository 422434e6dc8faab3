"""Routes: methods that are called for every instance of a class, and do for some instances what ``patch`` wrote for them.

A route takes the place of a method in the class that defines it. It looks up the instance by its identity, so nothing is
stored in a module: copies and pickles of it are not patched, and ``type(module)`` is what it was.
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
    """A method of a class, and what some instances run in its place.

    Attributes:
        cls: the class that defines the method.
        name: of the method.
        original: the method.
        functions: by the identity of the instance.
        call: what the class holds.
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
        return vars(self.cls).get(self.name) is self.call


def route_of(function: FunctionType) -> Route | None:
    """The route that a function is. What ``functools.wraps`` made of one has its attributes, but is none."""
    route: Route | None = function.__dict__.get(_MARK)
    return route if route is not None and route.call is function else None


def unrouted(function: FunctionType) -> FunctionType:
    """The method behind a route; any other function as it is."""
    route = route_of(function)
    return function if route is None else route.original


def route_to(cls: type[nn.Module], name: str) -> Route:
    """The route that the class has for a method, or a new one that is not installed."""
    method = vars(cls)[name]
    return route_of(method) or Route(cls, name, method)


_installed: set[Route] = set()


def install(routes: Iterable[Route]) -> None:
    """Puts routes into their classes: all of them, or none and the exception of the class that does not take one."""
    done: list[Route] = []
    try:
        for route in routes:
            if not route.is_installed:
                done.append(route)
                _installed.add(route)
                setattr(route.cls, route.name, route.call)
                if not route.is_installed:
                    raise TypeError(f"{route.cls.__name__}.{route.name} stays what it was")
    except BaseException:
        _remove(done)
        raise


def sweep() -> None:
    """Gives classes their methods back, where no instance needs the route and no other package has put a method there.
    Not where the last instance goes away: that may be in the midst of a ``patch``."""
    _remove(route for route in list(_installed) if not route.functions)


def _remove(routes: Iterable[Route]) -> None:
    for route in routes:
        _installed.discard(route)
        if route.is_installed:
            setattr(route.cls, route.name, route.original)


@dataclass
class _Patched:
    """One patched module: what it runs by which route."""

    reference: weakref.ref[nn.Module]
    functions: Mapping[Route, Function]


_patched: dict[int, _Patched] = {}


def assign(functions: Iterable[tuple[nn.Module, Mapping[Route, Function]]]) -> None:
    """Makes modules run these functions by routes that are installed, and no others: all of the modules, or none. A module
    with no functions has its methods back."""
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
    """A module is gone, and its identity may soon be that of another."""
    entry = _patched.get(key)
    if entry is not None and entry.reference is reference:
        del _patched[key]
        for route in entry.functions:
            route.functions.pop(key, None)
