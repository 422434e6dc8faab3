"""A one-layer Llama of our ops and modules beside one of MLX's with the same parameters: training, and decoding with a
cache and quantized weights, give the same numbers."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

import mlx_anvil
from mlx_anvil._check import FLOOR, OUTPUT_FACTOR
from support import max_error, to_numpy

VOCABULARY, HIDDEN, MLP = 96, 64, 96
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
STEPS = 20
LIMIT = 2e-5  # of float32 with attention, also after some steps of training

Cache = tuple[mx.array, mx.array]


class Llama(nn.Module):
    """What both models share: parameters, projections, the cache. Derived classes add the parts for which we have
    ops."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def __call__(self, tokens: mx.array, cache: Cache | None = None) -> tuple[mx.array, Cache]:
        """Logits of every position, and the cache with these tokens."""
        x = self.embedding(tokens)
        attended, cache = self.attention(self.attention_norm(x), cache)
        y, h = self.add_and_norm(self.mlp_norm, attended, x)
        y, _ = self.add_and_norm(self.head_norm, self.mlp(y), h)
        return self.head(y), cache

    def attention(self, x: mx.array, cache: Cache | None) -> tuple[mx.array, Cache]:
        q, k, v = (
            mx.unflatten(project(x), -1, (-1, HEAD_DIM)).swapaxes(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q, k, offset=0 if cache is None else cache[0].shape[2])
        if cache is not None:
            k, v = (mx.concatenate(parts, axis=2) for parts in zip(cache, (k, v), strict=True))
        return self.o_proj(self.attend(q, k, v).swapaxes(1, 2).flatten(-2)), (k, v)


class MlxSwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class MlxLlama(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MlxSwiGLU()
        self.attention_norm, self.mlp_norm, self.head_norm = (nn.RMSNorm(HIDDEN) for _ in range(3))

    def add_and_norm(self, norm: nn.Module, x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        h = x + residual
        return norm(h), h

    def rotate(self, q: mx.array, k: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        options = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": offset}
        return mx.fast.rope(q, HEAD_DIM, **options), mx.fast.rope(k, HEAD_DIM, **options)

    def attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD_DIM**-0.5, mask="causal")


class OurLlama(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlx_anvil.nn.SwiGLU(HIDDEN, MLP)
        self.attention_norm, self.mlp_norm, self.head_norm = (mlx_anvil.nn.RMSNorm(HIDDEN) for _ in range(3))

    @classmethod
    def from_mlx(cls, model: MlxLlama) -> "OurLlama":
        """With the parameters of MLX's, quantized or not."""
        ours = cls()
        if isinstance(model.head, nn.QuantizedLinear):
            ours.embedding = mlx_anvil.nn.QuantizedEmbedding.from_mlx(model.embedding)
            ours.mlp = mlx_anvil.nn.QuantizedSwiGLU.from_mlx(model.mlp)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head"):
                ours[name] = mlx_anvil.nn.QuantizedLinear.from_mlx(model[name])
        ours.update(tree_map(mx.array, model.parameters()))
        return ours

    def add_and_norm(self, norm: mlx_anvil.nn.RMSNorm, x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        return norm(x, residual=residual)

    def rotate(self, q: mx.array, k: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        return mlx_anvil.rope_qk(q, k, HEAD_DIM, offset=offset)

    def attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mlx_anvil.flash_attention(q, k, v, mask="causal")


def random_tokens(*shape: int) -> mx.array:
    return mx.random.randint(0, VOCABULARY, shape)


def train(model: Llama, batches: mx.array) -> list[float]:
    """Losses of the steps, one for each batch."""

    def loss(model: Llama, tokens: mx.array) -> mx.array:
        logits, _ = model(tokens[:, :-1])
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss)
    optimizer = optim.SGD(learning_rate=0.05, momentum=0.9)
    losses = []
    for tokens in batches:
        value, gradients = step(model, tokens)
        optimizer.update(model, gradients)
        losses.append(value.item())
    return losses


def test_training():
    theirs = MlxLlama()
    ours = OurLlama.from_mlx(theirs)
    # The same batch every other time, so that there is something to learn.
    batches = mx.concatenate([random_tokens(2, 2, 18)] * (STEPS // 2))
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        our_losses = train(ours, batches)
    their_losses = train(theirs, batches)
    assert their_losses[-1] < 0.8 * their_losses[0]
    np.testing.assert_allclose(our_losses, their_losses, rtol=LIMIT)
    for (name, mine), (other, want) in zip(
        tree_flatten(ours.parameters()), tree_flatten(theirs.parameters()), strict=True
    ):
        assert name == other
        assert max_error(mine, want) <= LIMIT, name
    assert_ran(trace, "rms_norm", "rope_qk", "flash_attention", "silu_gate")


@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "4 bits"])
def test_decoding(quantized):
    theirs = MlxLlama()
    if quantized:
        nn.quantize(theirs, group_size=32, bits=4)
    ours = OurLlama.from_mlx(theirs)
    tokens, our_cache, their_cache = random_tokens(2, 7), None, None
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        for _ in range(10):
            our_logits, our_cache = ours(tokens, our_cache)
            their_logits, their_cache = theirs(tokens, their_cache)
            assert max_error(our_logits, their_logits) <= LIMIT
            tokens = mx.argmax(their_logits[:, -1:], axis=-1)
            assert_same_choice(our_logits[:, -1:], their_logits[:, -1:])
    assert our_cache[0].shape == (2, KV_HEADS, 7 + 9, HEAD_DIM)
    assert max_error(our_cache[1], their_cache[1]) <= LIMIT
    assert_ran(trace, "rms_norm", "rope_qk", "flash_attention", "quantized_" if quantized else "silu_gate")


def assert_ran(trace: mlx_anvil.Trace, *ops: str) -> None:
    """Checks that kernels of all these ops ran. ``strict`` checks that nothing fell back."""
    assert [op for op in ops if not any(name.startswith(op) for name in trace.kernels)] == []


def assert_same_choice(ours: mx.array, theirs: mx.array) -> None:
    """Checks that both choose the same token, unless the two largest logits are closer than the tolerance."""
    exact = np.sort(to_numpy(theirs), axis=-1)
    distinct = exact[..., -1] - exact[..., -2] > 2 * LIMIT * np.abs(exact).max()
    chosen = [np.array(mx.argmax(x, axis=-1)) for x in (ours, theirs)]
    np.testing.assert_array_equal(chosen[0][distinct], chosen[1][distinct])


def test_cache_gives_what_the_whole_prompt_gives():
    ours = OurLlama.from_mlx(MlxLlama())
    tokens = random_tokens(1, 9)
    whole, _ = ours(tokens)
    logits, cache = ours(tokens[:, :4])
    steps = [logits]
    for i in range(4, 9):
        logits, cache = ours(tokens[:, i : i + 1], cache)
        steps.append(logits)
    assert max_error(mx.concatenate(steps, axis=1), whole) <= LIMIT


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bit_forward(dtype):
    """The FlashAttention criterion over the whole block: the truth is MLX's with the same parameters in float32."""
    theirs = MlxLlama()
    theirs.set_dtype(dtype)
    ours = OurLlama.from_mlx(theirs)
    tokens = random_tokens(2, 33)
    ours_logits, theirs_logits = ours(tokens)[0], theirs(tokens)[0]
    assert ours_logits.dtype == dtype
    theirs.set_dtype(mx.float32)
    truth = theirs(tokens)[0]
    limit = OUTPUT_FACTOR * max_error(theirs_logits, truth) + FLOOR
    assert max_error(ours_logits, truth) <= limit
