"""Routers that ``patch`` swaps: mlx-lm's ``group_expert_select``, and functions like it."""

import importlib
import inspect
from itertools import product
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_anvil
from lm_models import Architecture, greedy, tokens
from mlx_anvil.patching import _left, _routers
from support import max_error

pytestmark = pytest.mark.cpu_only

NAMES = {
    **dict.fromkeys(("bailing_moe", "bailing_moe_linear", "deepseek_v3", "deepseek_v32"), "group_expert_select"),
    **dict.fromkeys(("dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"), "group_expert_select"),
    **dict.fromkeys(("mimo_v2_flash", "nemotron_h"), "group_expert_select"),
    **dict.fromkeys(("bailing_moe_v3", "kimi_k3", "kimi_linear"), "_group_expert_select"),
    **{"mistral4": "mistral4_expert_select", "step3p5": "moe_gate_select"},
}
# Their names for the same.
BIASES = ("bias", "e_score_correction_bias", "expert_bias", "router_bias")
LOGITS, NORMS = ("gates", "logits"), ("norm_topk_prob", "renormalize")
EXPERTS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1}
EXPERTS |= {"moe_intermediate_size": 32, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
MODELS = {
    "deepseek_v3": Architecture(
        "deepseek_v3",
        EXPERTS
        | {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "qk_nope_head_dim": 32},
    ),
    "glm4_moe": Architecture(
        "glm4_moe",
        EXPERTS
        | {
            **{"max_position_embeddings": 512, "head_dim": 16, "use_qk_norm": True, "rope_scaling": None},
            **{"attention_bias": False, "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1},
        },
    ),
}
ONLY = dict.fromkeys(("attention", "swiglu", "quantized", "norm", "rope", "experts", "recurrence"), False)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"mlx_lm.models.{name}")


def router_calls(report: mlx_anvil.patching.Report) -> set[str]:
    return {row.what for row in report.swapped if row.op == "softmax_topk"}


def check_router(router, values: dict) -> None:
    """The same experts and weights, in any order."""
    arguments = [values[name] for name in inspect.signature(router).parameters]
    (indices, weights), (ours, ours_weights) = router(*arguments), _routers.swapped(router)(*arguments)
    assert (weights.dtype, indices.dtype) == (ours_weights.dtype, ours.dtype)
    by_index, ours_by_index = mx.argsort(indices, axis=-1), mx.argsort(ours, axis=-1)
    chosen = mx.take_along_axis(indices, by_index, axis=-1)
    np.testing.assert_array_equal(np.array(mx.take_along_axis(ours, ours_by_index, axis=-1)), np.array(chosen))
    expected = mx.take_along_axis(weights, by_index, axis=-1).astype(mx.float32)
    limit = 1e-6 if weights.dtype == mx.float32 else 4e-3
    assert max_error(mx.take_along_axis(ours_weights, ours_by_index, axis=-1).astype(mx.float32), expected) <= limit


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_every_router_chooses_as_before(name, dtype):
    router = getattr(module_of(name), NAMES[name])
    assert _routers.is_router(router)
    if name == "kimi_linear" and dtype == mx.bfloat16:
        pytest.skip("it rounds scores to bfloat16, where many are equal; among equals the choice is free")
    # Different logits, also in bfloat16, and no x beside -x: their sigmoids add up to 1, and groups would be equal.
    places = mx.argsort(mx.random.uniform(shape=(40, 32)), axis=-1)
    gates, bias = (0.25 * places - 4.0625).astype(dtype), 0.3 * mx.random.normal((32,))
    cases = ((1, 1, 4, True), (4, 2, 6, True), (8, 4, 6, False), (4, 4, 6, True))
    with_and_without = (
        (bias, None) if name.startswith(("bailing_moe", "kimi")) and name != "bailing_moe_v3" else (bias,)
    )
    scores = ("sigmoid", "softmax") if "score_function" in inspect.signature(router).parameters else ("sigmoid",)
    for (n_group, topk_group, k, norm), own, score in product(cases, with_and_without, scores):
        values = {"top_k": k, "n_group": n_group, "topk_group": topk_group, "routed_scaling_factor": 2.5}
        values |= dict.fromkeys(LOGITS, gates) | dict.fromkeys(NORMS, norm) | dict.fromkeys(BIASES, own)
        check_router(router, values | {"score_function": score})


def test_unknown_scores_are_refused_as_before():
    router = module_of("kimi_linear")._group_expert_select
    arguments = (mx.zeros((2, 8)), None, 2, 1, 1, 1.0, True, "tanh")
    for function in (router, _routers.swapped(router)):
        with pytest.raises(ValueError, match="Unsupported MoE router activation 'tanh'"):
            function(*arguments)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_models(name, dtype):
    """With the router alone swapped, its inputs are those of the unpatched model."""
    model, batch = MODELS[name].build(dtype), tokens(2, 13)
    if dtype == mx.bfloat16:  # on the CPU, MLX multiplies experts of 16 bits only if they are quantized
        nn.quantize(model, group_size=32, bits=4)
    want, wanted_tokens = model(batch), greedy(model, batch[:1], 8)
    report = mlx_anvil.patch(model, **ONLY)
    assert router_calls(report) == {f"group_expert_select of {name}"}
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours = model(batch)
        mx.eval(ours)
    assert "softmax_topk" in {event.op for event in trace.events}
    assert max_error(ours.astype(mx.float32), want.astype(mx.float32)) <= (2e-5 if dtype == mx.float32 else 2e-2)
    assert greedy(model, batch[:1], 8) == wanted_tokens
    mlx_anvil.unpatch(model)
    assert mx.array_equal(model(batch), want)


def test_gradients_of_a_model():
    """Every parameter, the bias of the choice included, whose gradient is zeros before and after."""
    model, batch = MODELS["deepseek_v3"].build(), tokens(2, 9)
    loss = nn.value_and_grad(model, lambda m: (m(batch) ** 2).mean())
    _, want = loss(model)
    mlx_anvil.patch(model, **ONLY)
    _, ours = loss(model)
    before = dict(tree_flatten(want))
    for path, gradient in tree_flatten(ours):
        if path.endswith("e_score_correction_bias"):
            assert not gradient.any()
        else:
            assert max_error(gradient, before[path]) <= 2e-5, path


def test_router_is_an_option():
    model = MODELS["glm4_moe"].build()
    report = mlx_anvil.patch(model, router=False)
    assert not router_calls(report)
    assert "router=False" in {row.why for row in report.left}
    assert _left.OTHER_ROUTER not in {row.why for row in report.left}


def test_another_function_of_that_name_is_left(monkeypatch: pytest.MonkeyPatch):
    def other(gates, e_score_correction_bias, top_k, n_group, topk_group, routed_scaling_factor, norm_topk_prob):
        scores = mx.sigmoid(gates)
        indices = mx.argsort(-scores, axis=-1)[..., :top_k]
        return indices, mx.take_along_axis(scores, indices, axis=-1)

    module = module_of("glm4_moe")
    other.__module__ = module.__name__
    monkeypatch.setattr(module, "group_expert_select", other)
    assert not _routers.is_router(other)
    model = MODELS["glm4_moe"].build()
    assert not router_calls(mlx_anvil.patch(model))
