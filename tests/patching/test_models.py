"""``patch`` on real mlx-lm architectures: the model computes the same, with our kernels."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

import mlx_anvil
from lm_models import ARCHITECTURES, tokens
from mlx_anvil._check import FLOOR, GRADIENT_FACTOR, OUTPUT_FACTOR
from support import FEW, luck_of_few, max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
# MLX has no product with chosen experts in 16 bits on the CPU, unless they are quantized.
NOT_IN_16_BITS = {("gpt_oss", False), ("mixtral", False), ("qwen3_moe", False)}

architectures = pytest.mark.parametrize("name", ARCHITECTURES)
quantized_or_not = pytest.mark.parametrize("quantized", [False, True], ids=["full", "4 bits"])


def build(name: str, dtype: mx.Dtype, quantized: bool) -> nn.Module:
    model = ARCHITECTURES[name].build(dtype)
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    return model


def loss(model: nn.Module, batch: mx.array) -> mx.array:
    logits = model(batch[:, :-1])
    return nn.losses.cross_entropy(logits.astype(mx.float32), batch[:, 1:], reduction="mean")


def loss_and_gradients(model: nn.Module, batch: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    """Of all parameters that can be trained."""
    value, tree = nn.value_and_grad(model, loss)(model, batch)
    gradients = dict(tree_flatten(tree))
    mx.eval(value, gradients)
    return value, gradients


@architectures
@quantized_or_not
def test_float32(name, quantized):
    model, batch = build(name, mx.float32, quantized), tokens(2, 21)
    logits, (value, gradients) = model(batch), loss_and_gradients(model, batch)
    report = mlx_anvil.patch(model)
    with mlx_anvil.strict():
        our_logits, (our_value, our_gradients) = model(batch), loss_and_gradients(model, batch)
    assert report.fallbacks == ()
    assert max_error(our_logits, logits) <= LIMIT
    assert abs(our_value.item() - value.item()) <= LIMIT * value.item()
    assert our_gradients.keys() == gradients.keys()
    largest = max(mx.abs(gradient).max().item() for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        # That of a bias of the keys is zero but for rounding: softmax does not see what all keys share.
        scale = largest if parameter.endswith("k_proj.bias") else None
        assert max_error(our_gradients[parameter], gradient, scale=scale) <= LIMIT, parameter


@pytest.mark.parametrize(
    ("name", "quantized"),
    [case for case in itertools.product(ARCHITECTURES, (False, True)) if case not in NOT_IN_16_BITS],
)
def test_bfloat16(name, quantized):
    """The FlashAttention criterion: the truth is the same weights in float32."""
    model, batch = build(name, mx.bfloat16, quantized), tokens(2, 21)
    theirs, (_, their_gradients) = model(batch), loss_and_gradients(model, batch)
    mlx_anvil.patch(model)
    ours, (value, gradients) = model(batch), loss_and_gradients(model, batch)
    mlx_anvil.unpatch(model)
    model.set_dtype(mx.float32)
    truth, (true_value, true_gradients) = model(batch), loss_and_gradients(model, batch)
    assert ours.dtype == theirs.dtype == mx.bfloat16
    assert max_error(ours, truth) <= OUTPUT_FACTOR * max_error(theirs, truth) + FLOOR + luck_of_few(ours)
    # No loss of a row moves by more than twice what its logits are off by.
    off = max_error(theirs, truth) * mx.abs(truth).max().item()
    assert abs(value.item() - true_value.item()) <= 2 * OUTPUT_FACTOR * off
    largest = max(mx.abs(gradient).max().item() for gradient in true_gradients.values())
    for parameter, gradient in gradients.items():
        if gradient.size <= FEW:  # test_bfloat16_gradients_of_few_elements
            continue
        exact, scale = true_gradients[parameter], largest if parameter.endswith("k_proj.bias") else None
        allowed = GRADIENT_FACTOR * max_error(their_gradients[parameter], exact, scale=scale)
        assert max_error(gradient, exact, scale=scale) <= allowed + FLOOR + luck_of_few(gradient), parameter


def gradients_over_batches(model: nn.Module, parameter: str, batches: list[mx.array]) -> mx.array:
    return mx.concatenate([loss_and_gradients(model, batch)[1][parameter] for batch in batches])


def root_mean_square_error(result: mx.array, truth: mx.array) -> float:
    return mx.sqrt(mx.mean(mx.square(result.astype(mx.float32) - truth))).item()


@pytest.mark.parametrize("parameter", ["self_attn.sinks", "mlp.router.bias"])
def test_bfloat16_gradients_of_few_elements(parameter):
    """The same criterion, on average: of four errors, the largest may be small by chance."""
    model, batches = build("gpt_oss", mx.bfloat16, quantized=True), [tokens(2, 21) for _ in range(8)]
    name = f"model.layers.0.{parameter}"
    theirs = gradients_over_batches(model, name, batches)
    mlx_anvil.patch(model)
    ours = gradients_over_batches(model, name, batches)
    mlx_anvil.unpatch(model)
    model.set_dtype(mx.float32)
    truth = gradients_over_batches(model, name, batches)
    assert root_mean_square_error(ours, truth) <= GRADIENT_FACTOR * root_mean_square_error(theirs, truth)


def generate(model: nn.Module, cache: list, prompt: mx.array, following: mx.array) -> mx.array:
    """Logits of a prompt, and of what follows, token after token."""
    steps = [model(prompt, cache=cache)]
    steps += [model(following[:, i : i + 1], cache=cache) for i in range(following.shape[1])]
    logits = mx.concatenate(steps, axis=1)
    mx.eval(logits)
    return logits


@architectures
@quantized_or_not
def test_decoding_with_a_cache(name, quantized):
    """With the caches that the model makes: those of windows rotate before the end of this."""
    model, prompt, following = build(name, mx.float32, quantized), tokens(2, 11), tokens(2, 7)
    want = generate(model, make_prompt_cache(model), prompt, following)
    mlx_anvil.patch(model)
    with mlx_anvil.strict():
        got = generate(model, make_prompt_cache(model), prompt, following)
    assert max_error(got, want) <= LIMIT


def test_decoding_with_a_rotating_cache():
    model, prompt, following = build("qwen2", mx.float32, False), tokens(1, 11), tokens(1, 9)
    caches = [[RotatingKVCache(max_size=8, keep=2) for _ in model.layers] for _ in range(2)]
    want = generate(model, caches[0], prompt, following)
    mlx_anvil.patch(model)
    with mlx_anvil.strict():
        got = generate(model, caches[1], prompt, following)
    assert max_error(got, want) <= LIMIT
