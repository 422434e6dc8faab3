"""Llamas of mlx-lm with random 4-bit weights, of any shape, and the two things that generating text does with them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_anvil.bench.random_weights import quantized_embedding, quantized_linear


@dataclass(frozen=True)
class LlamaShape:
    """As mlx-lm's configuration names them: hidden_size, num_hidden_layers, and so on. No ties between embedding and
    output head."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.hidden}/{self.intermediate}"


def random_llama(shape: LlamaShape, dtype: mx.Dtype) -> Any:
    """The model, its weights drawn.

    Raises:
        ImportError: mlx-lm is not installed.
    """
    from mlx_lm.models import llama

    model: Any = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            intermediate_size=shape.intermediate,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            rms_norm_eps=1e-5,
            vocab_size=shape.vocabulary,
            tie_word_embeddings=False,
        )
    )
    # The weights of MLX's layers are never evaluated: a model takes as long to make as its codes take to draw.
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    quantized: list[tuple[str, nn.Module]] = []
    for path, leaf in leaves:
        if isinstance(leaf, nn.Linear):
            outputs, inputs = leaf.weight.shape
            quantized.append((path, quantized_linear(inputs, outputs, dtype)))
        elif isinstance(leaf, nn.Embedding):
            count, dims = leaf.weight.shape
            quantized.append((path, quantized_embedding(count, dims, dtype)))
        elif isinstance(leaf, nn.RMSNorm):
            leaf.set_dtype(dtype)
    model.update_modules(tree_unflatten(quantized))
    mx.eval(model.parameters())
    return model


def random_tokens(shape: LlamaShape, count: int) -> mx.array:
    """``[1, count]``."""
    tokens = mx.random.randint(0, shape.vocabulary, (1, count))
    mx.eval(tokens)
    return tokens


def prefill(model: Any, tokens: mx.array) -> Callable[[], None]:
    """Runs all tokens through the model, into a new cache, and the last of them through the output head: what has to be
    done before the first token of an answer is known."""
    from mlx_lm.models.cache import make_prompt_cache

    def run() -> None:
        hidden = model.model(tokens, make_prompt_cache(model))
        mx.eval(mx.argmax(model.lm_head(hidden[:, -1]), axis=-1))

    return run


def decode_step(model: Any, tokens: mx.array, context: int = 64) -> Callable[[], None]:
    """Runs one token after ``context`` others, whose keys and values are drawn, and chooses the next."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    for part, layer in zip(cache, model.layers, strict=True):
        attention = layer.self_attn
        shape = (1, attention.n_kv_heads, context, attention.head_dim)
        part.update_and_fetch(*(mx.random.normal(shape).astype(layer.input_layernorm.weight.dtype) for _ in range(2)))
    mx.eval([part.state for part in cache])

    def run() -> None:
        mx.eval(mx.argmax(model(tokens, cache)[:, -1], axis=-1))
        for part in cache:
            part.trim(1)

    return run
