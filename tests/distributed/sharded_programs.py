"""What the processes of test_sharded_cache.py run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlx_anvil
from lm_models import ARCHITECTURES, VOCABULARY, Architecture
from mlx_anvil import distributed
from mlx_anvil.distributed import make_sharded_cache

WINDOW = 20  # longer than some steps of a prefill, and shorter than others


class Conversation(NamedTuple):
    """Prompts that follow each other, with an answer after each.

    Attributes:
        model: of ``ARCHITECTURES``.
        prompts: their lengths.
        batch: how many conversations of these lengths.
        answer: tokens of an answer, each the likeliest.
    """

    model: str
    prompts: tuple[int, ...]
    batch: int = 1
    answer: int = 2


def model_of(name: str, patched: bool = True) -> nn.Module:
    """The same one in every process."""
    architecture = ARCHITECTURES[name]
    options = {key: WINDOW if key == "sliding_window" else value for key, value in architecture.options.items()}
    mx.random.seed(7)
    model = Architecture(architecture.module, options).build()
    if patched:
        mlx_anvil.patch(model)
    return model


def tokens_of(batch: int, length: int) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(0, VOCABULARY, (batch, length)))


def answered(model: nn.Module, logits: mx.array, cache: list[Any], count: int) -> np.ndarray:
    """The logits after a prompt, and after each token of the answer."""
    found = [logits]
    for _ in range(count):
        found.append(model(mx.argmax(found[-1], axis=-1, keepdims=True), cache=cache)[:, -1])
    return np.array(mx.stack(found))


def alone(conversation: Conversation) -> list[np.ndarray]:
    """The logits of each turn, by mlx-lm as it is."""
    model = model_of(conversation.model, patched=False)
    cache = make_prompt_cache(model)
    return [
        answered(model, model(tokens_of(conversation.batch, n), cache=cache)[:, -1], cache, conversation.answer)
        for n in conversation.prompts
    ]


def together(conversations: Sequence[Conversation], step_sizes: Sequence[int]) -> list[list[list[np.ndarray]]]:
    """The same over a sharded cache, for each size of steps. Size 0 calls the model with the prompt."""
    found = []
    with mlx_anvil.strict():
        for conversation in conversations:
            model = model_of(conversation.model)
            found.append([_turns(model, conversation, size) for size in step_sizes])
    return found


def _turns(model: nn.Module, conversation: Conversation, step_size: int) -> list[np.ndarray]:
    cache = make_sharded_cache(model)
    turns = []
    for length in conversation.prompts:
        prompt = tokens_of(conversation.batch, length)
        if step_size:
            logits = distributed.prefill(model, prompt, cache, step_size=step_size)
        else:
            logits = model(prompt, cache=cache)[:, -1]
        turns.append(answered(model, logits, cache, conversation.answer))
    return turns


def each(*calls: tuple[str, tuple[Any, ...]]) -> list[Any]:
    """Several of these functions, because a process takes longer to start than one of them to run."""
    return [globals()[name](*arguments) for name, arguments in calls]


def memory(length: int, answer: int) -> dict[str, Any]:
    """Of a prompt and its answer: the logits, and what a layer of this rank holds."""
    model = model_of("qwen3")
    cache = make_sharded_cache(model)
    logits = distributed.prefill(model, tokens_of(1, length), cache)
    answers = answered(model, logits, cache, answer)
    layer = cache[0]
    token = layer.nbytes // layer.keys.shape[2]
    return {"logits": answers, "own": layer.own_size, "room": layer.nbytes // token, "size": layer.size()}


def changed_caches() -> dict[str, np.ndarray]:
    """The logits of the same token after the same prompt, in a cache that was trimmed, and in a restored one."""
    model = model_of("qwen3")
    cache = make_sharded_cache(model)
    token = mx.array([[5]])
    distributed.prefill(model, tokens_of(1, 90), cache)
    first = model(token, cache=cache)[:, -1]
    for wrong in (tokens_of(1, 3), tokens_of(1, 70), tokens_of(1, 1)):
        mx.eval(model(wrong, cache=cache))
    trimmed = [layer.trim(75) for layer in cache]
    again = model(token, cache=cache)[:, -1]
    restored = make_sharded_cache(model)
    for layer, other in zip(restored, cache, strict=True):
        other.trim(1)
        layer.state = other.state
    last = model(token, cache=restored)[:, -1]
    found = {"first": first, "trimmed": again, "restored": last}
    return {key: np.array(x) for key, x in found.items()} | {"trimmed tokens": np.array(trimmed)}


def rounded(lengths: Sequence[int], is_sharded: bool, dtype: str) -> np.ndarray:
    """The logits of prompts that follow each other, of a model whose weights are rounded to bfloat16."""
    model = model_of("gpt_oss", patched=False)
    model.set_dtype(mx.bfloat16)
    model.set_dtype(getattr(mx, dtype))
    mlx_anvil.patch(model)
    cache = make_sharded_cache(model) if is_sharded else make_prompt_cache(model)
    found = []
    for length in lengths:
        prompt = tokens_of(2, length)
        logits = distributed.prefill(model, prompt, cache) if is_sharded else model(prompt, cache=cache)[:, -1]
        found.append(logits.astype(mx.float32))
    return np.array(mx.stack(found))


def generated(length: int, count: int) -> dict[str, list[int]]:
    """The likeliest tokens after a prompt, those that each rank would choose in its own way, and mlx-lm's."""
    model = model_of("llama")
    rank = mx.distributed.init().rank()
    prompt = tokens_of(1, length)[0]
    likeliest = list(distributed.generate(model, prompt, max_tokens=count, step_size=4))
    sampled = distributed.generate(
        model, prompt.tolist(), max_tokens=count, sampler=lambda x: mx.argsort(-x, axis=-1)[:, rank]
    )
    by_mlx_lm = generate_step(
        prompt, model, prompt_cache=make_sharded_cache(model), max_tokens=count, prefill_step_size=4
    )
    return {"likeliest": likeliest, "sampled": list(sampled), "by mlx-lm": [token for token, _ in by_mlx_lm]}


def attended(cases: Sequence[dict[str, Any]]) -> list[Any]:
    """``decode_attention`` of arrays and options; each rank takes the keys that ``owners`` gives it."""
    rank, found = mx.distributed.init().rank(), []
    for case in cases:
        own = np.flatnonzero(case["owners"] == rank)
        index = mx.array(own)
        options = {key: mx.array(x) if isinstance(x, np.ndarray) else x for key, x in case.items() if key != "owners"}
        dtype = getattr(mx, options.pop("dtype", "float32"))
        q, k, v = (options.pop(name).astype(dtype) for name in "qkv")
        if "lengths" in case:
            options["lengths"] = mx.array([int((own < length).sum()) for length in case["lengths"]])
        if "offset" in case:
            options["positions"] = index
        if isinstance(case.get("mask"), np.ndarray):
            options["mask"] = options["mask"][..., index]
        out, lse = distributed.decode_attention(q, k[:, :, index], v[:, :, index], return_lse=True, **options)
        found.append((np.array(out.astype(mx.float32)), np.array(lse)))
    return found
