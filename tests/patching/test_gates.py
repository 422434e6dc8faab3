"""``patch`` on gates other than plain SwiGLU, in the models of mlx-lm that have them."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import bitnet, deepseek_v41, gemma3n, gemma4_text, phi3small, qwen3_next
from mlx_lm.models.activations import SwigluOAI

import mlx_anvil
from lm_models import ARCHITECTURES, Architecture, tokens
from mlx_anvil.patching import Fallback
from support import luck_of_few, max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
FULL, WINDOWED = "full_attention", "sliding_attention"
THETA = {"rope_theta": 10000.0, "rope_type": "default"}
GEMMA3N = {
    "model_type": "gemma3n",
    **{"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16},
    **{"rms_norm_eps": 1e-5, "vocab_size": 96, "num_key_value_heads": 2, "num_kv_shared_layers": 0},
    **{"vocab_size_per_layer_input": 96, "sliding_window": 8, "max_position_embeddings": 512, "rope_theta": 1e4},
    **{"rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0, "layer_types": [WINDOWED, FULL]},
    **{"hidden_size_per_layer_input": 16, "altup_num_inputs": 2, "altup_coef_clip": 120.0, "laurel_rank": 8},
    **{"altup_correct_scale": True, "altup_active_idx": 0, "activation_sparsity_pattern": [0.9, 0.0]},
}
MINIMAX = {
    **{"hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 96, "shared_intermediate_size": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4},
    **{"num_experts_per_tok": 4, "head_dim": 16, "rotary_dim": 8, "vocab_size": 96, "swiglu_limit": 0.8},
    **{"mlp_layer_types": ["dense", "sparse"]},
}
BLOCKS = [
    {"attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2},
     "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 1.0}}
] * 2  # fmt: skip

MODELS = {
    "gemma": Architecture("gemma", {"head_dim": 16}),
    "gemma2": ARCHITECTURES["gemma2"],
    "gemma3": ARCHITECTURES["gemma3"],
    "gemma3n": Architecture("gemma3n", {"text_config": GEMMA3N}),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **{"head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16},
            **{"vocab_size_per_layer_input": 96, "layer_types": [WINDOWED, FULL], "sliding_window": 8},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 32},
        },
    ),
    "recurrent_gemma": Architecture(
        "recurrent_gemma",
        {
            **{"attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 8},
            **{"block_types": ["recurrent", "attention"]},
        },
    ),
    "spark2_5": Architecture(
        "spark2_5",
        {"head_dim": 16, "sliding_window": 8, "rope_parameters": {FULL: THETA, WINDOWED: THETA}},
    ),
    "gear": Architecture("gear", {"head_dim": 16, "layer_types": [WINDOWED, FULL], "sliding_window": 8}),
    "nemotron-nas": Architecture("nemotron-nas", {"block_configs": BLOCKS, "hidden_act": "gelu"}),
    "gpt_oss": ARCHITECTURES["gpt_oss"],
    "minimax_m3": Architecture("minimax_m3_vl", {"text_config": MINIMAX}),
    "deepseek_v41": Architecture(
        "deepseek_v41",
        {
            **{"head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16},
            **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 4, "swiglu_limit": 0.5},
        },
    ),
}
# Without patch, their gradients raise: of the router's choice, and because Model skips the constructor of nn.Module.
NO_GRADIENTS = {"deepseek_v41", "recurrent_gemma"}


def loss(model: nn.Module, batch: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")


def gradients(model: nn.Module, batch: mx.array) -> dict[str, mx.array]:
    result = dict(tree_flatten(nn.value_and_grad(model, loss)(model, batch)[1]))
    mx.eval(result)
    return result


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model, batch = MODELS[name].build(), tokens(2, 13)
    want = model(batch)
    wanted = {} if name in NO_GRADIENTS else gradients(model, batch)
    report = mlx_anvil.patch(model)
    assert "gated" in {op for row in report.swapped for op in row.op.split(", ")}
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        assert max_error(model(batch), want) <= LIMIT
    assert "gated" in {event.op for event in trace.events}
    assert report.fallbacks == ()
    if wanted:
        scale, ours = max(mx.abs(x).max().item() for x in wanted.values()), gradients(model, batch)
        assert ours.keys() == wanted.keys()
        for parameter, gradient in ours.items():
            assert max_error(gradient, wanted[parameter], scale=scale) <= LIMIT, parameter
    mlx_anvil.unpatch(model)
    assert mx.array_equal(model(batch), want)


def bitnet_mlp() -> nn.Module:
    """With plain layers: those of BitNet need a GPU."""
    mlp = bitnet.MLP(bitnet.ModelArgs.from_dict(bitnet_options()))
    for name in ("gate_proj", "up_proj", "down_proj"):
        mlp[name] = nn.Linear(*((96, 64) if name == "down_proj" else (64, 96)), bias=False)
    return mlp


def bitnet_options() -> dict[str, object]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 96}
    return {
        "model_type": "bitnet",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    } | sizes


def sparse_mlp() -> nn.Module:
    return gemma3n.MLP(SimpleNamespace(hidden_size=64, intermediate_size=96, activation_sparsity_pattern=[0.9]))


def interleaved_mlp() -> nn.Module:
    """With a limit that clamps some of gate and of up."""
    return phi3small.MLP(SimpleNamespace(hidden_size=64, ff_intermediate_size=96, gegelu_limit=0.5))


GATES = {
    "bitnet": (bitnet_mlp, 1),
    "gemma3n, sparse": (sparse_mlp, 1),
    "phi3small": (interleaved_mlp, 1),
    "gemma4": (gemma4_text.GeGLU, 2),
    "gpt_oss": (SwigluOAI, 2),
    "deepseek_v41": (lambda: deepseek_v41.DeepseekV41SwiGLU(0.7), 2),
    "deepseek_v41 without a limit": (lambda: deepseek_v41.DeepseekV41SwiGLU(0.0), 2),
    "qwen3_next": (lambda: qwen3_next.Qwen3NextRMSNormGated(64), 2),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtypes", [(mx.float32,) * 2, (mx.bfloat16,) * 2, (mx.bfloat16, mx.float32)], ids=str)
def test_parts_of_models(name, dtypes):
    """Values, dtypes and gradients: in bfloat16 by FlashAttention's criterion."""
    make, count = GATES[name]
    module = make()
    inputs = [mx.random.normal((5, 64)).astype(dtype) for dtype in dtypes[:count]]
    module.set_dtype(dtypes[0])
    weight = mx.random.normal((5, 64))

    def results(*given: mx.array) -> list[mx.array]:
        def scalar(*x: mx.array) -> mx.array:
            return (module(*x).astype(mx.float32) * weight).sum()

        return [module(*given), *mx.grad(scalar, argnums=list(range(count)))(*given)]

    theirs = results(*inputs)
    module.set_dtype(mx.float32)
    exact = results(*(x.astype(mx.float32) for x in inputs))
    module.set_dtype(dtypes[0])
    report = mlx_anvil.patch(module)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours = results(*inputs)
        mx.eval(ours)
    assert report.fallbacks == ()
    wanted = {"rms_norm"} if name == "qwen3_next" else {"gated", "silu_gate"}  # which has the gate in it
    assert wanted & {event.op for event in trace.events}
    for our, their, truth in zip(ours, theirs, exact, strict=True):
        assert our.dtype == their.dtype
        luck = luck_of_few(our) if our.dtype == mx.bfloat16 else 1e-5
        assert max_error(our, truth) <= 2 * max_error(their, truth) + luck


QUANTIZED = {"gemma": "gelu", "gemma2": "gelu_tanh", "gemma3n": "gelu_tanh", "nemotron-nas": "gelu"}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_models(name):
    """Gate and both projections are one kernel for up to 8 rows, and more rows are two products and ``gated``."""
    model = MODELS[name].build()
    nn.quantize(model, group_size=32, class_predicate=lambda _, m: type(m) is nn.Linear and m.weight.shape[1] % 32 == 0)
    few, many = tokens(1, 5), tokens(2, 13)
    wanted = [model(few), model(many)]
    report = mlx_anvil.patch(model)
    assert "gated, quantized_swiglu" in {row.op for row in report.swapped} or name == "nemotron-nas"
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        assert max_error(model(few), wanted[0]) <= LIMIT
    assert any(kernel.startswith("quantized_swiglu") for kernel in trace.kernels)
    assert "gated" not in {event.op for event in trace.events} or name == "gemma3n"  # of its other layers
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        assert max_error(model(many), wanted[1]) <= LIMIT
    assert "gated" in {event.op for event in trace.events}
    assert report.fallbacks == ()


@pytest.mark.parametrize("quantized", [True, False])
def test_quantized_mlp_with_relu2_and_a_norm(quantized):
    mlp, x = bitnet_mlp(), mx.random.normal((2, 3, 64))
    nn.quantize(mlp, group_size=32, bits=4)
    want = mlp(x)
    report = mlx_anvil.patch(mlp, quantized=quantized)
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        assert max_error(mlp(x), want) <= LIMIT
    ops = {event.op for event in trace.events}
    assert ("quantized_swiglu" if quantized else "gated") in ops
    assert ("gated" in ops) != quantized
    assert report.fallbacks == ()


def test_another_slope_than_that_of_gpt_oss():
    module, x = SwigluOAI(alpha=1.0), mx.random.normal((2, 8))
    want = module(x, x)
    report = mlx_anvil.patch(module)
    assert mx.array_equal(module(x, x), want)
    assert report.fallbacks == (Fallback("gated", "alpha is 1.0; allowed: 1.702.", 1),)


def test_activation_that_is_replaced_later(monkeypatch):
    """In an MLP whose method is rewritten, with an activation that is an attribute of mlx.nn."""
    model, batch, calls = MODELS["gemma2"].build(), tokens(1, 5), []
    original, want = nn.gelu_approx, model(batch)
    mlx_anvil.patch(model)

    def profiled(x: mx.array) -> mx.array:
        calls.append(x)
        return original(x)

    monkeypatch.setattr(nn, "gelu_approx", profiled)
    assert max_error(model(batch), want) <= LIMIT
    assert len(calls) == 2  # one a layer
    monkeypatch.undo()
    assert max_error(model(batch), want) <= LIMIT
    assert len(calls) == 2


def test_activations_of_experts_belong_to_one_model():
    """One is swapped if the model's own class makes it."""
    models = [MODELS["gpt_oss"].build() for _ in range(2)]
    report = mlx_anvil.patch(models[0])
    assert "model.layers.0.mlp.experts.activation" in {row.path for row in report.swapped}
    batch = tokens(1, 5)
    with mlx_anvil.trace() as trace:
        mx.eval(models[1](batch))
    assert trace.events == []


def test_without_the_option():
    model, batch = MODELS["gemma2"].build(), tokens(1, 5)
    report = mlx_anvil.patch(model, swiglu=False)
    with mlx_anvil.trace() as trace:
        mx.eval(model(batch))
    assert "gated" not in {event.op for event in trace.events}
    assert {row.why for row in report.left if "gated" in row.op} == {"swiglu=False"}
