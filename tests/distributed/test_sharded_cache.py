"""A cache that is split over processes gives the logits of one process with mlx-lm's caches."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import sharded_programs as programs
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache
from sharded_programs import Conversation

import mlx_anvil
from mlx_anvil import distributed
from mlx_anvil.distributed import ShardedKVCache, _local, make_sharded_cache
from mlx_anvil.distributed._layout import BLOCK, Layout

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
EVERY_MODEL = (
    Conversation("llama", (13, 8)),
    Conversation("qwen3", (37, 3), batch=2),
    Conversation("gemma2", (14, 2)),  # softcap, and a mask as an array
    Conversation("gemma3", (45, 30)),  # windows in some layers
    Conversation("gpt_oss", (45, 30), batch=2),  # and sinks
    Conversation("mistral", (45, 30)),
)
# Steps of a few tokens, one step for all, and the prompt on every rank.
STEP_SIZES = (4, 2048, 0)


def together(function: Any, count: int, *arguments: Any) -> list[Any]:
    """What each process returns; with one thread each, because together they have a few cores."""
    return _local.results(function, count, *arguments, environment=_local.ONE_THREAD)


def assert_close(result: np.ndarray, exact: np.ndarray) -> None:
    assert result.shape == exact.shape
    assert np.abs(result - exact).max() <= LIMIT * np.abs(exact).max()


def assert_as_alone(
    conversations: tuple[Conversation, ...], found: list[list[list[np.ndarray]]], step_sizes: tuple[int, ...]
) -> None:
    for conversation, of_sizes in zip(conversations, found, strict=True):
        expected = programs.alone(conversation)
        for size, turns in zip(step_sizes, of_sizes, strict=True):
            for turn, (result, exact) in enumerate(zip(turns, expected, strict=True)):
                what = f"{conversation}, steps of {size}, prompt {turn}"
                assert np.array_equal(result.argmax(-1), exact.argmax(-1)), what
                error = np.abs(result - exact).max() / np.abs(exact).max()
                assert error <= LIMIT, f"{what}: {error}"


def assert_same_bits_on_all(found: list[Any]) -> None:
    first, *others = found
    for other in others:
        for result, expected in zip(other, first, strict=True):
            np.testing.assert_array_equal(result, expected)


def test_one_process():
    assert_as_alone(EVERY_MODEL, programs.together(EVERY_MODEL, STEP_SIZES), STEP_SIZES)


def test_two_processes():
    length, answer = 501, BLOCK + 16
    prompt, count = 11, 6
    lengths = (45, 30, 1)
    conversations, memory, caches, tokens, low_precision = zip(
        *together(
            programs.each,
            2,
            ("together", (EVERY_MODEL, STEP_SIZES)),
            ("memory", (length, answer)),
            ("changed_caches", ()),
            ("generated", (prompt, count)),
            ("rounded", (lengths, True, "bfloat16")),
        ),
        strict=True,
    )
    assert_as_alone(EVERY_MODEL, conversations[0], STEP_SIZES)
    turns = [[turn for of_sizes in rank for turns in of_sizes for turn in turns] for rank in conversations]
    assert_same_bits_on_all(turns)
    assert_split_and_grown(memory, length, answer)
    for rank in caches:
        assert rank["trimmed tokens"].tolist() == [75, 75]
        assert_close(rank["trimmed"], rank["first"])
        assert_close(rank["restored"], rank["first"])
    model = programs.model_of("llama", patched=False)
    alone = [token for token, _ in generate_step(programs.tokens_of(1, prompt)[0], model, max_tokens=count)]
    # Rank 0 samples the likeliest token, the other one does not.
    assert list(tokens) == [{"likeliest": alone, "sampled": alone, "by mlx-lm": alone}] * 2

    exact, one = (programs.rounded(lengths, False, dtype) for dtype in ("float32", "bfloat16"))
    assert np.abs(low_precision[0] - exact).max() <= 2 * np.abs(one - exact).max() + 1e-5


def assert_split_and_grown(memory: Any, length: int, answer: int) -> None:
    """The answer needs room on both ranks that the prompt did not."""
    expected = programs.alone(Conversation("qwen3", (length,), answer=answer))[0]
    for rank in memory:
        assert_close(rank["logits"], expected)
        assert rank["size"] == length + answer
        assert abs(rank["own"] - (length + answer) / 2) <= BLOCK
        assert rank["room"] == 2 * ShardedKVCache.step
    assert sum(rank["own"] for rank in memory) == length + answer


@pytest.mark.parametrize(
    ("count", "conversations"),
    [
        (3, (Conversation("llama", (1, 13), answer=1), Conversation("gpt_oss", (50, 3), answer=1))),
        (4, (Conversation("qwen3", (3, 21), answer=1), Conversation("gemma3", (50,), answer=1))),
    ],
)
def test_more_processes(count: int, conversations: tuple[Conversation, ...]):
    """With prompts that are shorter than the ranks are many."""
    found = together(programs.together, count, conversations, (5,))
    assert_as_alone(conversations, found[0], (5,))


# ---- decode_attention ------------------------------------------------------------------------------------------------


def decode_cases(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Arrays and options of ``decode_attention``, and the rank of each key."""
    keys, queries = 43, 3

    def case(**options: Any) -> dict[str, Any]:
        q = rng.standard_normal((2, 4, queries, 16), np.float32)
        k, v = (rng.standard_normal((2, 2, keys, dim), np.float32) for dim in (16, 24))
        return {"q": q, "k": k, "v": v, "owners": rng.integers(0, count, keys)} | options

    sinks = rng.standard_normal(4, np.float32)
    causal = {"mask": "causal", "offset": keys - queries}
    return [
        case(scale=0.3),
        case(owners=np.zeros(keys, int), sinks=sinks),  # nothing on the other ranks
        case(owners=np.full(keys, count - 1), sinks=sinks),
        case(softcap=1.5, sinks=sinks, lengths=np.array([keys, 7])),
        case(lengths=np.array([keys, 0])),
        case(mask=rng.random((2, 1, queries, keys)) < 0.5),
        case(mask=rng.standard_normal((queries, keys), np.float32)),
        case(**causal),
        case(**causal, window_size=9, sinks=sinks, softcap=2.0),
        case(window_size=5, offset=keys - queries),
        case(dtype="bfloat16"),
        case(dtype="float16", sinks=sinks.astype(np.float16)),
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_decode_attention(count: int, rng: np.random.Generator):
    cases = decode_cases(rng, count)
    found = together(programs.attended, count, cases) if count > 1 else [programs.attended(cases)]
    for at, case in enumerate(cases):
        options = {key: mx.array(x) if isinstance(x, np.ndarray) else x for key, x in case.items() if key != "owners"}
        q, k, v = (options.pop(name) for name in "qkv")
        dtype = getattr(mx, options.pop("dtype", "float32"))
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        if options.pop("offset", None) is not None and "mask" not in options:
            options["window_size"] = (options["window_size"] - 1, -1)
        out, lse = mlx_anvil.flash_attention(q, k, v, return_lse=True, **options)
        limit = LIMIT if dtype == mx.float32 else 3 * mx.finfo(dtype).eps
        for rank in found:
            result = rank[at]
            exact = np.array(out.astype(mx.float32))
            assert np.abs(result[0] - exact).max() <= limit * np.abs(exact).max(), case
            np.testing.assert_allclose(result[1], np.array(lse), rtol=max(limit, 1e-4), atol=limit)
    for rank in found[1:]:
        for mine, first in zip(rank, found[0], strict=True):
            assert_same_bits_on_all([first, mine])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "tree"}, "mask is 'tree'; allowed: None, \"causal\" or an array"),
        ({"mask": "causal"}, "positions and offset are NoneType and NoneType; allowed with"),
        ({"window_size": 0}, "window_size is 0; allowed: an int of at least 1, or None"),
        ({"window_size": 2, "mask": mx.ones((1, 5))}, "window_size comes with a mask array; allowed: mask None"),
        ({"mask": "causal", "positions": mx.arange(4), "offset": 4}, r"positions has shape \(4,\); allowed: \(5,\)"),
    ],
)
def test_bad_options_of_decode_attention(options: dict[str, Any], message: str):
    q, k = mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 5, 8))
    with pytest.raises(ValueError, match=r"^\[decode_attention\] " + message):
        distributed.decode_attention(q, k, k, **options)


# ---- which rank holds what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 100])
def test_layout(window: int | None, rng: np.random.Generator):
    """Against a list of the owners of all tokens, after random steps."""
    for count in (1, 2, 3, 5):
        layout, owners = Layout(count, window), []
        for _ in range(60):
            kind, tokens = rng.integers(0, 4), int(rng.integers(1, 150))
            if kind == 0:
                parts = layout.split(tokens)
                owners += [rank for rank, own in enumerate(parts) for _ in range(own)]
                assert sum(parts) == tokens
            elif kind == 1:
                begins, ends = layout.place(tokens)
                order = sorted((begin, end, rank) for rank, (begin, end) in enumerate(zip(begins, ends, strict=True)))
                owners += [rank for begin, end, rank in order for _ in range(end - begin)]
            elif kind == 2:
                for _ in range(tokens):
                    owners.append(layout.place(1)[1].index(1))
            else:
                tokens = min(tokens // 3, len(owners))
                lost = layout.trim(tokens)
                kept = owners[: len(owners) - tokens]
                assert lost == [owners.count(rank) - kept.count(rank) for rank in range(count)]
                owners = kept
            first, end = sorted(rng.integers(0, len(owners) + 1, 2).tolist())
            for at, stop in ((first, end), (0, None), (first, None)):
                seen = list(enumerate(owners))[at:stop]
                assert layout.counts(at, stop) == [sum(o == rank for _, o in seen) for rank in range(count)]
                assert layout.positions(0, at, stop) == [p for p, o in seen if o == 0]
            assert layout.length == len(owners)
        again = Layout(count, window)
        again.state = layout.state
        assert (again.length, again.counts()) == (layout.length, layout.counts())


def test_decode_is_balanced():
    layout = Layout(3, None)
    layout.split(200)
    for _ in range(1000):
        layout.place(1)
    assert max(layout.counts()) - min(layout.counts()) <= BLOCK


# ---- memory and errors -----------------------------------------------------------------------------------------------


def test_tokens_are_written_in_place():
    model = programs.model_of("llama")
    cache = make_sharded_cache(model)
    for layer in cache:
        layer.update_and_fetch(*(mx.random.normal((1, 2, 20000, 16)) for _ in range(2)))
    mx.eval(model(mx.array([[1]]), cache=cache))
    mx.eval([layer.state for layer in cache])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        mx.eval(model(mx.array([[1]]), cache=cache))
    assert mx.get_peak_memory() - before < cache[0].nbytes / 8


def test_a_window_drops_older_tokens():
    model = programs.model_of("gemma3")
    cache = make_sharded_cache(model)
    distributed.prefill(model, programs.tokens_of(1, 3001), cache, step_size=64)
    assert cache[0].own_size <= programs.WINDOW + ShardedKVCache.step
    assert (cache[1].own_size, cache[0].size(), cache[0].is_trimmable()) == (3001, 3001, False)


def test_models_that_it_does_not_take():
    model = programs.model_of("llama", patched=False)
    with pytest.raises(ValueError, match=r"^\[ShardedKVCache\] model is not patched; allowed: a model after"):
        make_sharded_cache(model)
    mlx_anvil.patch(model)
    model.make_cache = lambda: [ArraysCache(2)]
    with pytest.raises(ValueError, match=r"^\[ShardedKVCache\] the model has a ArraysCache; allowed: KVCache, and"):
        make_sharded_cache(model)


def test_layers_that_it_does_not_take():
    model = programs.model_of("llama")
    cache = make_sharded_cache(model)
    keys, values = cache[0].update_and_fetch(mx.zeros((1, 2, 1, 16)), mx.zeros((1, 2, 1, 16)))
    with pytest.raises(AttributeError, match=r"^\[ShardedKVCache\] a layer reads .swapaxes of its keys or values"):
        values.swapaxes(-1, -2)
    with pytest.raises(ValueError, match=r"^\[ShardedKVCache\] a layer has a mask of type array that the cache did"):
        keys.attend(mx.zeros((1, 4, 1, 16)), values, scale=1.0, mask=mx.zeros((1, 1)))
    with pytest.raises(ValueError, match=r"^\[ShardedKVCache\] kv_bits is 4; allowed: None"):
        next(generate_step(mx.array([1, 2]), model, prompt_cache=cache, kv_bits=4, quantized_kv_start=0))
    with pytest.raises(ValueError, match=r"^\[ShardedKVCache\] the model was called with a batch of 2; allowed: 1"):
        model(mx.array([[1], [2]]), cache=cache)
    with pytest.raises(ValueError, match=r"^\[ShardedKVCache\] window_size is 0; allowed: an int of at least 1"):
        ShardedKVCache(window_size=0)


@pytest.mark.parametrize("function", [distributed.prefill, distributed.generate])
def test_bad_prompts(function: Any):
    model = programs.model_of("llama")
    cache = make_sharded_cache(model)
    name = rf"^\[{function.__name__}\] "
    with pytest.raises(ValueError, match=name + r"tokens has shape \(0,\); allowed: \[T\] or \[B, T\]"):
        function(model, [], cache=cache)
    with pytest.raises(TypeError, match=name + "tokens has dtype mlx.core.float32; allowed: integers"):
        function(model, [1.0], cache=cache)
    with pytest.raises(TypeError, match=name + "cache has a ArraysCache; allowed: ShardedKVCache"):
        function(model, [1], cache=[ArraysCache(2)])
    with pytest.raises(ValueError, match=name + "cache is empty; allowed: one ShardedKVCache for each layer"):
        function(model, [1], cache=[])
    with pytest.raises(ValueError, match=name + "step_size is 0; allowed: an int of at least 1"):
        function(model, [1], cache=cache, step_size=0)


def test_bad_options_of_generate():
    model = programs.model_of("llama")
    with pytest.raises(ValueError, match=r"^\[generate\] tokens is a batch of 2; allowed: one prompt"):
        distributed.generate(model, mx.array([[1], [2]]))
    with pytest.raises(ValueError, match=r"^\[generate\] options has \['kv_bits'\]; allowed: max_tokens, logits"):
        distributed.generate(model, [1], kv_bits=4)
