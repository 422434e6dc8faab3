"""mlx-lm Llamas of any shape with random 4-bit weights, and the two steps of text generation: prefill and decode."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_anvil.bench.random_weights import quantized_embedding, quantized_linear


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama, as in mlx-lm's configuration (hidden_size, num_hidden_layers, ...). The output head is not tied
    to the embedding.
    """

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.hidden}/{self.intermediate}"


def random_llama(shape: LlamaShape, dtype: mx.Dtype) -> Any:
    """A model with random weights.

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
    # The float weights of MLX's layers are never evaluated, so only the codes cost time.
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
    """Random token ids, ``[1, count]``."""
    tokens = mx.random.randint(0, shape.vocabulary, (1, count))
    mx.eval(tokens)
    return tokens


def prefill(model: Any, tokens: mx.array) -> Callable[[], None]:
    """Returns a function that prefills: it runs all tokens through the model, with a new cache, and the last one
    through the output head.
    """
    from mlx_lm.models.cache import make_prompt_cache

    def run() -> None:
        hidden = model.model(tokens, make_prompt_cache(model))
        mx.eval(mx.argmax(model.lm_head(hidden[:, -1]), axis=-1))

    return run


def random_cache(model: Any, context: int) -> Any:
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    for part, layer in zip(cache, model.layers, strict=True):
        attention = layer.self_attn
        shape = (1, attention.n_kv_heads, context, attention.head_dim)
        part.update_and_fetch(*(mx.random.normal(shape).astype(layer.input_layernorm.weight.dtype) for _ in range(2)))
    mx.eval([part.state for part in cache])
    return cache


def decode_step(model: Any, tokens: mx.array, context: int = 64) -> Callable[[], None]:
    """Returns a function that decodes one token after ``context`` others, whose keys and values are random."""
    cache = random_cache(model, context)

    def run() -> None:
        mx.eval(mx.argmax(model(tokens, cache)[:, -1], axis=-1))
        for part in cache:
            part.trim(1)

    return run


def generation(model: Any, tokens: mx.array, count: int, context: int = 64) -> Callable[[], None]:
    """Returns a function that generates ``count`` tokens, each after ``context`` others with random keys and values.

    As ``mlx_lm.generate`` does, it builds the graph of the next token while the current one is evaluated.
    """
    cache = random_cache(model, context)

    def next_token(token: mx.array) -> mx.array:
        chosen = mx.argmax(model(token, cache)[:, -1:], axis=-1)
        mx.async_eval(chosen)  # type: ignore[no-untyped-call]
        for part in cache:
            part.trim(1)
        return chosen

    def run() -> None:
        token = next_token(tokens)
        for _ in range(count - 1):
            following = next_token(token)
            mx.eval(token)
            token = following
        mx.eval(token)

    return run
