"""mlx-lm's gradient checkpointing, which it installs in the class of a layer, together with ``patch``."""

from itertools import permutations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, nanochat
from mlx_lm.tuner.trainer import grad_checkpoint

import mlx_anvil
from lm_models import ARCHITECTURES, Architecture, tokens
from support import max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
LLAMA_OPS = {"rms_norm", "rope", "flash_attention", "silu_gate"}


def ops_of(function, *arguments) -> set[str]:
    """Ops of ours that run when the function's result is evaluated."""
    with mlx_anvil.trace() as trace:
        mx.eval(function(*arguments))
    return {event.op for event in trace.events if not event.is_fallback}


@pytest.mark.parametrize("first", ["patch", "checkpoint"])
def test_checkpoint(first, monkeypatch):
    """mlx-lm puts checkpointing into the class of a layer; it is undone with the class of this test's own."""
    monkeypatch.setattr(llama, "TransformerBlock", type("TransformerBlock", (llama.TransformerBlock,), {}))
    model, batch = ARCHITECTURES["llama"].build(), tokens(2, 9)
    gradient = nn.value_and_grad(model, lambda model: model(batch).square().mean())
    want = gradient(model)
    actions = [lambda: mlx_anvil.patch(model), lambda: grad_checkpoint(model.layers[0])]
    for action in actions if first == "patch" else reversed(actions):
        action()
    with mlx_anvil.strict():
        got = gradient(model)
    for (name, ours), (_, theirs) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert max_error(ours, theirs) <= LIMIT, name
    assert ops_of(gradient, model) == LLAMA_OPS


@pytest.mark.parametrize("order", sorted(set(permutations(["checkpoint", "patch", "unpatch", "patch"]))))
def test_checkpointing_outlives_patch_and_unpatch(order, monkeypatch):
    """Of a layer that calls our ops by itself: its own method is patched and checkpointed."""
    monkeypatch.setattr(nanochat, "TransformerBlock", type("TransformerBlock", (nanochat.TransformerBlock,), {}))
    model, batch, passes = Architecture("nanochat").build(), tokens(1, 9), []
    block, mlp = nanochat.TransformerBlock, type(model.layers[0].mlp)
    monkeypatch.setattr(block, "__call__", block.__call__)
    forward = mlp.__call__
    monkeypatch.setattr(mlp, "__call__", lambda self, x: (passes.append(id(self)), forward(self, x))[1])

    def loss(x):
        return model.layers[0](x).square().sum()

    x = mx.random.normal((1, 9, 64))
    want = mx.grad(loss)(x)
    actions = {
        "checkpoint": lambda: grad_checkpoint(model.layers[0]),
        "patch": lambda: mlx_anvil.patch(model),
        "unpatch": lambda: mlx_anvil.unpatch(model),
    }
    for i, action in enumerate(order):
        actions[action]()
        passes.clear()
        assert max_error(mx.grad(loss)(x), want) <= LIMIT
        assert len(passes) == (2 if "checkpoint" in order[: i + 1] else 1)
        last = next((name for name in reversed(order[: i + 1]) if name != "checkpoint"), "unpatch")
        assert ("rms_norm" in ops_of(model, batch)) == (last == "patch")
