"""Mixtures of experts that ``patch`` swaps: each architecture of mlx-lm beside its unpatched self."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import switch_layers
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_anvil
from expert_models import MODELS
from lm_models import greedy, tokens
from mlx_anvil import _ext
from mlx_anvil._check import FLOOR, OUTPUT_FACTOR
from mlx_anvil.patching._expert_rules import SHARED_EXPERT, SUM_OF_EXPERTS, SUM_RULES
from mlx_anvil.patching._experts import summed
from mlx_anvil.patching._rules import calls_of
from support import luck_of_few, max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5
OTHERS = ("attention", "swiglu", "quantized", "norm", "rope", "router")
ONLY = dict.fromkeys(OTHERS, False)  # so that routers see the same numbers
# Another activation, or no gate.
IN_STEPS = {"nemotron_h", "phixtral"}
FEW = ("deepseek_v3", "gemma4_text", "gpt_oss", "glm4_moe", "llama4", "mixtral", "qwen2_moe", "qwen3_moe")
# Whose shared expert is part of the call, and whose expert has a gate.
SHARED = (
    *("afmoe", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v3", "deepseek", "deepseek_v2"),
    *("deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
    *("granitemoehybrid", "hunyuan"),
    *("kimi_linear", "llama4", "mimo_v2_flash", "mistral4", "qwen2_moe", "qwen3_next", "step3p5"),
)
WITH_GATE = ("qwen2_moe", "qwen3_next")
LENGTHS = (6, 41)  # mlx-lm sorts the pairs of the longer one


def is_quantizable(_: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


def build(name: str, dtype: mx.Dtype = mx.float32, quantized: bool = True) -> nn.Module:
    model = MODELS[name].build(dtype)
    if quantized:
        nn.quantize(model, group_size=32, bits=4, class_predicate=is_quantizable)
    return model


def loss(model: nn.Module, batch: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(batch[:, :-1]).astype(mx.float32), batch[:, 1:], reduction="mean")


def gradients(model: nn.Module, batch: mx.array) -> dict[str, mx.array]:
    return dict(tree_flatten(nn.value_and_grad(model, loss)(model, batch)[1]))


def add_lora(model: nn.Module) -> None:
    """On every projection, experts included; a first step would leave half of the gradients at zero."""
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": 4, "scale": 2.0, "dropout": 0.0})
    for path, layer in model.named_modules():
        if "lora_b" in layer:
            layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape).astype(layer.lora_b.dtype)
            assert path
    model.train()


@pytest.mark.parametrize("name", MODELS)
def test_float32(name):
    model, batches = build(name), [tokens(2, length) for length in LENGTHS]
    wanted = [model(batch) for batch in batches]
    report = mlx_anvil.patch(model, **ONLY)
    assert {row.what for row in report.swapped} & {"SwitchGLU", "mx.gather_qmm"}
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        for batch, want in zip(batches, wanted, strict=True):
            assert max_error(model(batch), want) <= LIMIT
    ran = {event.op for event in trace.events}
    assert ("gather_quantized_matmul" if name in IN_STEPS else "quantized_experts") in ran
    mlx_anvil.unpatch(model)
    assert all(mx.array_equal(model(batch), want) for batch, want in zip(batches, wanted, strict=True))


@pytest.mark.parametrize("name", FEW)
def test_everything_swapped(name):
    model, batch = build(name), tokens(2, LENGTHS[1])
    want, wanted_tokens = model(batch), greedy(model, batch[:1], 8)
    report = mlx_anvil.patch(model)
    with mlx_anvil.strict():
        assert max_error(model(batch), want) <= LIMIT
        assert greedy(model, batch[:1], 8) == wanted_tokens
    assert report.fallbacks == ()


@pytest.mark.parametrize("name", sorted({*FEW, *SHARED}))
@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16(name, length):
    """The FlashAttention criterion: the truth is the same weights in float32."""
    model, batch = build(name, mx.bfloat16), tokens(2, length)
    theirs = model(batch)
    mlx_anvil.patch(model, **ONLY)
    ours = model(batch)
    mlx_anvil.unpatch(model)
    model.set_dtype(mx.float32)
    truth = model(batch)
    assert ours.dtype == theirs.dtype
    assert max_error(ours, truth) <= OUTPUT_FACTOR * max_error(theirs, truth) + FLOOR + luck_of_few(ours)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"deepseek_v41"}))
def test_gradients_of_qlora(name):
    """LoRA in every projection; deepseek_v41 is below."""
    model = build(name)
    add_lora(model)
    for length in LENGTHS:
        batch = tokens(2, length)
        want = gradients(model, batch)
        mlx_anvil.patch(model, **ONLY)
        ours = gradients(model, batch)
        mlx_anvil.unpatch(model)
        assert ours.keys() == want.keys()
        assert any("lora" in parameter for parameter in ours)
        largest = max(mx.abs(gradient).max().item() for gradient in want.values())
        for parameter, gradient in ours.items():
            assert max_error(gradient, want[parameter], scale=largest) <= LIMIT, parameter


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("quantized", [False, True], ids=["full", "4 bits"])
def test_gradients(name, quantized):
    """Frozen experts inside of a model that trains its routers and norms; and dense experts, which train too."""
    model = build(name, quantized=quantized)
    for length in LENGTHS:
        batch = tokens(2, length)
        want = gradients(model, batch)
        mlx_anvil.patch(model, **ONLY)
        with mlx_anvil.strict():
            ours = gradients(model, batch)
        mlx_anvil.unpatch(model)
        largest = max(mx.abs(gradient).max().item() for gradient in want.values())
        for parameter, gradient in ours.items():
            assert max_error(gradient, want[parameter], scale=largest) <= LIMIT, parameter


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_dense_experts_in_bfloat16(name):
    """On the CPU, MLX has no such product."""
    model, batch = build(name, mx.bfloat16, quantized=False), tokens(2, LENGTHS[1])
    with pytest.raises(RuntimeError, match="only supports float32"):
        mx.eval(model(batch))
    mlx_anvil.patch(model)
    ours = model(batch)
    mlx_anvil.unpatch(model)
    model.set_dtype(mx.float32)
    assert max_error(ours.astype(mx.float32), model(batch)) <= 5e-2


# ---- what is swapped -------------------------------------------------------------------------------------------------


def test_the_sum_is_found_in_most_architectures():
    found, without = set(), set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        path = Path(mlx_lm.models.__path__[0], f"{module.name}.py")
        if module.name == "switch_layers" or "switch_layers" not in path.read_text():
            continue
        names = vars(importlib.import_module(f"mlx_lm.models.{module.name}")).values()
        classes = [cls for cls in names if inspect.isclass(cls) and cls.__module__.endswith(f".{module.name}")]
        methods = [vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)]
        is_found = any(calls_of(method, SUM_RULES) for method in methods if inspect.isfunction(method))
        (found if is_found else without).add(module.name)
    assert without == {"deepseek_v41", "longcat_flash", "muse_spark"}
    assert len(found) == 40


def test_statements_of_a_sum():
    class Block(nn.Module):
        def __call__(self, x, inds, scores):
            y = self.experts(x, inds)
            y = (y * scores[..., None]).sum(axis=-2).astype(x.dtype)
            return y, inds

    class Other(nn.Module):
        def __call__(self, x, inds, scores):
            rows = self.experts(x, inds)
            y = (rows * scores[..., None]).sum(axis=-2)
            return y + rows.sum(axis=-2)  # the rows are needed

    assert calls_of(Block.__call__, SUM_RULES) == {SUM_OF_EXPERTS}
    assert calls_of(Other.__call__, SUM_RULES) == set()


def test_statements_of_a_shared_expert():
    class Block(nn.Module):
        def __call__(self, x, inds, scores):
            y = self.experts(x, inds)
            y = (y * scores[..., None]).sum(axis=-2)
            return y + self.shared_expert(x)

    class OfTheSum(nn.Module):
        def __call__(self, x, inds, scores):
            x = self.experts(x, inds)
            x = (x * scores[..., None]).sum(axis=-2)
            return x + self.shared_expert(x)  # reads the sum, not the tokens

    class IfTheSum(nn.Module):
        def __call__(self, x, inds, scores):
            y = self.experts(x, inds)
            y = (y * scores[..., None]).sum(axis=-2)
            if y.shape[0] > 1:
                y = y + self.shared_expert(x)
            return y

    assert calls_of(Block.__call__, SUM_RULES) == {SHARED_EXPERT}
    for other in (OfTheSum, IfTheSum):
        assert calls_of(other.__call__, SUM_RULES) == {SUM_OF_EXPERTS}


@pytest.mark.parametrize("name", SHARED)
def test_shared_expert_is_part_of_the_call(name, monkeypatch: pytest.MonkeyPatch):
    model, batch, calls = build(name, mx.bfloat16), tokens(2, LENGTHS[1]), []
    original = _ext.quantized_experts

    def recorded(*args, **kwargs):
        calls.append((kwargs["shared"] is not None, kwargs["shared_gate"] is not None))
        return original(*args, **kwargs)

    monkeypatch.setattr(_ext, "quantized_experts", recorded)
    report = mlx_anvil.patch(model)
    mx.eval(model(batch))
    assert set(calls) == {(True, name in WITH_GATE)}
    assert SHARED_EXPERT.what in {row.what for row in report.swapped}


def test_without_the_option():
    model = build("mixtral")
    report = mlx_anvil.patch(model, experts=False)
    assert {row.what for row in report.left if row.why == "experts=False"} >= {"SwitchGLU", "sum of experts"}
    with mlx_anvil.trace() as trace:
        mx.eval(model(tokens(1, 5)))
    assert not {"quantized_experts", "gather_quantized_matmul"} & {event.op for event in trace.events}


@pytest.mark.parametrize(("side", "fused"), [("down_proj", True), ("gate_proj", False)])
def test_formats_of_projections(side, fused):
    """Of mlx-lm's mixed recipes: another format of down is fused, another of gate is not."""

    def format_of(path: str, layer: nn.Module) -> bool | dict[str, int]:
        return is_quantizable(path, layer) and ({"group_size": 32, "bits": 8} if side in path else True)

    model, batch = MODELS["mixtral"].build(), tokens(2, 9)
    nn.quantize(model, group_size=32, bits=4, class_predicate=format_of)
    want = model(batch)
    mlx_anvil.patch(model, **ONLY)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        assert max_error(model(batch), want) <= LIMIT
    assert ("quantized_experts" in {event.op for event in trace.events}) == fused


def test_sum_in_the_dtype_of_the_scores():
    """Where the scores are wider than the rows and the model keeps that, its own sum remains."""
    layer = switch_layers.SwitchGLU(64, 32, 4)
    nn.quantize(layer, group_size=32, bits=4)
    layer.set_dtype(mx.bfloat16)
    x, ids = mx.random.normal((3, 64)).astype(mx.bfloat16), mx.array([[0, 1], [2, 3], [1, 2]])
    scores = mx.random.uniform(shape=(3, 2))
    theirs = (layer(x, ids) * scores[..., None]).sum(axis=-2)
    layer.set_dtype(mx.float32)
    want = (layer(x.astype(mx.float32), ids) * scores[..., None]).sum(axis=-2)
    layer.set_dtype(mx.bfloat16)
    mlx_anvil.patch(layer)
    wide, rounded = summed(layer, x, ids, scores, False), summed(layer, x, ids, scores, True)
    assert (wide.dtype, rounded.dtype) == (mx.float32, mx.bfloat16)
    for ours in (wide, rounded):
        assert max_error(ours, want) <= OUTPUT_FACTOR * max_error(theirs, want) + luck_of_few(rounded)
    assert mx.array_equal((layer(x, ids) * scores[..., None]).sum(axis=-2), wide)


def test_function_that_is_replaced_later(monkeypatch: pytest.MonkeyPatch):
    model, batch, calls = build("mixtral"), tokens(2, LENGTHS[1]), []
    want, original = model(batch), switch_layers._gather_sort
    report = mlx_anvil.patch(model, **ONLY)

    def profiled(x, indices):
        calls.append(x)
        return original(x, indices)

    monkeypatch.setattr(switch_layers, "_gather_sort", profiled)
    assert max_error(model(batch), want) <= LIMIT
    assert len(calls) == 2
    assert "quantized_experts" in {fallback.op for fallback in report.fallbacks}


def test_other_models_are_out_of_reach():
    models = [build("mixtral") for _ in range(2)]
    mlx_anvil.patch(models[0])
    with mlx_anvil.trace() as trace:
        mx.eval(models[1](tokens(1, 5)))
    assert trace.events == []
