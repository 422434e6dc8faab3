"""``mlx_anvil.lm.patch_all``: what mlx-lm loads is patched; and how mlx-lm decodes: its caches, its generator."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm import utils
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import BatchKVCache, QuantizedKVCache

import mlx_anvil
from lm_models import ARCHITECTURES, COMMON, Architecture, tokens
from mlx_anvil._check import FLOOR, OUTPUT_FACTOR
from support import luck_of_few, max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention


@pytest.fixture(autouse=True)
def _afterwards():
    yield
    mlx_anvil.lm.unpatch_all()


@pytest.fixture
def directory(tmp_path):
    """A model as mlx-lm loads it, quantized."""
    model = Architecture("llama").build()
    nn.quantize(model, group_size=32, bits=4)
    model.save_weights(str(tmp_path / "model.safetensors"))
    config = {"model_type": "llama", **COMMON, "quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def kernels_of(model: nn.Module) -> list[str]:
    with mlx_anvil.trace() as trace:
        mx.eval(model(mx.array([[1, 2, 3]])))
    return trace.kernels


def test_models_that_are_loaded_are_patched(directory, monkeypatch):
    original = utils.load_model
    monkeypatch.setattr(utils, "load_tokenizer", lambda *args, **kwargs: "tokenizer")
    plain, _ = mlx_lm.load(str(directory))
    mlx_anvil.lm.patch_all()
    loaded, _ = mlx_lm.load(str(directory))
    assert any(name.startswith("quantized_swiglu") for name in kernels_of(loaded))
    assert kernels_of(plain) == []
    prompt = tokens(1, 4)
    assert max_error(loaded(prompt), plain(prompt)) <= LIMIT
    mlx_anvil.lm.unpatch_all()
    assert utils.load_model is original
    assert kernels_of(loaded)
    assert kernels_of(mlx_lm.load(str(directory))[0]) == []


def test_the_last_options_count(directory):
    mlx_anvil.lm.patch_all()
    mlx_anvil.lm.patch_all(norm=False)
    model, _ = utils.load_model(directory)
    kernels = kernels_of(model)
    assert kernels
    assert not any(name.startswith("rms_norm") for name in kernels)
    mlx_anvil.lm.unpatch_all()
    mlx_anvil.lm.unpatch_all()
    assert kernels_of(utils.load_model(directory)[0]) == []


def test_a_sharded_model_is_patched_after_its_shards_are_made(directory, monkeypatch):
    """In a group of one process."""
    monkeypatch.setattr(utils, "load_tokenizer", lambda *args, **kwargs: "tokenizer")
    plain, _ = utils.sharded_load(str(directory))
    before = len(mlx_anvil.lm.reports())
    mlx_anvil.lm.patch_all()
    model, _ = utils.sharded_load(str(directory))
    (report,) = mlx_anvil.lm.reports()[before:]
    products = {row.path for row in report.swapped if row.op == "quantized_matmul"}
    assert {f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkvo"} <= products
    assert type(model.model.layers[0].self_attn.q_proj) is nn.QuantizedAllToShardedLinear
    prompt = mx.array([[1, 2, 3]])
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        assert max_error(model(prompt), plain(prompt)) <= LIMIT
    products_that_ran = [name for name in trace.kernels if name.startswith(("quantized_matmul", "quantized_gemv"))]
    assert len(products_that_ran) >= 2 * 5
    assert kernels_of(plain) == []


def test_reports_can_be_read_afterwards(directory):
    before = len(mlx_anvil.lm.reports())
    mlx_anvil.lm.patch_all(rope=False)
    model, _ = utils.load_model(directory)
    utils.load_model(directory)
    mlx_anvil.lm.unpatch_all()
    first, second = mlx_anvil.lm.reports()[before:]
    assert {row.why for row in first.left} == {"rope=False"}
    assert first.fallbacks == ()
    model.set_dtype(mx.float64)
    with mx.stream(mx.cpu):
        mx.eval(model.model.norm(mx.zeros((1, 64), mx.float64)))
    assert [(fallback.op, fallback.count) for fallback in first.fallbacks] == [("rms_norm", 1)]
    assert second.fallbacks == ()


def test_a_wrapper_of_another_package_stays(directory, monkeypatch):
    calls, original = [], utils.load_model
    monkeypatch.setattr(utils, "load_model", original)
    mlx_anvil.lm.patch_all()
    ours = utils.load_model

    def theirs(*args, **kwargs):
        calls.append(args)
        return ours(*args, **kwargs)

    utils.load_model = theirs
    assert kernels_of(utils.load_model(directory)[0])
    mlx_anvil.lm.unpatch_all()
    assert utils.load_model is theirs
    assert kernels_of(utils.load_model(directory)[0]) == []
    before = len(mlx_anvil.lm.reports())
    mlx_anvil.lm.patch_all()
    assert kernels_of(utils.load_model(directory)[0])
    assert len(calls) == 3
    assert len(mlx_anvil.lm.reports()) == before + 1
    mlx_anvil.lm.unpatch_all()
    assert utils.load_model is theirs


def decode(model: nn.Module, cache: list, prompt: mx.array, following: mx.array) -> mx.array:
    steps = [model(prompt, cache=cache)]
    steps += [model(following[:, i : i + 1], cache=cache) for i in range(following.shape[1])]
    return mx.concatenate(steps, axis=1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_cache(dtype, bits):
    """Attention reads the codes. One layer, whose keys no op of ours has a part in: the codes in the cache are the same
    with and without the patch, where a later layer's might round the other way."""
    model = Architecture("llama", {"head_dim": 32, "num_hidden_layers": 1}).build(dtype)
    prompt, following = tokens(2, 9), tokens(2, 4)

    def run() -> mx.array:
        caches = [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]
        return decode(model, caches, prompt, following)

    theirs = run()
    report = mlx_anvil.patch(model, norm=False, rope=False)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours = run()
        mx.eval(ours)
    assert any(name.startswith("flash_attention_quantized_") for name in trace.kernels)
    assert report.fallbacks == ()
    if dtype == mx.float32:
        assert max_error(ours, theirs) <= LIMIT
        return
    mlx_anvil.unpatch(model)
    model.set_dtype(mx.float32)
    truth = run()
    assert max_error(ours, truth) <= OUTPUT_FACTOR * max_error(theirs, truth) + FLOOR + luck_of_few(ours)


def test_products_with_a_quantized_cache():
    """Without ``attention``, both products over the cache are ours."""
    model, prompt = Architecture("llama", {"head_dim": 32, "num_hidden_layers": 1}).build(), tokens(2, 9)

    def run() -> mx.array:
        return model(prompt, cache=[QuantizedKVCache(group_size=32, bits=4) for _ in model.layers])

    theirs = run()
    mlx_anvil.patch(model, attention=False, norm=False, rope=False)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours = run()
        mx.eval(ours)
    assert any(name.startswith("quantized_") for name in trace.kernels)
    assert max_error(ours, theirs) <= LIMIT


def test_generator_with_a_quantized_cache():
    """As ``mlx_lm.generate(kv_bits=4)`` runs it: the same tokens by greedy choice, and nearly the same logits."""
    model, prompt = Architecture("llama", {"head_dim": 64, "num_hidden_layers": 1}).build(), tokens(11)
    options = {"max_tokens": 6, "kv_bits": 4, "kv_group_size": 64, "quantized_kv_start": 0}
    theirs = list(generate_step(prompt, model, **options))
    mlx_anvil.patch(model, norm=False, rope=False)
    with mlx_anvil.trace() as trace:
        ours = list(generate_step(prompt, model, **options))
    assert any(name.startswith("flash_attention_quantized_") for name in trace.kernels)
    for (token, logits), (wanted, of_theirs) in zip(ours, theirs, strict=True):
        assert max_error(mx.exp(logits), mx.exp(of_theirs)) <= LIMIT
        assert token == wanted


def test_batch_with_left_padding():
    """Rows have their own positions, given as an array, and their own masks. Results of the padding do not matter: it
    sees no key, for which MLX's attention and ours differ."""
    model, padding = Architecture("llama").build(), [3, 0]
    prompt, following = tokens(2, 8), tokens(2, 4)
    want = decode(model, [BatchKVCache(padding) for _ in model.layers], prompt, following)
    report = mlx_anvil.patch(model)
    with mlx_anvil.strict():
        got = decode(model, [BatchKVCache(padding) for _ in model.layers], prompt, following)
    assert report.fallbacks == ()
    for row, first in enumerate(padding):
        assert max_error(got[row, first:], want[row, first:]) <= LIMIT


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_generator(name):
    model, prompt = ARCHITECTURES[name].build(), tokens(11)
    theirs = list(generate_step(prompt, model, max_tokens=6))
    mlx_anvil.patch(model)
    ours = list(generate_step(prompt, model, max_tokens=6))
    for (token, logits), (their_token, their_logits) in zip(ours, theirs, strict=True):
        assert max_error(logits, their_logits) <= LIMIT
        if token != their_token:  # a draw, as near as the two may differ
            top = mx.sort(their_logits)[-2:]
            assert abs((top[1] - top[0]).item()) <= 2 * LIMIT * mx.abs(their_logits).max().item()
            break
