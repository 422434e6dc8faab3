"""``patch`` and ``unpatch``: decides which functions each module runs."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType

import mlx.nn as nn

from mlx_anvil._prebuild import prebuild as _prebuild
from mlx_anvil.patching import _repack
from mlx_anvil.patching._adapters import adapters
from mlx_anvil.patching._caches import with_cache_writes
from mlx_anvil.patching._code import code_names, obstacle
from mlx_anvil.patching._expert_rules import SUM_RULES
from mlx_anvil.patching._experts import block_and_shared, has_experts, summed
from mlx_anvil.patching._gate_rules import FUNCTIONS_OF_RULES as GATE_FUNCTIONS
from mlx_anvil.patching._gate_rules import RULES as GATE_RULES
from mlx_anvil.patching._latent_rules import RULES as LATENT_RULES
from mlx_anvil.patching._left import RECURRENCE, is_activation_of_experts, is_of_experts, is_shared, reasons
from mlx_anvil.patching._linear import linear_functions, siblings
from mlx_anvil.patching._quantized_ops import QuantizedOps
from mlx_anvil.patching._rebind import Call, Function, Rebinder
from mlx_anvil.patching._recurrence_rules import RULES as RECURRENCE_RULES
from mlx_anvil.patching._recurrences import CONVOLUTION
from mlx_anvil.patching._recurrences import OPS as RECURRENCES
from mlx_anvil.patching._report import FallbackLog, Report, Row
from mlx_anvil.patching._routers import RULES as ROUTER_RULES
from mlx_anvil.patching._routes import Route, assign, install, route_to, sweep
from mlx_anvil.patching._rules import calls_of, rewritten
from mlx_anvil.patching._shards import bequeath, disinherit
from mlx_anvil.patching._stand_ins import functions_of_rules, guarded, stand_in, stand_ins

_RULES_WITHOUT_EXPERTS = (*ROUTER_RULES, *LATENT_RULES, *RECURRENCE_RULES, *GATE_RULES)
_RULES = (*_RULES_WITHOUT_EXPERTS, *SUM_RULES)
_lock = threading.RLock()  # held by patch and unpatch; calls of models need no lock


def patch(
    model: nn.Module,
    *,
    attention: bool = True,
    swiglu: bool = True,
    quantized: bool = True,
    norm: bool = True,
    rope: bool = True,
    router: bool = True,
    experts: bool = True,
    recurrence: bool = True,
    sharded: bool = True,
    activation_bits: int | None = None,
    repack: bool = False,
    prebuild: bool = False,
) -> Report:
    """Makes a model call the ops, in place. The model is any model of mlx-lm, or any tree of ``mlx.nn`` modules.

    Parameters, their names, and the frozen and training states do not change; ``repack`` changes dtypes only. Other
    models of the same architecture are not affected. A call that an op does not support runs as before, and is counted in ``report.fallbacks``; inside
    ``strict()`` it raises RuntimeError. Call ``patch`` again after you add or quantize modules; the last options apply.
    Layers that ``model.shard()`` makes from those of a patched model are patched with it.

    Args:
        model (mlx.nn.Module): the model.
        attention: swap ``mx.fast.scaled_dot_product_attention``, mlx-lm's function of that name, also with a quantized
            cache, Gemma 2's attention, and decodes with latent attention.
        swiglu: swap the gates of MLPs: mlx-lm's ``swiglu`` and its variants, and ``nn.silu``, ``nn.gelu``,
            ``nn.gelu_approx`` or ``nn.relu2`` of a gate, times ``up``. With ``quantized``, one kernel also computes
            the projections of a SwiGLU. Also the sigmoid gate of an attention's output.
        quantized: swap ``nn.QuantizedLinear``, ``nn.QuantizedEmbedding`` (as table and as output head), and, without
            ``attention``, the products with a quantized cache.
        norm: swap RMS norms, including Gemma's ``1 + weight`` and those with a gate after them, and layer norms.
        rope: swap ``nn.RoPE`` and mlx-lm's layers that use ``mx.fast.rope``.
        router: swap the choice of experts: functions such as ``group_expert_select``, by a bias and within groups
            (DeepSeek-V3, GLM-4-MoE and others), and what Mixtral, Qwen's, GPT-OSS and others write out in a method.
        experts: swap the experts of mixtures: mlx-lm's ``SwitchGLU``, the sum over a token's experts with a shared
            expert and its gate, and ``mx.gather_qmm`` and ``mx.gather_mm``.
        recurrence: swap the recurrences of linear attention and state space models, and the short convolutions before
            them: mlx-lm's ``gated_delta_update`` (Qwen3-Next, Kimi Linear), ``ssm_update`` (Mamba-2) and the loops of
            Mamba and Jamba.
        sharded: swap ``nn.ShardedToAllLinear`` and, with ``quantized``, its quantized twin, so that the product of the
            next rows overlaps the sum over the processes. Pass the same value in every process.
        activation_bits: that argument of :func:`mlx_anvil.quantized_matmul`, for the products of quantized layers and
            experts of MLX and mlx-lm; layers of ``mlx_anvil.nn`` have an attribute. 8 makes them faster on a CPU and
            rounds their inputs to 8 bits.
        repack: store the scales and biases of quantized linear layers and experts in float16 or bfloat16, in a model
            of which all parameters are float32, where that changes no value: most 4-bit models were quantized in 16
            bits. Results keep their bits, each token reads a tenth less, and so do files of the weights. It is for the
            CPU, and does nothing if MLX's default device is a GPU. Embeddings, trainable scales, and layers with LoRA
            or DoRA stay as they are. Inputs of the layers must be float32. ``unpatch``, or ``patch`` without it,
            restores float32. ``report.repacked`` counts the layers.
        prebuild: build the pipelines of a model of mlx-lm in background threads, see :func:`mlx_anvil.prebuild`.
            ``report.prebuilt`` has their state.

    Returns:
        Report: what was swapped, what was not, and why. A model with nothing to swap is not an error.

    Raises:
        TypeError: ``model`` is not an ``mlx.nn.Module``.
        ValueError: ``activation_bits`` is not None, 8 or 16. Or ``prebuild`` is set, and the model is not like those of
            mlx-lm; it is patched nonetheless.
    """
    _check("patch", model)
    if activation_bits not in (None, 8, 16) or isinstance(activation_bits, bool):
        raise ValueError(f"[patch] activation_bits is {activation_bits!r}; allowed: None, 8, 16.")
    options = {"attention": attention, "swiglu": swiglu, "quantized": quantized, "norm": norm, "rope": rope}
    options |= {"router": router, "experts": experts, "recurrence": recurrence, "sharded": sharded}
    with _lock:
        report = _Patch(options, activation_bits, repack).apply(model)
    return replace(report, prebuilt=_prebuild(model)) if prebuild else report


def unpatch(model: nn.Module) -> None:
    """Restores the methods of every module of a patched model, and the float32 arrays of layers that were repacked. It
    does nothing if the model is not patched.

    Args:
        model (mlx.nn.Module): the model.

    Raises:
        TypeError: ``model`` is not an ``mlx.nn.Module``.
    """
    _check("unpatch", model)
    with _lock:
        modules = [module for _, module in _named_modules(model)]
        restored = _repack.changes(modules, lambda _: False)
        assign([(module, {}) for module in modules])
        disinherit(modules)
        _repack.make(restored)


def _check(name: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        hint = ", such as model[0] of the pair (model, tokenizer)" if isinstance(model, tuple | list) else ""
        raise TypeError(f"[{name}] model is a {type(model).__name__}; allowed: an mlx.nn.Module{hint}.")


@dataclass(frozen=True)
class _Plan:
    """What the modules of one class run, and their rows of the report, without the path."""

    functions: dict[Route, Function] = field(default_factory=dict)
    swapped: list[Row] = field(default_factory=list)
    left: list[Row] = field(default_factory=list)


class _Patch:
    """One call of ``patch``. It makes a plan for each class of the model, then assigns all modules at once."""

    def __init__(self, options: dict[str, bool], activation_bits: int | None, repack: bool) -> None:
        self._options = options
        self._repack = repack
        self._log = FallbackLog()
        self._quantized = QuantizedOps(options["quantized"], activation_bits)
        every = stand_ins(self._log, self._quantized)
        self._functions = {
            **functions_of_rules(self._log),
            **{name: stand_in(op, theirs, ours, self._log) for name, (op, theirs, ours) in GATE_FUNCTIONS.items()},
            "mlx_anvil_summed": summed,
            "mlx_anvil_block": block_and_shared,
        }
        self._finder = Rebinder(every)
        self._rebinder = Rebinder({call: ours for call, ours in every.items() if options[call.option]})
        self._plans: dict[type[nn.Module], _Plan] = {}

    def apply(self, model: nn.Module) -> Report:
        swapped, left, seen = [], [], set()
        functions: list[tuple[nn.Module, Mapping[Route, Function]]] = []
        try:
            for path, module in _named_modules(model):
                if id(module) in seen:
                    continue
                seen.add(id(module))
                if is_of_experts(type(module)):
                    seen.update(_shared_parts(module))
                plan = self._plan(type(module))
                swapped += [replace(row, path=path) for row in plan.swapped]
                left += [replace(row, path=path) for row in plan.left]
                functions.append((module, plan.functions))
            modules = [module for module, _ in functions]
            repacked = _repack.changes(modules, self._is_to_repack)
            assign(self._with_shared_inputs(functions))
        except BaseException:
            sweep()
            raise
        bequeath(modules, self._adopt)
        _repack.make(repacked)
        count = sum(map(_repack.is_repacked, modules))
        return Report(_name(model), tuple(swapped), tuple(left), repacked=count, log=self._log)

    def _is_to_repack(self, layer: nn.Module) -> bool:
        """True if repacking is wanted, and the products of the quantized layer are ours."""
        cls = type(layer)
        wanted = self._options["experts" if _repack.is_experts_layer(cls) else "quantized"]
        return self._repack and (_is_ours(cls) or (wanted and bool(self._plan(cls).functions)))

    def _with_shared_inputs(
        self, functions: list[tuple[nn.Module, Mapping[Route, Function]]]
    ) -> list[tuple[nn.Module, Mapping[Route, Function]]]:
        """The functions, with those of quantized layers that compute products of one input together."""
        if not self._quantized.swapped:
            return functions
        by_module = {id(module): own for module, own in functions}
        for layers in siblings(module for module, _ in functions):
            patched = [layer for layer in layers if by_module.get(id(layer))]
            for layer, function in zip(patched, linear_functions(patched, self._quantized), strict=True):
                by_module[id(layer)] = {
                    route: function(ours) if route.name == "__call__" else ours
                    for route, ours in by_module[id(layer)].items()
                }
        return [(module, by_module[id(module)]) for module, _ in functions]

    def _adopt(self, module: nn.Module) -> None:
        """Patches a layer that a shard of a patched one is in."""
        with _lock:
            assign([(module, self._plan(type(module)).functions)])

    def _plan(self, cls: type[nn.Module]) -> _Plan:
        if cls not in self._plans:
            plan = self._make_plan(cls)
            try:
                install(plan.functions)
            except Exception as error:
                why = f"the methods of {cls.__name__} cannot be replaced: {type(error).__name__}: {error}"
                refused = [replace(row, why=why) for row in plan.swapped]
                plan = _Plan({}, [], refused + plan.left)
            self._plans[cls] = plan
        return self._plans[cls]

    def _make_plan(self, cls: type[nn.Module]) -> _Plan:
        plan = _Plan()
        if _is_ours(cls):
            return plan

        def decide(call: Call) -> bool:
            wanted = self._options[call.option]
            rows = plan.swapped if wanted else plan.left
            if call.op:
                rows.append(Row("", call.what, call.op, cls.__name__ if wanted else f"{call.option}=False"))
            return wanted

        routes = [] if is_shared(cls) else list(_routes(cls))
        first = {route.name: route for route in reversed(routes)}
        methods = {name: route.original for name, route in first.items()}
        for adapter in adapters(cls, methods, self._quantized, self._log):
            if decide(adapter.call):
                plan.functions.update({first[name]: ours for name, ours in adapter.methods.items()})
            elif adapter.call.option == "sharded":
                continue  # the product alone may be swapped
            for name in adapter.methods:
                del methods[name]
                routes.remove(first[name])
        has_router = has_recurrence = False
        for route in routes:
            reach = self._finder.reach(route.original)
            left = [item for item in sorted(reach.left.items(), key=_by_name) if item[0].op]
            plan.left.extend(Row("", call.what, call.op, why) for call, why in left)
            written = self._written(route.original)
            wanted = [call for call in sorted(reach.calls | written, key=lambda call: call.what) if decide(call)]
            if wanted:
                plan.functions[route] = self._copy(route, written.intersection(wanted))
            if CONVOLUTION in written.intersection(wanted):  # which has an activation
                methods[route.name] = rewritten(route.original, route.original, RECURRENCE_RULES)
            has_router = has_router or any(call.option == "router" for call in written)
            named = reach.calls | reach.left.keys() | written  # swapped, or left for another reason
            has_recurrence = has_recurrence or any(call.op in RECURRENCES for call in named)
        for what, op, why in reasons(cls, methods):
            if not ((what == "router" and has_router) or (why == RECURRENCE and has_recurrence)):
                plan.left.append(Row("", what, op, why))
        return plan

    def _written(self, method: FunctionType) -> frozenset[Call]:
        """The calls that replace statements of the method."""
        rules = _RULES if has_experts(method) else _RULES_WITHOUT_EXPERTS
        return calls_of(method, rules) if not obstacle(method) else frozenset()

    def _copy(self, route: Route, written: frozenset[Call]) -> Function:
        """The copy of a method that calls our ops, also in place of the statements of the ``written`` calls."""
        ours = self._rebinder.rebound(route.original)
        if written:
            ours.__globals__.update(self._functions)
            ours = rewritten(route.original, ours, tuple(rule for rule in _RULES if rule.call in written))
            return guarded(min(call.op for call in written), route.original, ours, self._log)
        if route.name == "__call__" and self._options["rope"]:
            return with_cache_writes(route.original, ours)
        return ours


def _shared_parts(experts: nn.Module) -> set[int]:
    """The ids of the modules of an activation that other models may share."""
    activation = experts.get("activation")
    if not isinstance(activation, nn.Module) or is_activation_of_experts(type(activation)):
        return set()
    return {id(part) for _, part in _named_modules(activation)}


def _is_ours(cls: type[nn.Module]) -> bool:
    return cls.__module__.partition(".")[0] == "mlx_anvil"


def _by_name(item: tuple[Call, str]) -> str:
    return item[0].what


def _routes(cls: type[nn.Module]) -> Iterator[Route]:
    """Routes to the methods that an instance of the class runs, inherited ones and those called by ``super()``
    included.
    """
    hidden = {"__init__"}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in list(vars(base).items()):
            if name in hidden:
                continue
            if not isinstance(value, FunctionType):
                hidden.add(name)
                continue
            route = route_to(base, name)
            yield route
            if "super" not in code_names(route.original.__code__):
                hidden.add(name)


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their paths, with layers in numeric order."""

    def order(item: tuple[str, nn.Module]) -> list[tuple[bool, int, str]]:
        parts = item[0].split(".")
        return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    return sorted(model.named_modules(), key=order)  # type: ignore[no-untyped-call]


def _name(model: nn.Module) -> str:
    """``"llama.Model"``: the class alone has the same name in every architecture."""
    cls = type(model)
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
