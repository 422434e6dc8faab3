"""Texts of calls that fit no signature: what was given, what it is called here, and what is allowed."""

import ast
import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from mlx_anvil import _ext
from mlx_anvil._habits import NAMES, converted

T = TypeVar("T")


@dataclass(frozen=True)
class Signature:
    """Parameters of a function without ``*args`` and ``**kwargs``.

    Attributes:
        name: the function or the class, as errors name it.
        by_position: parameters that may be given by position.
        by_name: the others.
        defaults: the defaults as text.
        method: empty for a function or a constructor.
    """

    name: str
    by_position: tuple[str, ...]
    by_name: tuple[str, ...]
    defaults: Mapping[str, str]
    method: str = ""

    @property
    def key(self) -> str:
        """The entry in the table of other libraries' names."""
        return f"{self.name}.{self.method}" if self.method else self.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.by_position + self.by_name

    def __str__(self) -> str:
        def shown(names: Sequence[str]) -> list[str]:
            return [f"{name}={self.defaults[name]}" if name in self.defaults else name for name in names]

        separator = ["*"] if self.by_name else []
        return f"{'module' if self.method == '__call__' else self.key}({', '.join(shown(self.by_position) + separator + shown(self.by_name))})"


@functools.cache
def signature_of_op(function: Any) -> Signature:
    """Reads the signature that nanobind shows. Overloads differ in types only."""
    text = function.__nb_signature__[0][0]
    definition = ast.parse(f"{text}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    by_position, by_name = ([argument.arg for argument in group] for group in (arguments.args, arguments.kwonlyargs))
    with_default = by_position[len(by_position) - len(arguments.defaults) :]
    defaults = dict(zip(with_default + by_name, [*arguments.defaults, *arguments.kw_defaults], strict=True))
    texts = {name: ast.unparse(value) for name, value in defaults.items() if value is not None}
    return Signature(function.__name__, tuple(by_position), tuple(by_name), texts)


def signature_of_method(cls: type, function: Callable[..., object], method: str = "") -> Signature:
    """Reads the parameters of a method, without ``self`` or ``cls``."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    defaults = {p.name: repr(p.default) for p in parameters if p.default is not p.empty}
    by_name = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    by_position = tuple(p.name for p in parameters if p.name not in by_name)
    return Signature(cls.__name__, by_position, by_name, defaults, method)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _be(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _unknown(signature: Signature, name: str) -> tuple[str, str]:
    """What to do about an unknown keyword, and the parameter that replaces it, if any."""
    known = NAMES.get(signature.key, {}).get(name, "")
    if known.endswith("."):
        return f"{name} is no argument: {known.removesuffix('.')}", ""
    if (ours := known.partition("=")[0]) in signature.parameters:
        return f"{name} is called {known} here", ours
    close = get_close_matches(name, signature.parameters, 1)
    return f"{name} is no argument" + (f", {close[0]} is" if close else ""), close[0] if close else ""


def problem(signature: Signature, positional: int, named: Collection[str]) -> str:
    """The text for a call with ``positional`` arguments by position and these by name; empty if it fits."""
    problems = []
    given = {*signature.by_position[:positional], *named}
    for name in named:
        if name not in signature.parameters:
            text, ours = _unknown(signature, name)
            problems.append(text)
            given.add(ours)
    if positional > (most := len(signature.by_position)):
        names = f" ({', '.join(signature.by_position)})" if most else ""
        rest = ", the others by name" if signature.by_name else ""
        problems.append(f"{positional} arguments are given by position, of at most {most}{names}{rest}")
    if twice := [name for name in signature.by_position[:positional] if name in named]:
        problems.append(f"{_listed(twice)} {_be(twice)} given twice, by position and by name")
    required = [name for name in signature.parameters if name not in signature.defaults]
    if missing := [name for name in required if name not in given]:
        problems.append(f"{_listed(missing)} {_be(missing)} missing")
    return f"[{signature.name}] {'; '.join(problems)}; allowed: {signature}." if problems else ""


def _hint(op: str, argument: str, value: object) -> str:
    """What to do about a value of the wrong type for a parameter that takes an array; empty if nothing is known."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    is_norm = op in ("rms_norm", "layer_norm")
    if is_norm and argument in ("weight", "bias") and isinstance(value, float):
        return f"give eps by name, eps={value!r}"
    if is_norm and argument == "weight" and isinstance(value, int | tuple | list):
        return "the shape is not given, as the last axis is normalised"
    if op == "flash_attention" and argument == "mask" and isinstance(value, bool):
        return "a causal mask is mask='causal'"
    if argument == "w" and isinstance(value, tuple | list):
        return "give its parts as separate arguments: *w"
    if converting := converted(kind, argument):
        return f"{converting} converts it"
    return ""


def explain(function: Any, positional: Sequence[object], named: Mapping[str, object], text: str) -> str | None:
    """The text of a TypeError that a call of an op raised with ``text``. None: that text stays."""
    signature = signature_of_op(function)
    op = signature.name
    values: dict[str, Any] = {**dict(zip(signature.by_position, positional, strict=False)), **named}
    if not text.startswith(f"[{op}] "):  # nanobind's text
        text = problem(signature, len(positional), named)
        hint = _hint(op, "w", values["w"]) if isinstance(values.get("w"), tuple | list) else ""
    elif refused := re.match(r"\[\w+\] (?:(gate|up) )?(\w+) is a \S+; allowed: .*\barray", text):
        owner, argument = refused.groups()
        if owner:  # an array of a quantized matrix
            values = dict(zip(("w", "scales", "biases"), values[owner], strict=False))
        hint = _hint(op, argument, values.get(argument))
    else:
        return None
    return f"{text.removesuffix('.')}; {hint}." if text and hint else text or None


def register() -> None:
    """Makes the extension explain calls of its public functions."""
    functions = [value for name, value in vars(_ext).items() if hasattr(value, "__nb_signature__") and name[0] != "_"]
    _ext._explain_calls(functions, explain)


def _kind(value: object) -> type:
    """The Python type of a number: NumPy's integers and floats are as good as Python's."""
    if isinstance(value, bool):
        return bool
    if isinstance(value, numbers.Integral):
        return int
    return float if isinstance(value, numbers.Real) else type(value)


_ALLOWED = {int: "an int", float: "a number", bool: "a bool", str: "a str", types.NoneType: "None"}


def _check_type(name: str, argument: str, value: object, default: object, annotation: object) -> None:
    options = typing.get_args(annotation) or (annotation,)
    if value is default or any(option not in _ALLOWED for option in options):
        return
    kind = _kind(value)
    if kind not in options and not (kind is int and float in options):
        allowed = " or ".join(_ALLOWED[option] for option in options)
        raise TypeError(f"[{name}] {argument} is a {type(value).__name__}; allowed: {allowed}.")


def checks_arguments(cls: type[T]) -> type[T]:
    """Makes a module explain calls that fit no signature: of its constructor and of its own methods.

    The constructor also checks the types of its arguments, before MLX sees them.
    """
    for name, method in list(vars(cls).items()):
        if name != "__call__" and name[0] == "_":
            continue
        if isinstance(method, types.FunctionType):
            type.__setattr__(cls, name, _explained(cls, method))
        elif isinstance(method, classmethod):
            type.__setattr__(cls, name, classmethod(_explained(cls, method.__func__)))
    init: Callable[..., None] = cls.__init__
    signature = signature_of_method(cls, init)
    called = inspect.signature(init)
    annotations = typing.get_type_hints(init)

    @functools.wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:  # a subclass has its own arguments
            if text := problem(signature, len(args), kwargs):
                raise TypeError(text)
            for name, value in list(called.bind(self, *args, **kwargs).arguments.items())[1:]:
                _check_type(cls.__name__, name, value, called.parameters[name].default, annotations.get(name))
        init(self, *args, **kwargs)

    type.__setattr__(cls, "__init__", checked)
    return cls


def _explained(cls: type, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with our text where its arguments fit no signature. A call that fits costs one more Python call."""
    signature = signature_of_method(cls, method, method.__name__)

    @functools.wraps(method)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TypeError:  # raised by the body, if the arguments fit
            text = problem(signature, len(args), kwargs)
            if not text:
                raise
            raise TypeError(text) from None

    return call
