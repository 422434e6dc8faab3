"""A character-level Llama of mlx-lm, trained 200 steps on this repository's README, learns the same patched and
unpatched.

The allowed distance between two trainings is measured, not chosen. The reference is the same training with MLX alone in
a wider format: float64, or float32 for bfloat16. MLX's own training deviates from it, and deviates differently from
weights that are moved by at most one unit in the last place. The largest of these deviations, times the factor of all
our gradients, is the limit for ours. Frozen weights move too: every step meets the same change there, as it meets the
same error of an approximation in a kernel, and such changes do not average out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common import random_llama

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

import mlx_anvil
from mlx_anvil._check import GRADIENT_FACTOR
from support import to_numpy
from train import README, Text, add_adapters, train

# float64 exists on the CPU only, and hundreds of steps are too many for the simulator.
pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

STEPS, BATCH, LENGTH = 200, 2, 32
NUDGED = 3  # trainings of MLX from weights moved in the last place


@dataclass(frozen=True)
class Setting:
    name: str
    dtype: mx.Dtype
    wider: mx.Dtype
    optimizer: Callable[[], optim.Optimizer]
    adapters: bool = False

    def __str__(self) -> str:
        return self.name

    def model(self, seed: int, vocabulary: int) -> nn.Module:
        mx.random.seed(seed)
        model = random_llama(dims=32, layers=2, heads=2, kv_heads=1, mlp=64, vocabulary=vocabulary, dtype=self.dtype)
        if self.adapters:
            add_adapters(model)
        return model


FLOAT32 = Setting("float32", mx.float32, mx.float64, lambda: optim.Adam(1e-3))
BFLOAT16 = Setting("bfloat16", mx.bfloat16, mx.float32, lambda: optim.Adam(1e-3))
# Adam divides the first gradients of an adapter, which begins at zero, by themselves: noise would be all there is to
# see.
QLORA = Setting("QLoRA", mx.float32, mx.float64, lambda: optim.SGD(0.1), adapters=True)


@dataclass
class Outcome:
    losses: np.ndarray
    parameters: np.ndarray  # of all that were trained, one after the other

    def distance(self, truth: "Outcome") -> tuple[float, float]:
        """Root mean square distances: of the loss curves in nats, and of the parameters relative to their size."""
        apart = rms(self.parameters - truth.parameters) / rms(truth.parameters)
        return rms(self.losses - truth.losses), apart


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


class Trainings:
    """All trainings of a setting from one seed, with the same weights and batches."""

    def __init__(self, setting: Setting, seed: int, steps: int = STEPS) -> None:
        text = Text.read(README)
        self.setting, self.seed, self.vocabulary = setting, seed, len(text.alphabet)
        self.batches = list(text.batches(steps, BATCH, LENGTH, seed))
        self.truth = self.outcome(widened(self.model(), setting.wider))
        noisy = [self.outcome(nudged(self.model(), seed + i)) for i in range(NUDGED)]
        distances = zip(*(outcome.distance(self.truth) for outcome in noisy), strict=True)
        self.limits = tuple(GRADIENT_FACTOR * max(apart) for apart in distances)

    def model(self) -> nn.Module:
        return self.setting.model(self.seed, self.vocabulary)

    def outcome(self, model: nn.Module) -> Outcome:
        losses = train(model, iter(self.batches), self.setting.optimizer())
        parameters = [to_numpy64(x).ravel() for _, x in tree_flatten(model.trainable_parameters())]
        return Outcome(np.array(losses), np.concatenate(parameters))

    def within_noise(self, outcome: Outcome) -> bool:
        distance = outcome.distance(self.truth)
        print(f"loss and parameters: {distance}, limits {self.limits}")  # for whoever reads a failure
        return all(apart <= limit for apart, limit in zip(distance, self.limits, strict=True))


def to_numpy64(x: mx.array) -> np.ndarray:
    return np.array(x) if x.dtype == mx.float64 else to_numpy(x)


def widened(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """The same function in a wider format, with quantized weights dequantised."""
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            dense = nn.Linear(1, 1, bias=False) if isinstance(layer, nn.QuantizedLinear) else nn.Embedding(1, 1)
            dense.weight = mx.dequantize(layer.weight, layer.scales, layer.biases, **options)
            layers.append((name, dense.freeze()))
    model.update_modules(tree_unflatten(layers))
    model.set_dtype(dtype)
    return model


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """Parameters with each number moved by one unit in the last place, up, down or not at all. Zeros and quantized
    codes stay as they are."""
    rng = np.random.default_rng(seed)

    def nudge(x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating):
            return x
        bits = mx.int32 if x.dtype == mx.float32 else mx.int16
        moved = x.view(bits) + mx.array(rng.integers(-1, 2, x.shape)).astype(bits)
        return mx.where(x == 0, x, moved.view(x.dtype))

    model.update(tree_map(nudge, model.parameters()))
    return model


@pytest.mark.parametrize("setting", [FLOAT32, BFLOAT16, QLORA], ids=str)
def test_training_goes_where_it_goes_without_our_ops(setting, seed):
    trainings = Trainings(setting, seed)
    model = trainings.model()
    report = mlx_anvil.patch(model)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        ours = trainings.outcome(model)
    product = "quantized_matmul" if setting.adapters else "silu_gate_backward"
    for kernel in ("rms_norm_backward", "rope", "flash_attention_backward", product):
        assert any(name.startswith(kernel) for name in trace.kernels), kernel
    assert not report.fallbacks
    assert ours.losses[-20:].mean() < 0.95 * ours.losses[:5].mean()
    assert trainings.within_noise(ours)


def test_the_criterion_sees_an_error_of_one_in_ten_thousand(seed):
    """An error in the scale of attention, which shows that the criterion above can fail."""
    trainings = Trainings(FLOAT32, seed, steps=40)
    assert trainings.within_noise(trainings.outcome(trainings.model()))
    wrong = trainings.model()
    for layer in wrong.layers:
        layer.self_attn.scale *= 1 + 1e-4
    assert not trainings.within_noise(trainings.outcome(wrong))
