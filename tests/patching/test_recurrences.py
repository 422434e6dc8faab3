"""Models with recurrences and short convolutions: ``patch`` puts our ops in their place, and nothing else changes."""

import importlib
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

import mlx_anvil
from lm_models import Architecture, generated_in_batches, serve, tokens
from mlx_anvil._check import OUTPUT_FACTOR
from mlx_anvil.patching import _recurrences
from recurrent_models import MODELS
from support import max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32
ONLY = dict.fromkeys(("attention", "swiglu", "quantized", "norm", "rope", "router", "experts"), False)
DELTA = ("bailing_moe_v3", "kimi_k3", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_next")
MAMBA_1 = ("falcon_mamba", "jamba", "mamba")
MAMBA_2 = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "plamo2")
OPS = {
    **dict.fromkeys(MODELS, ()),
    **dict.fromkeys(DELTA, ("gated_delta",)),
    **dict.fromkeys(MAMBA_1, ("selective_scan",)),
    **dict.fromkeys(MAMBA_2, ("ssd_scan",)),
}
NO_GRADIENTS = {"recurrent_gemma"}  # of its cumulative loop, in mlx-lm
NOT_IN_16_BITS = {"bailing_moe_v3", "granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2_moe"}
NOT_IN_16_BITS |= {"nemotron_h", "qwen3_next"}  # experts: MLX's CPU multiplies those in float32 only

models = pytest.mark.parametrize("name", MODELS)


def errors(got: mx.array, want: mx.array) -> mx.array:
    """Of each token, relative to the length of its logits. Where a norm's rows are short, rounding is amplified."""
    assert got.shape == want.shape
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return mx.linalg.norm(got - want, axis=-1) / mx.linalg.norm(want, axis=-1)


def assert_close(got: mx.array, want: mx.array) -> None:
    of_tokens = errors(got, want)
    assert mx.median(of_tokens).item() <= LIMIT
    assert of_tokens.max().item() <= 10 * LIMIT


def assert_states_close(got: list[mx.array], want: list[mx.array]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (mx.linalg.norm((a - b).flatten()) / mx.linalg.norm(b.flatten())).item() <= 5 * LIMIT


def prompt_and_steps(model: nn.Module, prompt: mx.array, more: mx.array, cache: list[Any]) -> mx.array:
    """Logits of a prompt in two pieces, and of what follows, token after token."""
    logits = [model(prompt[:, :5], cache=cache), model(prompt[:, 5:], cache=cache)]
    logits += [model(more[:, i : i + 1], cache=cache) for i in range(more.shape[1])]
    result = mx.concatenate(logits, axis=1)
    mx.eval(result)
    return result


def states(cache: list[Any]) -> list[mx.array]:
    parts = [part for entry in cache for part in (entry.caches if isinstance(entry, CacheList) else (entry,))]
    return [x for part in parts if isinstance(part, ArraysCache) for x in part.cache]


@models
@pytest.mark.parametrize("quantized", [False, True], ids=["full", "4 bits"])
def test_prompts_and_steps(name, quantized):
    model, prompt, more = MODELS[name].build(), tokens(2, 12), tokens(2, 5)
    if quantized:
        nn.quantize(model, group_size=32, bits=4, class_predicate=is_quantizable)
    theirs, ours = make_prompt_cache(model), make_prompt_cache(model)
    want = prompt_and_steps(model, prompt, more, theirs)
    report = mlx_anvil.patch(model)
    swapped = {row.op for row in report.swapped}
    assert {"causal_conv1d", *OPS[name]} <= swapped
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        got = prompt_and_steps(model, prompt, more, ours)
    assert states(ours)
    assert {"causal_conv1d", *OPS[name]} <= {event.op for event in trace.events}
    assert report.fallbacks == ()
    assert_close(got, want)
    assert_states_close(states(ours), states(theirs))
    mlx_anvil.unpatch(model)
    assert mx.array_equal(prompt_and_steps(model, prompt, more, make_prompt_cache(model)), want)


def is_quantizable(_: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0 and layer.weight.shape[-2] > 1


@models
def test_a_cache_goes_from_one_to_the_other(name):
    model, prompt, more = MODELS[name].build(), tokens(1, 9), tokens(1, 4)
    want = prompt_and_steps(model, prompt, more, make_prompt_cache(model))

    def mixed(first: bool) -> mx.array:
        cache, logits, is_patched = make_prompt_cache(model), [], first
        for piece in (prompt, *mx.split(more, 4, axis=1)):
            (mlx_anvil.patch if is_patched else mlx_anvil.unpatch)(model)
            logits.append(model(piece, cache=cache))
            mx.eval(logits[-1])
            is_patched = not is_patched
        return mx.concatenate(logits, axis=1)

    for first in (True, False):
        assert_close(mixed(first), want)


@models
def test_greedy_tokens_of_mlx_lm(name, seed):
    model, prompt = MODELS[name].build(), tokens(13)

    def generated() -> list[int]:
        return [int(token) for token, _ in generate_step(prompt, model, max_tokens=8, prefill_step_size=8)]

    want = generated()
    mlx_anvil.patch(model)
    assert generated() == want


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"nemotron_h"}))
def test_batches_with_padding(name, seed):
    """As a server makes them, and by mlx-lm's generator. Models that pass no lengths on read padding, as before."""
    model, prompts, more = MODELS[name].build(), [tokens(n) for n in (21, 4, 13)], tokens(3, 11)
    chunk = 32 if name in MAMBA_2 else 8  # see test_padding_does_not_reach_the_state
    expected = serve(model, prompts, more, chunk)
    rows = [tokens(n).tolist() for n in (21, 4, 13, 9, 30)]
    chosen = generated_in_batches(model, rows, chunk)
    mlx_anvil.patch(model)
    with mlx_anvil.strict():
        for got, want in zip(serve(model, prompts, more, chunk), expected, strict=True):
            assert_close(got, want)
        assert generated_in_batches(model, rows, chunk) == chosen


@pytest.mark.parametrize("name", ["falcon_h1", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "qwen3_next"])
def test_padding_does_not_reach_the_state(name):
    """Unpatched, Nemotron-H loses the shorter prompt, as it passes no lengths on, and mlx-lm's ``ssm_attn`` reads out
    of bounds if a prompt goes on after a chunk."""
    model, rows = MODELS[name].build(), [tokens(n) for n in (11, 4)]
    mlx_anvil.patch(model)
    alone = [make_prompt_cache(model) for _ in rows]
    for row, cache in zip(rows, alone, strict=True):
        model(row[None], cache=cache)
    both = [kind[0].merge(list(kind)) for kind in zip(*(make_prompt_cache(model) for _ in rows), strict=True)]
    for cache in both:
        cache.prepare(lengths=[11, 4], right_padding=[0, 7])
    batch = mx.stack([rows[0], mx.pad(rows[1], (0, 7))])
    for begin in range(0, 11, 3):
        model(batch[:, begin : begin + 3], cache=both)
    for i, cache in enumerate(alone):
        assert_states_close([x[i : i + 1] for x in states(both)], states(cache))


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba2", "lfm2"])
def test_padding_on_the_left(name):
    model, prompt = MODELS[name].build(), tokens(2, 11)

    def run() -> mx.array:
        caches = make_prompt_cache(model)
        caches = [c.merge([c, c]) for c in caches]
        for cache in caches:
            cache.left_padding = mx.array([0, 4])
        for cache in caches:
            if not isinstance(cache, ArraysCache):
                cache.offset = mx.array([0, -4])
        logits = model(prompt, cache=caches)
        return mx.concatenate([logits[0], logits[1, 4:]])

    want = run()
    report = mlx_anvil.patch(model)
    assert_close(run(), want)
    assert report.fallbacks == ()


def loss_and_gradients(model: nn.Module, batch: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    def loss(model: nn.Module) -> mx.array:
        return nn.losses.cross_entropy(model(batch[:, :-1]).astype(mx.float32), batch[:, 1:], reduction="mean")

    value, tree = nn.value_and_grad(model, loss)(model)
    gradients = dict(tree_flatten(tree))
    mx.eval(value, gradients)
    return value, gradients


@pytest.mark.parametrize("name", sorted(set(MODELS) - NO_GRADIENTS))
def test_gradients(name, seed):
    model, batch = MODELS[name].build(), tokens(2, 10)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-2  # else norms of short rows amplify rounding
    model.train()
    value, gradients = loss_and_gradients(model, batch)
    report = mlx_anvil.patch(model)
    with mlx_anvil.strict():
        our_value, ours = loss_and_gradients(model, batch)
    assert report.fallbacks == ()
    assert abs(our_value.item() - value.item()) <= LIMIT * value.item()
    assert ours.keys() == gradients.keys()
    lengths = {parameter: mx.linalg.norm(gradient.flatten()).item() for parameter, gradient in gradients.items()}
    for parameter, gradient in gradients.items():
        error = mx.linalg.norm((ours[parameter] - gradient).flatten()).item()
        assert error <= 10 * LIMIT * max(lengths[parameter], 1e-3 * max(lengths.values())), parameter


@pytest.mark.parametrize("name", sorted(set(MODELS) - NOT_IN_16_BITS))
def test_bfloat16(name, seed):
    """As close to the same weights in float32 as mlx-lm's own ops are."""
    model, prompt, more = MODELS[name].build(mx.bfloat16), tokens(2, 15), tokens(2, 4)
    run = lambda: prompt_and_steps(model, prompt, more, make_prompt_cache(model))  # noqa: E731
    theirs = run()
    mlx_anvil.patch(model)
    ours = run()
    mlx_anvil.unpatch(model)
    model.set_dtype(mx.float32)
    truth = run()
    assert ours.dtype == theirs.dtype
    assert mx.median(errors(ours, truth)).item() <= OUTPUT_FACTOR * mx.median(errors(theirs, truth)).item()


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"mlx_lm.models.{MODELS[name].module}")


def test_recurrence_is_an_option():
    for name in ("qwen3_next", "mamba", "mamba2"):
        model, batch = MODELS[name].build(), tokens(1, 5)
        report = mlx_anvil.patch(model, recurrence=False)
        assert {"causal_conv1d", *OPS[name]} <= {row.op for row in report.left if row.why == "recurrence=False"}
        with mlx_anvil.trace() as trace:
            mx.eval(model(batch))
        assert not {"causal_conv1d", *OPS[name]} & {event.op for event in trace.events}


@pytest.mark.parametrize(
    ("name", "function", "op"),
    [("qwen3_next", "gated_delta_update", "causal_conv1d"), ("mamba2", "ssm_update", "ssd_scan")],
)
def test_a_replaced_function_is_called(name, function, op, monkeypatch):
    model, batch = MODELS[name].build(), tokens(1, 5)
    want, module, calls = model(batch), module_of(name), []
    report = mlx_anvil.patch(model)
    theirs = getattr(module, function)

    def profiled(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return theirs(*args, **kwargs)

    monkeypatch.setattr(module, function, profiled)
    assert_close(model(batch), want)
    assert calls
    assert {fallback.op for fallback in report.fallbacks} == {op}


def test_what_the_ops_do_not_take():
    """Wide heads, wide convolutions and layers that are not depthwise run as before."""
    wide = {"linear_key_head_dim": 272, "linear_conv_kernel_dim": 9}
    options = MODELS["qwen3_next"].options | wide
    model, batch = Architecture("qwen3_next", options).build(), tokens(2, 13)
    want = prompt_and_steps(model, batch, batch[:, :2], make_prompt_cache(model))
    report = mlx_anvil.patch(model, **ONLY)
    got = prompt_and_steps(model, batch, batch[:, :2], make_prompt_cache(model))
    assert_close(got, want)
    assert {fallback.op for fallback in report.fallbacks} == {"causal_conv1d", "gated_delta"}

    model = MODELS["lfm2"].build()
    layer = model.model.layers[0].conv
    layer.conv = nn.Conv1d(64, 64, 3, groups=32)
    want = model(batch)
    report = mlx_anvil.patch(model, **ONLY)
    assert_close(model(batch), want)
    assert [fallback.op for fallback in report.fallbacks] == ["causal_conv1d"]


def test_normalisation_is_part_of_the_kernel():
    model, batch = MODELS["qwen3_next"].build(), tokens(1, 5)
    mlx_anvil.patch(model, **ONLY)
    q, k = mx.random.normal((1, 3, 2, 16)), mx.random.normal((1, 3, 2, 16))
    theirs = module_of("qwen3_next").normalize_qk
    ours = _recurrences.normalize_stand_in(theirs).make(lambda: theirs)
    rows = ours(q, k, inv_scale=0.25, eps=1e-6)
    for a, b in zip(rows, theirs(q, k, inv_scale=0.25, eps=1e-6), strict=True):
        assert mx.array_equal(a, b)
    v, gate = mx.random.normal((1, 3, 4, 16)), mx.random.normal((1, 3, 4))
    update = lambda q, k: _recurrences.gated_delta_update(q, k, v, gate, gate, mx.zeros(4), mx.zeros(4))[0]  # noqa: E731
    assert max_error(update(*rows), update(*theirs(q, k, inv_scale=0.25, eps=1e-6))) <= LIMIT
    rows[0][...] = 0.0  # changed in place: the array counts
    assert not update(*rows).any().item()
    mx.eval(model(batch))


def test_a_step_of_kimi_k3_is_not_compiled(monkeypatch):
    """Its model does that on Metal, and keeps what it traced."""
    model, prompt, more = MODELS["kimi_k3"].build(), tokens(1, 9), tokens(1, 3)
    model.eval()
    want = prompt_and_steps(model, prompt, more, make_prompt_cache(model))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    mlx_anvil.patch(model)
    with mlx_anvil.trace() as trace:
        assert_close(prompt_and_steps(model, prompt, more, make_prompt_cache(model)), want)
    assert "gated_delta" in {event.op for event in trace.events}
    assert all(getattr(layer, "_step", None) is None for layer in model.modules())


def test_a_shard_of_one():
    model, batch = MODELS["qwen3_5"].build(), tokens(1, 9)
    want = model(batch)
    model.shard(mx.distributed.init())
    report = mlx_anvil.patch(model)
    with mlx_anvil.strict():
        assert_close(model(batch), want)
    assert report.fallbacks == ()
