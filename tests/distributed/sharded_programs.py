"""Programs that several processes run over a sharded cache (test_sharded_cache.py)."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlx_anvil
from lm_models import ARCHITECTURES, VOCABULARY, Architecture
from mlx_anvil import distributed
from mlx_anvil.distributed import ShardedKVCache, make_sharded_cache

WINDOW = 20  # wider than a rank's part of some prompts, narrower than that of others


def model_of(name: str) -> nn.Module:
    """The same one in every process."""
    architecture = ARCHITECTURES[name]
    options = {**architecture.options}
    if "sliding_window" in options:
        options["sliding_window"] = WINDOW
    mx.random.seed(7)
    return Architecture(architecture.module, options).build()


def tokens_of(batch: int, length: int) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(0, VOCABULARY, (batch, length)))


def alone(name: str, lengths: Sequence[int], batch: int, more: int) -> list[Any]:
    """Of each turn of a conversation: the logits after it, and after each of ``more`` tokens that follow greedily."""
    model = model_of(name)
    cache = make_prompt_cache(model)
    return [_turn(model, model(tokens_of(batch, n), cache=cache)[:, -1], cache, more) for n in lengths]


def _turn(model: nn.Module, logits: mx.array, cache: list[Any], more: int) -> Any:
    found = [logits]
    for _ in range(more):
        token = mx.argmax(found[-1], axis=-1, keepdims=True)
        found.append(model(token, cache=cache)[:, -1])
    return np.array(mx.stack(found))


def conversations(
    cases: Sequence[tuple[str, Sequence[int], int, int]], step_sizes: Sequence[int]
) -> list[list[list[Any]]]:
    """The same over a sharded cache, for each of the cases and sizes of steps; 0 runs a prompt on every rank."""
    results = []
    for name, lengths, batch, more in cases:
        model = model_of(name)
        mlx_anvil.patch(model)
        of_sizes = []
        for step_size in step_sizes:
            cache = make_sharded_cache(model)
            turns = []
            with mlx_anvil.strict():
                for length in lengths:
                    prompt = tokens_of(batch, length)
                    if step_size:
                        logits = distributed.prefill(model, prompt, cache, step_size=step_size)
                    else:
                        logits = model(prompt, cache=cache)[:, -1]
                    turns.append(_turn(model, logits, cache, more))
            of_sizes.append(turns)
        results.append(of_sizes)
    return results
