"""Small models of real mlx-lm architectures with random weights, each from its own ``ModelArgs``."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

VOCABULARY = 96

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True)
class Architecture:
    """One of mlx-lm's.

    Attributes:
        module: its module in ``mlx_lm.models``.
        options: of its ModelArgs, beside those of ``COMMON`` that it has.
    """

    module: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, dtype: mx.Dtype = mx.float32) -> nn.Module:
        """A model with random weights. Matrices preserve the scale of their inputs, and other parameters stay near
        their defaults."""
        module = importlib.import_module(f"mlx_lm.models.{self.module}")
        args = module.ModelArgs.from_dict({"model_type": self.module} | COMMON | self.options)
        model = module.Model(args)

        def randomised(x: mx.array) -> mx.array:
            if x.ndim < 2:
                return x + 0.2 * mx.random.normal(x.shape)
            return mx.random.normal(x.shape) * x.shape[-1] ** -0.5

        model.update(tree_map(randomised, model.parameters()))
        model.set_dtype(dtype)
        mx.eval(model.parameters())
        return model


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SU_SCALING = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.1 * i for i in range(8)]}
YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = 8
# All of them for each token: one on the border between two would go one way in one run and the other in the next.
EXPERTS = 4

ARCHITECTURES = {
    "llama": Architecture("llama", {"rope_scaling": LLAMA3_SCALING}),
    "mistral": Architecture(
        "llama", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    ),
    "qwen2": Architecture("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Architecture("qwen3", {"head_dim": 16, "tie_word_embeddings": False, "rope_scaling": YARN_SCALING}),
    "gemma2": Architecture("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24.0, "attn_logit_softcapping": 2.0}),
    "gemma3": Architecture(
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "phi3": Architecture("phi3", {"rope_scaling": SU_SCALING, "original_max_position_embeddings": 64}),
    "gpt_oss": Architecture(
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": YARN_SCALING,
        },
    ),
    "cohere": Architecture("cohere", {"layer_norm_eps": 1e-5, "use_qk_norm": True}),
    "starcoder2": Architecture("starcoder2", {"norm_epsilon": 1e-5}),
    "olmo2": Architecture("olmo2"),
    "mixtral": Architecture("mixtral", {"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS}),
    "qwen3_moe": Architecture(
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "tie_word_embeddings": False,
            "norm_topk_prob": True,
        },
    ),
}


def tokens(*shape: int) -> mx.array:
    """Random ones."""
    return mx.random.randint(0, VOCABULARY, shape)


def greedy(model: nn.Module, prompt: mx.array, count: int) -> list[int]:
    """The next tokens, each the likeliest."""
    cache, found, token = make_prompt_cache(model), [], prompt
    for _ in range(count):
        token = mx.argmax(model(token, cache=cache)[:, -1], axis=-1, keepdims=True)
        found.append(int(token.item()))
    return found


def copied(model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
    """Another model with the same parameters."""
    other = build()
    other.update(model.parameters())
    return other


def serve(model: nn.Module, prompts: list[mx.array], more: mx.array, chunk: int = 8) -> list[mx.array]:
    """The logits of steps that a server makes: batches with unequal prompts that it extends, filters and takes apart."""

    def of_tokens(rows: list[int], step: int, caches: list[Any]) -> mx.array:
        return model(more[mx.array(rows), step][:, None], cache=caches)[:, -1]

    def batch(rows: list[int]) -> list[Any]:
        alone = [make_prompt_cache(model) for _ in rows]
        for row, caches in zip(rows[:1], alone[:1], strict=True):
            mx.eval(model(prompts[row][None, :3], cache=caches))  # a prefix that a server has kept
        merged = [kind[0].merge(list(kind)) for kind in zip(*alone, strict=True)]
        counts = [prompts[row].size - (3 if row == rows[0] else 0) for row in rows]
        padding = [max(counts) - count for count in counts]
        rest = [prompts[row][-count:] for row, count in zip(rows, counts, strict=True)]
        padded = mx.stack([mx.pad(x, (0, n)) for x, n in zip(rest, padding, strict=True)])
        for cache in merged:
            cache.prepare(lengths=counts, right_padding=padding)
        for begin in range(0, padded.shape[1], chunk):
            mx.eval(model(padded[:, begin : begin + chunk], cache=merged))
        for cache in merged:
            cache.finalize()
        return merged

    caches = batch([0, 1])
    steps = [of_tokens([0, 1], step, caches) for step in range(3)]
    other = batch([2])
    steps.append(of_tokens([2], 0, other))
    for cache, extension in zip(caches, other, strict=True):
        cache.extend(extension)
    steps += [of_tokens([0, 1, 2], step, caches) for step in range(3, 6)]
    for cache in caches:
        cache.filter(mx.array([1, 2]))
    steps += [of_tokens([1, 2], step, caches) for step in range(6, 8)]
    steps.append(model(more[2:, 8:11], cache=[cache.extract(1) for cache in caches])[:, -1])
    mx.eval(steps)
    return steps


def generated_in_batches(model: nn.Module, prompts: list[list[int]], chunk: int = 8) -> list[list[int]]:
    """Greedy tokens of mlx-lm's generator, which starts two of five prompts at a time and ends them one by one."""
    generator = BatchGenerator(model, max_tokens=8, prefill_step_size=chunk, prefill_batch_size=2)
    uids = generator.insert(prompts, max_tokens=[8, 3, 5, 12, 2])
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    generator.close()
    return list(found.values())
