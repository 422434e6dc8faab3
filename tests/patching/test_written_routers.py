"""Routers that models write out in a method: ``patch`` puts ``softmax_topk`` in their place."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import mlx_anvil
from expert_models import MODELS as EXPERT_MODELS
from lm_models import COMMON, Architecture, tokens
from mlx_anvil.patching import _left
from mlx_anvil.patching._router_rules import GROUPS, SIGMOID, SOFTMAX
from support import max_error

pytestmark = pytest.mark.cpu_only

EXPERTS = {
    **{"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_topk": 3},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32},
    **{"n_shared_experts": 1, "num_shared_experts": 1, "num_shared_expert": 1, "decoder_sparse_step": 1},
    **{"norm_topk_prob": True, "mlp_only_layers": [], "moe_layer_freq": 1, "first_k_dense_replace": 0},
    **{"head_dim": 16, "tie_word_embeddings": False, "attention_bias": False, "sliding_window": 8, "rotary_dim": 16},
}
GRANITE = {"logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
JAMBA = {"attn_layer_offset": 0, "attn_layer_period": 2, "expert_layer_offset": 0, "expert_layer_period": 1}
JAMBA |= {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2}
HUNYUAN = {"use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": False, "cla_share_factor": 1}
HUNYUAN["rope_scaling"] = {"type": "dynamic", "alpha": 1.0, "factor": 1.0}
QWEN3_NEXT = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
QWEN3_NEXT |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5}
QWEN3_NEXT["full_attention_interval"] = 2
PHIXTRAL = {"num_vocab": 96, "model_dim": 64, "num_heads": 4, "num_layers": 2}
MELLUM = {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": {"rope_theta": 10000.0}}}
OPTIONS = {
    "Klear": {},
    "deepseek": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "granitemoe": GRANITE,
    "granitemoehybrid": GRANITE | {"layer_types": ["attention"] * 2},
    "hunyuan": HUNYUAN,
    "jamba": JAMBA,
    "mellum": MELLUM,
    "minimax": {},
    "minimax_m3_vl": {"text_config": COMMON | EXPERTS | {"moe_layer_freq": [1, 1]}},
    "mixtral": {},
    "olmoe": {},
    "phixtral": PHIXTRAL,
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": QWEN3_NEXT,
}
MODELS = {name: Architecture(name, EXPERTS | options) for name, options in OPTIONS.items()}
ONLY = dict.fromkeys(("attention", "swiglu", "quantized", "norm", "rope", "experts", "recurrence"), False)
# Of the models of tests/patching/test_experts.py, with as many experts, so that there is a choice.
SIXTEEN = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 16)
THREE = dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_k", "num_experts_per_token"), 3)
WHAT = dict.fromkeys(
    ("Klear", "minimax", "minimax_m3_vl", "deepseek_v41", "laguna", "lfm2_moe", "llama4"), SIGMOID.what
)
WHAT |= dict.fromkeys(("afmoe", "bailing_hybrid", "deepseek_v2"), GROUPS.what)
CHOICES = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
OTHERS = ("afmoe", "bailing_hybrid", "deepseek_v2", "deepseek_v41", "ernie4_5_moe", "gemma4_text", "laguna", "lfm2_moe")
for name in OTHERS:
    MODELS[name] = Architecture(name, EXPERT_MODELS[name].options | SIXTEEN | THREE | CHOICES)
LLAMA4 = EXPERT_MODELS["llama4"].options["text_config"] | {"num_local_experts": 16}
MODELS["llama4"] = Architecture("llama4", {"text_config": LLAMA4})


def swapped(report: mlx_anvil.patching.Report) -> set[str]:
    return {row.what for row in report.swapped if row.op == "softmax_topk"}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, seed):
    model, batch = MODELS[name].build(), tokens(2, 13)
    want = model(batch)
    report = mlx_anvil.patch(model, **ONLY)
    assert swapped(report) == {WHAT.get(name, SOFTMAX.what)}
    assert not {_left.OWN_ROUTER, _left.OTHER_ROUTER} & {row.why for row in report.left}
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours = model(batch)
        mx.eval(ours)
    assert {event.op for event in trace.events} == {"softmax_topk"}
    assert max_error(ours, want) <= 2e-5
    mlx_anvil.unpatch(model)
    assert mx.array_equal(model(batch), want)


@pytest.mark.parametrize("name", ["gpt_oss", "minimax", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_models_in_bfloat16(name, seed):
    """With all experts for each token: of two experts with the same logit, argpartition may choose the other one."""
    four = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 4)
    model, batch = Architecture(name, MODELS[name].options | four).build(mx.bfloat16), tokens(2, 13)
    nn.quantize(model, group_size=32, bits=4)  # MLX multiplies experts of 16 bits on the CPU only if quantized
    want = model(batch).astype(mx.float32)
    mlx_anvil.patch(model, **ONLY)
    ours = model(batch)
    assert ours.dtype == mx.bfloat16
    assert max_error(ours.astype(mx.float32), want) <= 5e-2


@pytest.mark.parametrize("name", ["granitemoe", "minimax", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_gradients(name, seed):
    model, batch = MODELS[name].build(), tokens(2, 9)
    loss = nn.value_and_grad(model, lambda m: (m(batch) ** 2).mean())
    _, want = loss(model)
    mlx_anvil.patch(model, **ONLY)
    _, ours = loss(model)
    before = dict(tree_flatten(want))
    for path, gradient in tree_flatten(ours):
        assert max_error(gradient, before[path]) <= 2e-5 or not (gradient.any() or before[path].any()), path


def test_router_is_an_option(seed):
    report = mlx_anvil.patch(MODELS["mixtral"].build(), router=False)
    assert not swapped(report)
    assert {(row.what, row.why) for row in report.left if row.op == "softmax_topk"} == {(SOFTMAX.what, "router=False")}


def test_calls_that_the_op_refuses_run_as_before(seed, monkeypatch: pytest.MonkeyPatch):
    model, batch = MODELS["mixtral"].build(), tokens(1, 5)
    want = model(batch)
    report = mlx_anvil.patch(model, **ONLY)
    with monkeypatch.context() as patched:
        patched.setattr(mx, "argpartition", lambda *args, **kwargs: mx.argsort(args[0], axis=-1))
        assert max_error(model(batch), want) <= 2e-5
        assert "was replaced after patch()" in report.fallbacks[0].reason
    assert max_error(model(batch), want) <= 2e-5
