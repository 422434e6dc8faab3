"""Functions that call ours: copies of functions, of the same code, whose global names lead elsewhere.

A method finds ``scaled_dot_product_attention`` or ``mx`` among the globals of the module that it was written in. To change
those would change every model of that architecture. A copy of the method with globals of its own changes one class of
one patched model: nothing is looked up at run time, so threads, ``mx.compile`` and ``mx.checkpoint`` see plain functions.
"""

import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import mlx.core as mx

Function = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """A function that models call, and the op that can stand in for it.

    Attributes:
        option: the argument of ``patch`` that decides.
        what: the function as the report names it. What begins with ``mx.`` is also found as an attribute of
            ``mlx.core``.
        op: name of our op.
    """

    option: str
    what: str
    op: str


def code_names(code: CodeType) -> set[str]:
    """Global names and attributes that a function and those inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= code_names(constant)
    return names


def writes_globals(code: CodeType) -> bool:
    """Whether the function assigns to a name of its module, which a copy's own globals would keep from the module."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in dis.get_instructions(code)) or any(
        map(writes_globals, inner)
    )


def attribute_path(call: Call) -> list[str]:
    """``["fast", "rope"]`` for ``mx.fast.rope``; empty for a function that is not MLX's."""
    return call.what.split(".")[1:]


class Rebinder:
    """Copies functions so that they call other functions.

    Args:
        stand_ins: of each call, the function that models call and the one to be called in its place.
    """

    def __init__(self, stand_ins: Mapping[Call, tuple[Function, Function]]) -> None:
        self._calls = {id(original): call for call, (original, _) in stand_ins.items()}
        self._ours = {id(original): ours for original, ours in stand_ins.values()}
        self._proxies = _proxies(stand_ins)
        self._found: dict[FunctionType, frozenset[Call]] = {}
        self._copies: dict[FunctionType, FunctionType] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}

    def calls(self, function: FunctionType) -> frozenset[Call]:
        """What the function calls that there is a stand-in for, by itself or through functions that it names."""
        if function not in self._found:
            self._found[function] = frozenset()  # for functions that call each other
            found: set[Call] = set()
            names = code_names(function.__code__)
            for value in _named(function, names):
                if id(value) in self._calls:
                    found.add(self._calls[id(value)])
                elif id(value) in self._proxies:
                    for call in self._calls.values():
                        path = attribute_path(call)
                        if path and names.issuperset(path[-1:] if value is mx.fast else path):
                            found.add(call)
                elif isinstance(value, FunctionType):
                    found |= self.calls(value)
            self._found[function] = frozenset(found)
        return self._found[function]

    def rebound(self, function: FunctionType) -> FunctionType:
        """The copy that calls the stand-ins, for a function with ``calls``."""
        if function in self._copies:
            return self._copies[function]
        copy = FunctionType(
            function.__code__,
            self._namespace(function.__globals__),
            function.__name__,
            function.__defaults__,
            function.__closure__ and tuple(map(self._cell, function.__closure__)),
        )
        self._copies[function] = copy
        copy.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(copy, function)
        for name in code_names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType) and self.calls(value):
                copy.__globals__[name] = self.rebound(value)
        return copy

    def _namespace(self, globals_: dict[str, Any]) -> dict[str, Any]:
        """A copy of a module's names with the stand-ins among them, one for all its functions."""
        if id(globals_) not in self._namespaces:
            self._namespaces[id(globals_)] = {name: self._replaced(value) for name, value in globals_.items()}
        return self._namespaces[id(globals_)]

    def _replaced(self, value: Any) -> Any:
        return self._proxies.get(id(value)) or self._ours.get(id(value)) or value

    def _cell(self, cell: CellType) -> CellType:
        """What a decorator wrapped is in a cell of the wrapper."""
        value = _contents(cell)
        if isinstance(value, FunctionType) and self.calls(value):
            return CellType(self.rebound(value))
        return CellType(self._replaced(value)) if id(value) in self._ours else cell


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _named(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """Values of the global names that a function uses, and of its closure."""
    for name in names:
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        yield _contents(cell)


def _proxies(stand_ins: Mapping[Call, tuple[Function, Function]]) -> dict[int, ModuleType]:
    """``mlx.core`` and ``mlx.core.fast`` with our ops in them, by the identity of the modules they stand for."""
    core, fast = ModuleType("mlx.core"), ModuleType("mlx.core.fast")
    fast.__dict__.update(vars(mx.fast))
    core.__dict__.update(vars(mx), fast=fast)
    for call, (_, ours) in stand_ins.items():
        match attribute_path(call):
            case ["fast", name]:
                setattr(fast, name, ours)
            case [name]:
                setattr(core, name, ours)
    return {id(mx): core, id(mx.fast): fast}
