"""Models with multi-head latent attention: ``patch`` puts ``mla_decode`` in place of a decode in absorbed form."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_anvil
from expert_models import MODELS, OPTIONS
from lm_models import Architecture, tokens
from mlx_anvil.patching import _latent_rules
from support import max_error

pytestmark = pytest.mark.cpu_only

LONGCAT = {"attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True}
LONGCAT |= {"mla_scale_kv_lora": True, "zero_expert_num": 1, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64}
LONGCAT |= {"num_layers": 2, "router_bias": False, "num_attention_heads": 4, "rope_theta": 1e4}
NAMES = ("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_linear", "mistral4")
LATENT = {name: MODELS[name] for name in NAMES}
LATENT["longcat_flash"] = Architecture("longcat_flash", OPTIONS | LONGCAT)
ONLY = dict.fromkeys(("swiglu", "quantized", "norm", "rope", "router", "experts", "recurrence"), False)
WHAT = _latent_rules.LATENT_ATTENTION.what


def generated(model, batch: mx.array, count: int = 5) -> tuple[mx.array, mx.array]:
    """Greedy tokens after the prompt, and the logits that chose them."""
    cache = make_prompt_cache(model)
    logits = model(batch, cache=cache)[:, -1]
    chosen, scores = [], []
    for _ in range(count):
        token = mx.argmax(logits, axis=-1)
        chosen.append(token)
        logits = model(token[:, None], cache=cache)[:, -1]
        scores.append(logits)
    results = mx.stack(chosen), mx.stack(scores)
    mx.eval(results)
    return results


@pytest.mark.parametrize("name", LATENT)
def test_models(name, seed):
    model, batch = LATENT[name].build(), tokens(1, 13)
    want_tokens, want_logits = generated(model, batch)
    report = mlx_anvil.patch(model, **ONLY)
    assert WHAT in {row.what for row in report.swapped if row.op == "mla_decode"}
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours, logits = generated(model, batch)
    assert any(kernel.startswith("mla_decode") for kernel in trace.kernels)
    assert report.fallbacks == ()
    assert (ours == want_tokens).all().item()
    assert max_error(logits, want_logits) <= 2e-5
    mlx_anvil.unpatch(model)
    _, again = generated(model, batch)
    assert mx.array_equal(again, want_logits)


def test_batch_with_a_mask():
    """Two sequences of unequal length: the shorter has padding at its left, which a bool mask hides."""
    model = LATENT["deepseek_v3"].build()
    attention = model.model.layers[0].self_attn
    x = mx.random.normal((2, 1, 64))
    latent, rope = (mx.random.normal((2, 1, 9, dim)) for dim in (32, 16))

    class Cache:
        offset = 9

        def update_and_fetch(self, keys, values):
            return mx.concatenate([latent, keys], axis=2), mx.concatenate([rope, values], axis=2)

    mask = mx.arange(10) >= mx.array([[0], [4]])
    want = attention(x, mask[:, None, None], Cache())
    mlx_anvil.patch(model, **ONLY)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours = attention(x, mask[:, None, None], Cache())
        mx.eval(ours)
    assert any(kernel.startswith("mla_decode") for kernel in trace.kernels)
    assert max_error(ours, want) <= 2e-5


def test_prompts_and_gradients_are_as_before():
    model, batch = LATENT["deepseek_v3"].build(), tokens(2, 13)
    want = model(batch)
    mlx_anvil.patch(model, **ONLY)
    assert max_error(model(batch), want) <= 2e-5


def test_not_without_attention():
    report = mlx_anvil.patch(LATENT["deepseek_v3"].build(), **ONLY, attention=False)
    assert WHAT in {row.what for row in report.left}


def test_what_the_op_does_not_take():
    """Ranks above 512 run as MLX ops."""
    model, batch = Architecture("deepseek_v3", OPTIONS | {"kv_lora_rank": 520}).build(), tokens(1, 5)
    want = generated(model, batch, 2)[1]
    report = mlx_anvil.patch(model, **ONLY)
    assert max_error(generated(model, batch, 2)[1], want) <= 2e-5
    assert {fallback.op for fallback in report.fallbacks} == {"mla_decode"}
