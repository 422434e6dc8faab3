"""``mlx_anvil.lm.PagedCache``: a batch of sequences in pages gives what each sequence gives alone."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

import mlx_anvil
from lm_models import ARCHITECTURES, Architecture, tokens
from mlx_anvil.lm import PagedCache
from support import assert_same_bits, max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
# Plain, windows in some layers, windows and sinks, softcap and a mask array, a mixture of experts.
MODELS = ("qwen3", "gemma3_text", "gpt_oss", "gemma2", "qwen3_moe")
LENGTHS = (5, 40, 17)


def build(module: str = "qwen3", **options: Any) -> nn.Module:
    architecture = next(x for x in ARCHITECTURES.values() if x.module == module)
    return Architecture(module, architecture.options | options).build()


def run_alone(model: nn.Module, prompt: mx.array, more: mx.array, caches: list[Any]) -> mx.array:
    """The logits of a prompt's last token, and of each token that follows."""
    logits = [model(prompt[None], cache=caches)[0, -1]]
    return mx.stack(logits + [model(token.reshape(1, 1), cache=caches)[0, -1] for token in more])


def run_paged(model: nn.Module, prompts: list[mx.array], more: mx.array, cache: PagedCache) -> list[mx.array]:
    """The same, of all prompts in one batch. ``more`` is ``[prompts, tokens]``."""
    sequences = [cache.new_sequence() for _ in prompts]
    counts = [prompt.size for prompt in prompts]
    batch = mx.stack([mx.pad(prompt, (0, max(counts) - prompt.size)) for prompt in prompts])
    rows = model(batch, cache=cache.step(sequences, counts))
    logits = [[row[count - 1]] for row, count in zip(rows, counts, strict=True)]
    for column in more.T:
        for own, row in zip(logits, model(column[:, None], cache=cache.step(sequences)), strict=True):
            own.append(row[-1])
    return [mx.stack(own) for own in logits]


@pytest.mark.parametrize("page_size", [1, 16, 23])
@pytest.mark.parametrize("module", MODELS)
def test_logits_are_those_of_each_sequence_alone(module: str, page_size: int):
    model = build(module)
    prompts, more = [tokens(n) for n in LENGTHS], tokens(len(LENGTHS), 3)
    expected = [run_alone(model, *own, make_prompt_cache(model)) for own in zip(prompts, more, strict=True)]
    mlx_anvil.patch(model)
    with mlx_anvil.strict():
        found = run_paged(model, prompts, more, PagedCache(model, pages=80, page_size=page_size))
    for result, exact in zip(found, expected, strict=True):
        assert max_error(result, exact) <= LIMIT


@pytest.mark.parametrize("bits", [4, 8, (8, 4)], ids=str)
def test_quantized_pages(bits: Any):
    """Of one number of bits they are those of mlx-lm's quantized cache."""
    model = build(head_dim=32)
    mlx_anvil.patch(model)
    prompts, more = [tokens(n) for n in LENGTHS], tokens(len(LENGTHS), 3)
    cache = PagedCache(model, pages=40, page_size=16, kv_bits=bits, kv_group_size=32)
    found = run_paged(model, prompts, more, cache)
    for result, prompt, row in zip(found, prompts, more, strict=True):
        if isinstance(bits, int):
            caches = [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]
            assert max_error(result, run_alone(model, prompt, row, caches)) <= LIMIT
        else:
            plain = run_alone(model, prompt, row, make_prompt_cache(model))
            assert 1e-4 < max_error(result, plain) < 0.5
    assert cache.nbytes < 0.6 * 40 * 16 * sum(2 * 2 * 32 * 4 for _ in model.layers)


def test_sequences_share_a_prefix_until_they_write():
    model = build()
    prompt, ends = tokens(21), tokens(3, 4)
    expected = [run_alone(model, mx.concatenate([prompt, end[:1]]), end[1:], make_prompt_cache(model)) for end in ends]
    mlx_anvil.patch(model)
    cache = PagedCache(model, pages=8, page_size=8)  # no more than needed
    first = cache.new_sequence()
    model(prompt[None], cache=cache.step([first], 21))
    forks = [first, first.fork(), first.fork()]
    assert cache.free_pages == 5
    assert forks[1].pages == first.pages
    logits = []
    for column in ends.T:
        logits.append(model(column[:, None], cache=cache.step(forks))[:, -1])
    assert [x.pages[:2] for x in forks] == [first.pages[:2]] * 3
    assert len({x.pages[2] for x in forks}) == 3
    for result, exact in zip(mx.stack(logits, 1), expected, strict=True):
        assert max_error(result, exact) <= LIMIT
    for sequence in forks:
        sequence.release()
        sequence.release()
    assert cache.free_pages == 8


def test_a_fork_of_whole_pages_copies_none():
    model = build()
    mlx_anvil.patch(model)
    cache = PagedCache(model, pages=4, page_size=8)
    first = cache.new_sequence()
    model(tokens(1, 12), cache=cache.step([first], 12))
    fork = first.fork(8)
    model(tokens(1, 1), cache=cache.step([fork]))
    assert (len(fork), fork.pages[0], cache.free_pages) == (9, first.pages[0], 1)


def test_trimmed_tokens_are_forgotten():
    model = build()
    mlx_anvil.patch(model)
    prompt, wrong, right = tokens(14), tokens(1, 5), tokens(1, 2)
    cache = PagedCache(model, pages=3, page_size=8)
    sequence = cache.new_sequence()
    model(prompt[None], cache=cache.step([sequence], 14))
    model(wrong, cache=cache.step([sequence], 5))
    assert (len(sequence), cache.free_pages) == (19, 0)
    sequence.trim(5)
    assert (len(sequence), cache.free_pages) == (14, 1)
    found = model(right, cache=cache.step([sequence], 2))
    other = PagedCache(model, pages=3, page_size=8)
    alone = other.new_sequence()
    model(prompt[None], cache=other.step([alone], 14))
    assert_same_bits(found, model(right, cache=other.step([alone], 2)))


def test_pages_are_written_in_place():
    model = build()
    mlx_anvil.patch(model)
    cache = PagedCache(model, pages=4096, page_size=16)
    sequence = cache.new_sequence()
    mx.eval(model(tokens(1, 5), cache=cache.step([sequence], 5)))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        mx.eval(model(tokens(1, 1), cache=cache.step([sequence])))
    assert mx.get_peak_memory() - before < cache.nbytes / 8


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_step_without_enough_pages_changes_nothing():
    model = build()
    mlx_anvil.patch(model)
    cache = PagedCache(model, pages=3, page_size=8)
    a, b = cache.new_sequence(), cache.new_sequence()
    model(tokens(1, 8), cache=cache.step([a], 8))
    with pytest.raises(RuntimeError, match=r"^\[PagedCache\] 3 pages are needed and 2 of 3 are free; release"):
        cache.step([a, b], [1, 9])
    assert (len(a), len(b), cache.free_pages) == (8, 0, 2)


def test_models_that_it_does_not_take():
    model = build()
    with pytest.raises(ValueError, match=r"^\[PagedCache\] model is not patched; allowed: a model after mlx_anvil"):
        PagedCache(model, pages=1)
    with pytest.raises(TypeError, match=r"^\[PagedCache\] model is a list; allowed: an mlx.nn.Module"):
        PagedCache([model], pages=1)  # type: ignore[arg-type]
    model.make_cache = lambda: [QuantizedKVCache()]
    mlx_anvil.patch(model)
    with pytest.raises(ValueError, match=r"^\[PagedCache\] the model has a QuantizedKVCache; allowed: KVCache, and"):
        PagedCache(model, pages=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pages": 0}, ValueError, "pages is 0; allowed: at least 1"),
        ({"pages": 2.0}, TypeError, "pages has type float; allowed: int"),
        ({"page_size": -1}, ValueError, "page_size is -1; allowed: at least 1"),
        ({"kv_bits": 7}, ValueError, "kv_bits is 7; allowed: 2, 3, 4, 5, 6, 8, a pair"),
        ({"kv_bits": (4, 4, 4)}, ValueError, "kv_bits is .*; allowed: "),
        ({"kv_bits": 4, "kv_group_size": 48}, ValueError, "kv_group_size is 48; allowed: 32, 64, 128"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str):
    model = build()
    mlx_anvil.patch(model)
    with pytest.raises(error, match=r"^\[PagedCache\] " + message):
        PagedCache(model, **{"pages": 4} | options)


def test_bad_steps():
    model = build()
    mlx_anvil.patch(model)
    cache, other = PagedCache(model, pages=4), PagedCache(model, pages=4)
    a, b, released = cache.new_sequence(), cache.new_sequence(), cache.new_sequence()
    released.release()
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ([], 1, ValueError, "sequences is empty; allowed: at least one"),
        ([a, a], 1, ValueError, "sequences has one twice"),
        ([released], 1, ValueError, "a sequence is of another cache, or was released"),
        ([other.new_sequence()], 1, ValueError, "a sequence is of another cache, or was released"),
        ([3], 1, TypeError, "sequences has a int; allowed: Sequence"),
        ([a, b], [1], ValueError, "new_tokens has 1 entries and sequences 2; allowed: one for each"),
        ([a], 0, ValueError, "new_tokens is 0; allowed: at least 1"),
        ([a], [1.0], TypeError, "new_tokens has type float; allowed: int"),
    ]
    for sequences, new_tokens, error, message in cases:
        with pytest.raises(error, match=r"^\[PagedCache\] " + message):
            cache.step(sequences, new_tokens)
    assert cache.free_pages == 4


def test_calls_that_do_not_fit_their_step():
    model = build()
    mlx_anvil.patch(model)
    cache = PagedCache(model, pages=4)
    sequence = cache.new_sequence()
    layers = cache.step([sequence], 3)
    with pytest.raises(ValueError, match=r"^\[PagedCache\] the model was called with 2 tokens of 1 sequences; allowed"):
        model(tokens(1, 2), cache=layers)
    model(tokens(1, 3), cache=layers)
    with pytest.raises(ValueError, match=r"^\[PagedCache\] the layer was written twice; allowed: one call"):
        model(tokens(1, 3), cache=layers)


def test_bad_forks():
    model = build()
    mlx_anvil.patch(model)
    sequence = PagedCache(model, pages=4).new_sequence()
    with pytest.raises(ValueError, match=r"^\[PagedCache\] length is 1; allowed: 0 to 0, the sequence's length"):
        sequence.fork(1)
    with pytest.raises(TypeError, match=r"^\[PagedCache\] count is a str; allowed: int"):
        sequence.trim("1")  # type: ignore[arg-type]
    sequence.release()
    with pytest.raises(ValueError, match=r"^\[PagedCache\] the sequence was released"):
        sequence.fork()
