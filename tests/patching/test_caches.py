"""``patch`` writes to mlx-lm's ``KVCache`` by rope_and_cache: the same results, and the same cache, as before."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx_anvil
from lm_models import ARCHITECTURES, Architecture, tokens
from support import assert_same_bits, kernel_names

pytestmark = pytest.mark.cpu_only

# Rotations by a base and by Llama 3's frequencies; Qwen 3 also has norms of queries and keys.
QWEN3 = Architecture("qwen3", {"head_dim": 16, "tie_word_embeddings": False})
MODELS = {name: ARCHITECTURES[name] for name in ("llama", "qwen2")} | {"qwen3": QWEN3}
named = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> nn.Module:
    return MODELS[name].build(mx.float32)


def decode(model: nn.Module, cache: list, prompt: mx.array, following: mx.array) -> mx.array:
    steps = [model(prompt, cache=cache)]
    for i in range(following.shape[1]):
        steps.append(model(following[:, i : i + 1], cache=cache))
        mx.eval(steps)
    return mx.concatenate(steps, axis=1)


def kernels_of_decoding(model: nn.Module, cache: list) -> list[str]:
    mx.eval(model(tokens(1, 5), cache=cache))
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(model(tokens(1, 1), cache=cache))
    return kernel_names(trace)


@named
def test_one_kernel_per_layer(name):
    model = build(name)
    mlx_anvil.patch(model)
    names = kernels_of_decoding(model, [KVCache() for _ in model.layers])
    assert names.count("rope_and_cache_float32") == len(model.layers)
    assert not {"rope_float32", "rope_qk_float32"} & set(names)


@named
def test_the_same_bits_as_two_ropes_and_slice_updates(name, monkeypatch):
    """Past the end of the cache's first block too, where it grows."""
    monkeypatch.setattr(KVCache, "step", 8)
    model, prompt, following = build(name), tokens(2, 5), tokens(2, 14)
    ours, theirs = ([KVCache() for _ in model.layers] for _ in range(2))
    mlx_anvil.patch(model)
    got = decode(model, ours, prompt, following)
    monkeypatch.setattr(KVCache, "keys_and_values", lambda cache: _fetch(cache))  # no longer the known method
    want = decode(model, theirs, prompt, following)
    assert_same_bits(got, want)
    for a, b in zip(ours, theirs, strict=True):
        assert a.offset == b.offset == 19
        assert_same_bits(a.keys[..., :19, :], b.keys[..., :19, :])
        assert_same_bits(a.values[..., :19, :], b.values[..., :19, :])


def _fetch(cache: KVCache) -> tuple[mx.array, mx.array]:
    return cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]


class Own(KVCache):
    """Of another package: it may store something else."""


@pytest.mark.parametrize("make", [Own, lambda: RotatingKVCache(max_size=16)], ids=["subclass", "rotating"])
def test_other_caches_are_left(make):
    model = build("qwen2")
    mlx_anvil.patch(model)
    assert "rope_and_cache_float32" not in kernels_of_decoding(model, [make() for _ in model.layers])


def test_a_replaced_function_is_called(monkeypatch):
    model, calls = build("qwen2"), []
    mlx_anvil.patch(model)
    update = KVCache.update_and_fetch
    monkeypatch.setattr(caches.KVCache, "update_and_fetch", lambda self, k, v: calls.append(1) or update(self, k, v))
    kernels_of_decoding(model, [KVCache() for _ in model.layers])
    assert len(calls) == 2 * len(model.layers)


def test_without_the_option():
    model = build("qwen2")
    mlx_anvil.patch(model, rope=False)
    assert "rope_and_cache_float32" not in kernels_of_decoding(model, [KVCache() for _ in model.layers])


def test_a_cache_of_another_dtype_is_written_as_before():
    model, prompt, following = build("qwen2"), tokens(1, 5), tokens(1, 3)
    want = decode(model, [KVCache() for _ in model.layers], prompt, following)
    mlx_anvil.patch(model)
    cache = [KVCache() for _ in model.layers]
    model(prompt, cache=cache)
    for one in cache:
        one.keys, one.values = one.keys.astype(mx.bfloat16), one.values.astype(mx.bfloat16)
    with mlx_anvil.trace() as trace:
        got = model(following[:, :1], cache=cache)
        mx.eval(got)
    assert "rope_and_cache_float32" not in kernel_names(trace)
    assert mx.abs(got - want[:, 5:6]).max().item() <= 0.05 * mx.abs(want).max().item()


def test_another_rope_is_called():
    """YaRN, which may scale the queries and keys too."""
    model = ARCHITECTURES["qwen3"].build(mx.float32)
    mlx_anvil.patch(model)
    names = kernels_of_decoding(model, [KVCache() for _ in model.layers])
    assert names.count("rope_float32") == 2 * len(model.layers)


def test_unpatched_models_write_as_before():
    model = build("qwen2")
    mlx_anvil.patch(model)
    mlx_anvil.unpatch(model)
    with mlx_anvil.trace() as trace:
        mx.eval(model(tokens(1, 3), cache=[KVCache() for _ in model.layers]))
    assert kernel_names(trace) == []
