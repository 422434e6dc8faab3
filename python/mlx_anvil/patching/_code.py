"""Inspects the bytecode of functions: the names they use, and obstacles to copying them."""

import builtins
import dis
import functools
import inspect
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_NAMESPACES = {"globals", "eval", "exec"}


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def code_names(code: CodeType) -> set[str]:
    """Names of the globals and attributes that a function and its nested functions use."""
    return {name for inner in nested_code(code) for name in inner.co_names}


def names_of_form(
    function: FunctionType, form: Callable[..., Any], free: Container[str] = ()
) -> tuple[str, ...] | None:
    """The names that the function uses, in order, if its code is that of ``form`` up to the ``free`` names; else
    None."""
    code, expected = function.__code__, form.__code__
    if _shape(code) != _shape(expected):
        return None
    names = code.co_names
    return names if all(b in free or a == b for a, b in zip(names, expected.co_names, strict=True)) else None


def same_code(a: CodeType, b: CodeType) -> bool:
    """True if the two do the same, as far as their instructions, constants and names tell."""
    return (
        (a.co_code, a.co_names, a.co_varnames) == (b.co_code, b.co_names, b.co_varnames)
        and len(a.co_consts) == len(b.co_consts)
        and all(
            same_code(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else x == y
            for x, y in zip(a.co_consts, b.co_consts, strict=True)
        )
    )


def _shape(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(c for c in code.co_consts if c is not None and not isinstance(c, str))  # without the docstring
    return code.co_code, code.co_argcount, code.co_kwonlyargcount, constants, len(code.co_names)


def contents(cell: CellType) -> Any:
    """The value of a closure variable; None if it is unassigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def obstacle(function: FunctionType) -> str:
    """Why a copy of the function with other globals would behave differently; empty if it would not."""
    uses = _uses(function.__code__)
    why = uses.obstacle
    for name in sorted(uses.loads & _NAMESPACES):
        if function.__globals__.get(name, getattr(builtins, name)) is getattr(builtins, name):
            why = why or f"calls {name}()"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in uses.stores and (callable(contents(cell)) or isinstance(contents(cell), ModuleType)):
            why = why or f"assigns to {name} of the enclosing function"
    return why and f"{function.__qualname__.rpartition('<locals>.')[2]} {why}"


@dataclass(frozen=True)
class _Uses:
    """Globals that code reads, closure variables that it assigns, and an obstacle to copying it."""

    loads: frozenset[str]
    stores: frozenset[str]
    obstacle: str


@functools.lru_cache(maxsize=4096)
def _uses(code: CodeType) -> _Uses:
    loads: set[str] = set()
    stores: set[str] = set()
    why = ""
    for inner in nested_code(code):
        if not inner.co_flags & inspect.CO_OPTIMIZED:
            why = "defines a class"  # a class body reads globals as a plain dict, without __missing__
        for instruction in dis.get_instructions(inner):
            match instruction.opname:
                case "LOAD_GLOBAL":
                    loads.add(instruction.argval)
                case "STORE_GLOBAL" | "DELETE_GLOBAL":
                    why = "assigns to globals of its module"
                case "STORE_DEREF" | "DELETE_DEREF" if instruction.argval in code.co_freevars:
                    stores.add(instruction.argval)
    return _Uses(frozenset(loads), frozenset(stores), why)


def unchanged(function: FunctionType) -> Callable[[], bool]:
    """Returns a function that tells if the globals that ``function`` names are still the same objects."""
    found = list(_globals_of(function))

    def ask() -> bool:
        return not any(map(_is_another, found))

    return ask


def _is_another(found: tuple[Callable[[], Any], Any]) -> bool:
    read, value = found
    return read() is not value


def _globals_of(function: FunctionType) -> Iterator[tuple[Callable[[], Any], Any]]:
    """For each global name, and attribute of a global module: a function that reads it, and its current value."""
    value: Any = None
    for instruction in dis.get_instructions(function.__code__):
        read: Callable[[], Any]
        match instruction.opname:
            case "LOAD_GLOBAL" if instruction.argval in function.__globals__:
                read = functools.partial(function.__globals__.get, instruction.argval)
            case "LOAD_ATTR" | "LOAD_METHOD" if isinstance(value, ModuleType):
                read = functools.partial(getattr, value, instruction.argval)
            case "EXTENDED_ARG" | "CACHE":
                continue
            case _:
                value = None
                continue
        value = read()
        yield read, value
