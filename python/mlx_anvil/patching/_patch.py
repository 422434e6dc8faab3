"""``patch`` and ``unpatch``: which module gets which class."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType

import mlx.nn as nn

from mlx_anvil._prebuild import prebuild as _prebuild
from mlx_anvil.patching._adapters import adapters
from mlx_anvil.patching._left import is_of_experts, reasons
from mlx_anvil.patching._rebind import Call, Function, Rebinder, writes_globals
from mlx_anvil.patching._report import FallbackLog, Report, Row
from mlx_anvil.patching._stand_ins import stand_ins
from mlx_anvil.patching._swap import original_class, swapped_class

_lock = threading.RLock()  # of patch and unpatch; the models themselves need none


def patch(
    model: nn.Module,
    *,
    attention: bool = True,
    swiglu: bool = True,
    quantized: bool = True,
    norm: bool = True,
    rope: bool = True,
    prebuild: bool = False,
) -> Report:
    """Puts the ops into a model, in place: any model of mlx-lm, any tree of ``mlx.nn`` modules.

    Parameters, their names, what is frozen and what is in training mode stay as they are, and so do other models of the
    same architecture. A call that an op does not take runs as before and is counted in ``report.fallbacks``; inside
    ``strict()`` it raises RuntimeError. Patching again gives the same model, with the options of the last call; do so
    after modules were added or quantized.

    Args:
        model (mlx.nn.Module): the model.
        attention: ``mx.fast.scaled_dot_product_attention``, mlx-lm's function of that name, Gemma 2's attention in line.
        swiglu: mlx-lm's ``swiglu``, and ``nn.silu(gate) * up`` of a SwiGLU MLP; with ``quantized`` projections too in
            one kernel.
        quantized: ``nn.QuantizedLinear``, ``nn.QuantizedEmbedding`` as table and as output head, the products with a
            quantized cache.
        norm: RMS norms, Gemma's with weights less 1 included, and layer norms.
        rope: ``nn.RoPE`` and what mlx-lm builds on ``mx.fast.rope``.
        prebuild: build the pipelines of a model of mlx-lm in background threads, as :func:`mlx_anvil.prebuild` does;
            ``report.prebuilt`` tells how far that is.

    Returns:
        Report: what was swapped, what was not, and why. A model with nothing to swap is no error.

    Raises:
        TypeError: ``model`` is not an ``mlx.nn.Module``.
        ValueError: ``prebuild`` of a model that is not like those of mlx-lm; the model is patched.
    """
    _check("patch", model)
    options = {"attention": attention, "swiglu": swiglu, "quantized": quantized, "norm": norm, "rope": rope}
    with _lock:
        report = _Patch(options).apply(model)
    return replace(report, prebuilt=_prebuild(model)) if prebuild else report


def unpatch(model: nn.Module) -> None:
    """Gives every module of a patched model its own class back; nothing else has changed. A model that is not patched
    stays as it is.

    Args:
        model (mlx.nn.Module): the model.

    Raises:
        TypeError: ``model`` is not an ``mlx.nn.Module``.
    """
    _check("unpatch", model)
    with _lock:
        for _, module in _named_modules(model):
            if (original := original_class(module)) is not type(module):
                module.__class__ = original


def _check(name: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"[{name}] model is a {type(model).__name__}; allowed: an mlx.nn.Module.")


@dataclass(frozen=True)
class _Plan:
    """What one class becomes: the class for its instances, and the rows of each of them, without their path."""

    cls: type[nn.Module]
    swapped: list[Row]
    left: list[Row]


class _Patch:
    """One call of ``patch``: the classes that it makes, one for each class of the model."""

    def __init__(self, options: dict[str, bool]) -> None:
        self._options = options
        self._log = FallbackLog()
        every = stand_ins(self._log)
        self._finder = Rebinder(every)
        self._rebinder = Rebinder({call: pair for call, pair in every.items() if options[call.option]})
        self._plans: dict[type[nn.Module], _Plan] = {}

    def apply(self, model: nn.Module) -> Report:
        swapped, left, seen = [], [], set()
        for path, module in _named_modules(model):
            if id(module) in seen:
                continue
            seen.add(id(module))
            if is_of_experts(original_class(module)):
                seen.update(id(inner) for _, inner in _named_modules(module))
            plan = self._plan(original_class(module))
            swapped += [replace(row, path=path) for row in plan.swapped]
            left += [replace(row, path=path) for row in plan.left]
            if type(module) is not plan.cls:
                module.__class__ = plan.cls
        return Report(_name(model), tuple(swapped), tuple(left), log=self._log)

    def _plan(self, cls: type[nn.Module]) -> _Plan:
        if cls not in self._plans:
            self._plans[cls] = self._make_plan(cls)
        return self._plans[cls]

    def _make_plan(self, cls: type[nn.Module]) -> _Plan:
        if cls.__module__.partition(".")[0] == "mlx_anvil":
            return _Plan(cls, [], [])
        methods, ours = {} if is_of_experts(cls) else dict(_methods(cls)), dict[str, Function]()
        plan = _Plan(cls, [], [])

        def decide(call: Call) -> bool:
            wanted = self._options[call.option]
            rows = plan.swapped if wanted else plan.left
            rows.append(Row("", call.what, call.op, cls.__name__ if wanted else f"{call.option}=False"))
            return wanted

        for adapter in adapters(cls, methods, self._options["quantized"], self._log):
            if decide(adapter.call):
                ours.update(adapter.methods)
            for name in adapter.methods:
                del methods[name]
        for name, method in methods.items():
            calls = sorted(self._finder.calls(method), key=lambda call: call.what)
            if calls and writes_globals(method.__code__):
                why = f"{cls.__name__}.{name} assigns to globals of its module"
                plan.left.extend(Row("", call.what, call.op, why) for call in calls)
                continue
            decisions = [decide(call) for call in calls]
            if any(decisions):
                ours[name] = self._rebinder.rebound(method)
        plan.left.extend(Row("", what, op, why) for what, op, why in reasons(cls, methods))
        return replace(plan, cls=swapped_class(cls, ours)) if ours else plan


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Methods that an instance of the class runs, of whichever base."""
    seen = {"__init__"}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if name not in seen and isinstance(value, FunctionType):
                yield name, value
            seen.add(name)


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their paths, layers in the order of their numbers."""

    def order(item: tuple[str, nn.Module]) -> list[tuple[bool, int, str]]:
        parts = item[0].split(".")
        return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    return sorted(model.named_modules(), key=order)  # type: ignore[no-untyped-call]


def _name(model: nn.Module) -> str:
    """``llama.Model``: the class alone has the same name in every architecture."""
    cls = type(model)
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
