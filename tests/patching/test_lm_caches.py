"""The caches of mlx-lm in patched models: results as before, and no mask array where arguments of flash_attention say
the same."""

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import (
    BatchKVCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import mlx_anvil
from lm_models import ARCHITECTURES, WINDOW, Architecture, generated_in_batches, serve, tokens
from mlx_anvil.patching._masks import CausalMask
from support import max_error

pytestmark = pytest.mark.cpu_only

DTYPES = (mx.float32, mx.bfloat16)
# Plain, windows in some layers, windows and sinks, experts. MLX's CPU multiplies experts in float32 only.
CASES = [*product(("qwen3", "mistral", "gemma3"), DTYPES), ("gpt_oss", mx.float32), ("qwen3_moe", mx.float32)]
LENGTHS = (21, 4, 13)
LLAMA4 = Architecture(
    "llama4",
    {
        "text_config": {
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "head_dim": 16,
            "hidden_size": 64,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "max_position_embeddings": 512,
            "model_type": "llama4",
            "num_attention_heads": 4,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 2,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
            "vocab_size": 96,
        }
    },
)


class Masks:
    """What attention got, by the number of queries: ``"array"``, or the names of the arguments."""

    def __init__(self) -> None:
        self.of_prompts: set[str] = set()
        self.of_tokens: set[str] = set()

    def note(self, queries: int, what: str) -> None:
        (self.of_tokens if queries == 1 else self.of_prompts).add(what)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Masks]:
    found, options = Masks(), CausalMask.options

    def noted(mask: CausalMask, queries: mx.array, keys: Any) -> dict[str, Any]:
        result = options(mask, queries, keys)
        is_array = isinstance(result["mask"], mx.array)
        found.note(queries.shape[2], "array" if is_array else " ".join(k for k, v in result.items() if v is not None))
        return result

    monkeypatch.setattr(CausalMask, "options", noted)
    return found


def assert_as_before(model: nn.Module, run: Callable[[], list[mx.array]], dtype: mx.Dtype, limit: float = 5e-5) -> None:
    """The logits of a run after ``patch`` are those before; in bfloat16 at most twice as far from float32."""
    expected = flat(run())
    exact = expected
    if dtype != mx.float32:
        model.set_dtype(mx.float32)
        exact = flat(run())
        model.set_dtype(dtype)
    mlx_anvil.patch(model)
    with mlx_anvil.strict():
        found = flat(run())
    if dtype == mx.float32:
        assert max_error(found, exact) <= limit
    else:
        error, usual = (mx.linalg.norm(x - exact).item() for x in (found, expected))
        assert error <= 2 * usual


def flat(logits: list[mx.array]) -> mx.array:
    return mx.concatenate([x.astype(mx.float32).flatten() for x in logits])


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_batches_of_a_server(name: str, dtype: mx.Dtype, masks: Masks):
    model = ARCHITECTURES[name].build(dtype)
    prompts, more = [tokens(n) for n in LENGTHS], tokens(len(LENGTHS), 11)
    assert_as_before(model, lambda: serve(model, prompts, more), dtype)
    assert "mask plan" in masks.of_tokens
    assert "array" not in masks.of_tokens | masks.of_prompts


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt_oss"])
def test_greedy_tokens_of_mlx_lm(name: str, masks: Masks):
    model = ARCHITECTURES[name].build(mx.float32)
    prompts = [tokens(n).tolist() for n in (21, 4, 13, 9, 30)]
    expected = generated_in_batches(model, prompts)
    mlx_anvil.patch(model)
    assert generated_in_batches(model, prompts) == expected
    assert [len(x) for x in expected] == [8, 3, 5, 12, 2]
    assert "mask plan" in masks.of_tokens
    assert "array" not in masks.of_tokens | masks.of_prompts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_left_padded_prompts(dtype: mx.Dtype):
    model = ARCHITECTURES["qwen3"].build(dtype)
    prompts, padding = [tokens(n) for n in LENGTHS], [max(LENGTHS) - n for n in LENGTHS]
    batch = mx.stack([mx.pad(x, (n, 0)) for x, n in zip(prompts, padding, strict=True)])

    def run() -> list[mx.array]:
        caches = [BatchKVCache(padding) for _ in model.layers]
        return [
            *[model(batch[:, a : a + 6], cache=caches)[:, -1] for a in range(0, batch.shape[1], 6)][-1:],
            model(batch[:, :1], cache=caches)[:, -1],
        ]

    assert_as_before(model, run, dtype)


# ---- one sequence ----------------------------------------------------------------------------------------------------

Caches = Callable[[nn.Module], list[Any]]
ROTATING: dict[str, Caches] = {
    "window": make_prompt_cache,
    "keep": lambda model: [RotatingKVCache(max_size=WINDOW, keep=2) for _ in model.layers],
    "plain": lambda model: [KVCache() for _ in model.layers],
}
QUANTIZED = {"quantized": lambda model: [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]}


def chunks(model: nn.Module, caches: list[Any], row: mx.array) -> list[mx.array]:
    """Prompts in chunks, and tokens past the end of a window."""
    ends = [0, 5, 18, 31, *range(32, 44)]
    steps = [model(row[:, a:b], cache=caches) for a, b in pairwise(ends)]
    mx.eval(steps)
    return steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", [*ROTATING, *QUANTIZED])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2"])
def test_windows(name: str, cache: str, dtype: mx.Dtype, masks: Masks):
    if cache in QUANTIZED and name == "gemma2":
        pytest.skip("gemma2 reads no quantized cache")
    wide = {"head_dim": 32} if cache in QUANTIZED else {}
    model = Architecture(ARCHITECTURES[name].module, ARCHITECTURES[name].options | wide).build(dtype)
    make, row = (ROTATING | QUANTIZED)[cache], tokens(1, 48)
    limit = 1e-2 if cache in QUANTIZED else 5e-5  # a number between two codes may become either
    assert_as_before(model, lambda: chunks(model, make(model), row), dtype, limit)
    assert "array" not in masks.of_prompts | masks.of_tokens
    if name != "gemma2" or cache == "keep":
        assert masks.of_prompts == {"mask window_size"}


def test_chunked_attention():
    """Llama 4's own mask of chunks is no window: it stays an array."""
    model, row = LLAMA4.build(), tokens(1, 48)
    assert any(isinstance(cache, ChunkedKVCache) for cache in make_prompt_cache(model))
    assert_as_before(model, lambda: chunks(model, make_prompt_cache(model), row), mx.float32)


# ---- the array -------------------------------------------------------------------------------------------------------


def combined(mask: mx.array, other: mx.array) -> mx.array:
    return mask & other


def changed_in_place(mask: mx.array, other: mx.array) -> mx.array:
    mask &= other
    return mask


def assigned(mask: mx.array, other: mx.array) -> mx.array:
    mask[:] = mask & other
    return mask


class Reader(nn.Module):
    """A model that changes its mask."""

    def __init__(self, change: Callable[[mx.array, mx.array], mx.array]):
        super().__init__()
        self.change = change

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        mask = self.change(base.create_attention_mask(x, cache), x[:, None, None, :, 0] > 0)
        y = x[:, None]
        return mx.fast.scaled_dot_product_attention(y, y, y, scale=1.0, mask=mask)


@pytest.mark.parametrize("change", [combined, changed_in_place, assigned])
def test_a_mask_that_the_model_changes_is_an_array(change: Callable[..., mx.array], masks: Masks):
    x = mx.abs(mx.random.normal((2, 5, 4)))
    x[:, 4] *= -1
    model = Reader(change)
    expected = model(x, BatchKVCache([0, 3]))
    mlx_anvil.patch(model)
    found = model(x, BatchKVCache([0, 3]))
    for row, begin in enumerate((0, 3)):  # without the queries of padding
        assert mx.allclose(found[row, :, begin:], expected[row, :, begin:], rtol=1e-5, atol=1e-6)
    assert not masks.of_prompts


@pytest.mark.parametrize("replaced", ["create_attention_mask", "create_causal_mask"])
def test_a_replaced_function_is_called(replaced: str, monkeypatch: pytest.MonkeyPatch):
    model, calls = ARCHITECTURES["mistral"].build(), []
    mlx_anvil.patch(model)
    module = "mlx_lm.models.llama" if replaced == "create_attention_mask" else "mlx_lm.models.cache"
    original = getattr(base, replaced)
    monkeypatch.setattr(f"{module}.{replaced}", lambda *a, **k: calls.append(1) or original(*a, **k))
    chunks(model, make_prompt_cache(model), tokens(1, 48))
    assert calls
