"""A small language model with gated delta net layers, as in Qwen3-Next: linear attention, and attention in every n-th
layer. ``train.py --architecture gated-delta`` trains it.

The linear attention is written twice, as the same function of the same weights: with mlx-anvil's ops and with MLX's.
Everything else is plain ``mlx.nn``, which ``mlx_anvil.patch`` swaps.
"""

import math
from collections.abc import Callable
from functools import partial

from common import MLX, OURS

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

import mlx_anvil

TAPS = 4  # of the short convolution
EPS = 1e-6
KEPT_IN_FLOAT32 = ("A_log", "dt_bias")  # 16 bits would round decays close to 1


class GatedDelta(nn.Module):
    """Linear attention by the gated delta rule. ``key_heads`` heads of q and k serve ``heads`` heads of v."""

    def __init__(self, dims: int, heads: int, key_heads: int, head_dim: int, attend: "LinearAttention") -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, head_dim
        self.attend = attend
        values, channels = heads * head_dim, (heads + 2 * key_heads) * head_dim
        self.qkv_proj = nn.Linear(dims, channels, bias=False)
        self.gate_proj = nn.Linear(dims, values, bias=False)
        self.a_proj = nn.Linear(dims, heads, bias=False)
        self.b_proj = nn.Linear(dims, heads, bias=False)
        self.out_proj = nn.Linear(values, dims, bias=False)
        self.conv = mx.random.uniform(-(TAPS**-0.5), TAPS**-0.5, (channels, TAPS))
        # Mamba's initial decays, exp(-A dt): A from 1 to 16, dt from 0.001 to 0.1. dt_bias is the inverse of softplus.
        self.A_log = mx.log(mx.random.uniform(1, 16, (heads,)))
        dt = mx.exp(mx.random.uniform(math.log(0.001), math.log(0.1), (heads,)))
        self.dt_bias = dt + mx.log(-mx.expm1(-dt))
        self.norm_weight = mx.ones(head_dim)

    def split(self, qkv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Views of q, k and v: ``[batch, length, heads, head_dim]``."""
        q, k, v = mx.split(qkv.reshape(*qkv.shape[:2], -1, self.head_dim), (self.key_heads, 2 * self.key_heads), axis=2)
        return q, k, v

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate_proj(x).reshape(*x.shape[:2], self.heads, self.head_dim)
        y = self.attend(self, self.qkv_proj(x), self.a_proj(x), self.b_proj(x), gate)
        return self.out_proj(y.flatten(-2))


# The layer, the joined q, k and v before their convolution, a, b, and the output's gate.
LinearAttention = Callable[[GatedDelta, mx.array, mx.array, mx.array, mx.array], mx.array]


def with_mlx_anvil(layer: GatedDelta, qkv: mx.array, a: mx.array, b: mx.array, gate: mx.array) -> mx.array:
    qkv, _ = mlx_anvil.causal_conv1d(qkv, layer.conv)
    q, k, v = layer.split(qkv)
    g, beta = mlx_anvil.gated_delta_gates(a, b, layer.A_log, layer.dt_bias)
    y, _ = mlx_anvil.gated_delta(q, k, v, g, beta, normalize_eps=EPS)
    return mlx_anvil.rms_norm(y, layer.norm_weight, EPS, gate=gate)


def with_mlx(layer: GatedDelta, qkv: mx.array, a: mx.array, b: mx.array, gate: mx.array) -> mx.array:
    """As mlx-lm trains it: the graph has about ten nodes for each character of a sequence."""
    from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

    rows = mx.pad(qkv, ((0, 0), (TAPS - 1, 0), (0, 0)))
    q, k, v = layer.split(nn.silu(mx.conv1d(rows, layer.conv[..., None], groups=qkv.shape[-1])))
    q, k = normalize_qk(q, k, inv_scale=layer.head_dim**-0.5, eps=EPS)
    y, _ = gated_delta_update(q, k, v, a, b, layer.A_log, layer.dt_bias, use_kernel=False)
    return mx.fast.rms_norm(y, layer.norm_weight, EPS) * nn.silu(gate)


LINEAR_ATTENTION: dict[str, LinearAttention] = {OURS: with_mlx_anvil, MLX: with_mlx}


class Attention(nn.Module):
    """Causal attention with rotary embedding."""

    def __init__(self, dims: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.scale = heads, kv_heads, head_dim**-0.5
        self.q_proj = nn.Linear(dims, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dims, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dims, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dims, bias=False)
        self.rope = nn.RoPE(head_dim)

    def __call__(self, x: mx.array) -> mx.array:
        def heads_first(y: mx.array, heads: int) -> mx.array:
            return y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)

        q = self.rope(heads_first(self.q_proj(x), self.heads))
        k = self.rope(heads_first(self.k_proj(x), self.kv_heads))
        v = heads_first(self.v_proj(x), self.kv_heads)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask="causal")
        return self.o_proj(y.transpose(0, 2, 1, 3).flatten(-2))


class MLP(nn.Module):
    def __init__(self, dims: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims, hidden, bias=False)
        self.up_proj = nn.Linear(dims, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dims: int, mlp: int, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.mlp = mixer, MLP(dims, mlp)
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(dims, EPS), nn.RMSNorm(dims, EPS)

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, vocabulary: int, dims: int, blocks: list[Block]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims)
        self.layers = blocks
        self.norm = nn.RMSNorm(dims, EPS)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedding.as_linear(self.norm(x))


def random_delta_net(
    label: str,
    *,
    dims: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocabulary: int,
    dtype: mx.Dtype,
    attention_every: int,
) -> Model:
    """Creates a model whose linear attention runs by the ops of ``label``. Every ``attention_every``-th layer has
    attention instead; 0 is none. The embedding and the output head share their weights."""
    shape = (dims, heads, kv_heads, dims // heads)
    linear = partial(GatedDelta, *shape, attend=LINEAR_ATTENTION[label])
    full = [attention_every > 0 and number % attention_every == 0 for number in range(1, layers + 1)]
    blocks = [Block(dims, mlp, Attention(*shape) if here else linear()) for here in full]
    model = Model(vocabulary, dims, blocks)

    def cast(path: str, x: mx.array) -> mx.array:
        return x if path.endswith(KEPT_IN_FLOAT32) else x.astype(dtype)

    model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())
    return model
