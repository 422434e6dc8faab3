"""Memory profiles of the Metal kernels of flash_attention and of MLX's kernels.

Ours are the launches of the op itself. Both sides get the same dense arrays, [heads, length, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil.mslc import PROFILED, LaunchProfile, Library
from tests.mslc.control.mlx_kernels import include_dir, source
from tests.mslc.control.test_attention import ATTENTION_PARAMS, vector_constants

METAL_TYPES = {"float32": "float", "float16": "half"}


@dataclass(frozen=True)
class Shape:
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads


@dataclass
class Call:
    shape: Shape
    dtype: str
    causal: bool
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, shape: Shape, dtype: str, causal: bool) -> Call:
        heads = (shape.q_heads, shape.q_len), (shape.kv_heads, shape.kv_len), (shape.kv_heads, shape.kv_len)
        arrays = (rng.standard_normal((*of, shape.head_dim)).astype(dtype) for of in heads)
        return cls(shape, dtype, causal, *arrays)

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def assert_close(self, out: np.ndarray) -> None:
        """Checks that the profiled launch computed the right result."""
        k, v = (x.astype(np.float64).repeat(self.shape.group, 0) for x in (self.k, self.v))
        scores = self.q.astype(np.float64) @ k.swapaxes(1, 2) * self.scale
        if self.causal:
            row, column = np.indices(scores.shape[1:])
            scores[:, column > row + self.shape.kv_len - self.shape.q_len] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        exact = weights @ v / weights.sum(-1, keepdims=True)
        assert np.abs(out - exact).max() <= (1e-5 if self.dtype == "float32" else 2e-3) * np.abs(exact).max()


@dataclass
class Counts:
    """Sums over the launches of a call."""

    device_bytes_read: float = 0
    device_bytes_written: float = 0
    matrix_multiplies: float = 0
    threadgroup_bytes: float = 0
    bank_conflicts: float = 0
    barriers: float = 0
    transcendentals: float = 0
    threadgroup_memory: float = 0  # the most of a launch

    def add(self, profile: LaunchProfile | None) -> None:
        assert profile is not None
        m = profile.metrics()
        m["threadgroup_bytes"] = (m["threadgroup_bytes_read"] or 0) + (m["threadgroup_bytes_written"] or 0)
        for name in vars(self):
            if name != "threadgroup_memory":
                setattr(self, name, getattr(self, name) + (m[name] or 0))
        self.threadgroup_memory = max(self.threadgroup_memory, m["threadgroup_memory"] or 0)


@cache
def mlx_library(header: str, instances: tuple[tuple, ...], constants: tuple[tuple, ...]) -> Library:
    text = source([header], list(instances))
    return Library(text, [include_dir()], dict(constants), {"MLX_METAL_JIT": 1}, PROFILED)


def profile_ours(call: Call) -> Counts:
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        arrays = (mx.array(x[None]) for x in (call.q, call.k, call.v))
        out = mlx_anvil.flash_attention(*arrays, mask="causal" if call.causal else None)
        mx.eval(out)
    counts = Counts()
    for profile in profiles:
        counts.add(profile)
    call.assert_close(np.array(out[0]))
    return counts


def profile_steel_attention(call: Call) -> Counts:
    """MLX's kernel for more than 8 queries, with the tiles that MLX chooses."""
    shape, block_q, block_k = call.shape, 32, 32 if call.shape.head_dim < 128 else 16
    constants = {
        200: shape.q_len % block_q == 0,
        201: shape.kv_len % block_k == 0,
        300: False,
        301: call.causal,
        302: False,
        303: False,
    }
    tiles = (METAL_TYPES[call.dtype], block_q, block_k, shape.head_dim, shape.head_dim, 4, 1, "bool", "float")
    kernels = mlx_library(
        "steel/attn/kernels/steel_attention.h", (("attention", "attention", *tiles),), tuple(constants.items())
    )
    params = np.zeros(1, ATTENTION_PARAMS)
    tiles_q, tiles_k = -(-shape.q_len // block_q), -(-shape.kv_len // block_k)
    sizes = 1, shape.q_heads, shape.head_dim, shape.q_len, shape.kv_len, shape.group
    whole = shape.q_len // block_q, shape.kv_len // block_k
    rest = shape.q_len % block_q, shape.kv_len % block_k, shape.kv_len - shape.q_len
    strides = [[x.size, x[0].size, x.shape[2]] for x in (call.q, call.k, call.v, call.q)]
    params[0] = (*sizes, call.scale, tiles_q, tiles_k, *whole, *rest, strides)
    counts, out = Counts(), np.zeros_like(call.q)
    buffers = {0: call.q, 1: call.k, 2: call.v, 3: out, 4: params}
    counts.add(kernels.run("attention", buffers, (tiles_q, shape.q_heads, 1), (32, 4, 1)).profile)
    call.assert_close(out)
    return counts


def profile_sdpa_vector(call: Call) -> Counts:
    """MLX's kernel for few queries, in one pass."""
    shape = call.shape
    constants = vector_constants(do_causal=call.causal)
    instance = "sdpa_vector", "sdpa_vector", METAL_TYPES[call.dtype], shape.head_dim
    kernels = mlx_library("sdpa_vector.h", (instance,), tuple(constants.items()))
    strides = [np.array(n, np.uint64) for n in (shape.kv_len * shape.head_dim, shape.head_dim)]
    counts, out = Counts(), np.zeros_like(call.q)
    bound = [call.q, call.k, call.v, out, shape.group, shape.kv_len, *strides, *strides, call.scale]
    grid = shape.q_heads, shape.q_len, 1
    counts.add(kernels.run("sdpa_vector", dict(enumerate(bound)), grid, (1024, 1, 1)).profile)
    call.assert_close(out)
    return counts


def profile_sdpa_vector_2pass(call: Call, blocks: int = 32) -> Counts:
    """MLX's kernels for few queries and many keys, with 32 blocks of keys, the fewest that MLX uses."""
    shape = call.shape
    constants = vector_constants(do_causal=call.causal, blocks=blocks)
    instances = tuple((f"pass_{i}", f"sdpa_vector_2pass_{i}", METAL_TYPES[call.dtype], shape.head_dim) for i in (1, 2))
    kernels = mlx_library("sdpa_vector.h", instances, tuple(constants.items()))
    strides = [np.array(n, np.uint64) for n in (shape.kv_len * shape.head_dim, shape.head_dim)]
    partials = np.zeros((shape.q_heads, shape.q_len, blocks, shape.head_dim), call.dtype)
    sums, maxima = (np.zeros(partials.shape[:3], np.float32) for _ in range(2))
    counts, out = Counts(), np.zeros_like(call.q)
    buffers = {0: call.q, 1: call.k, 2: call.v, 3: partials, 4: sums, 5: maxima, 7: shape.kv_len, 12: call.scale}
    buffers |= dict(enumerate([*strides, *strides], start=8))
    counts.add(kernels.run("pass_1", buffers, (shape.kv_heads, 1, blocks), (32, shape.group, shape.q_len)).profile)
    bound = [partials, sums, maxima, out, blocks]
    counts.add(kernels.run("pass_2", dict(enumerate(bound)), (shape.q_heads, shape.q_len, 1), (1024, 1, 1)).profile)
    call.assert_close(out)
    return counts


MLX: dict[str, Callable[[Call], Counts]] = {
    "steel_attention": profile_steel_attention,
    "sdpa_vector": profile_sdpa_vector,
    "sdpa_vector_2pass": profile_sdpa_vector_2pass,
}
