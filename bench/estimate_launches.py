"""Launches of MLX's kernels whose times are published, made small enough for the simulator (estimate.py).

A launch is of MLX's wheel, unchanged, with the tiles of its dispatch. A part of its threadgroups stands for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agx import _HEADERS, _INCLUDE
from mlx_anvil.mslc import Source
from mlx_anvil.mslc.estimate_work import Work, measure_work

GEMM = ("steel/utils.h", "steel/gemm/gemm.h")
TYPES = {"float32": ("float", np.float32), "float16": ("half", np.float16), "bfloat16": ("bfloat16_t", np.uint16)}
_SIZES = ("M", "N", "K", "lda", "ldb", "ldd", "tiles_n", "tiles_m")
GEMM_PARAMS = np.dtype(
    [(name, "i4") for name in _SIZES]
    + [(name, "i8") for name in ("batch_stride_a", "batch_stride_b", "batch_stride_d")]
    + [(name, "i4") for name in ("swizzle_log", "gemm_k_iterations_aligned", "batch_ndim", "padding")]
)
ADDMM_PARAMS = np.dtype([("ldc", "i4"), ("fdc", "i4"), ("batch_stride_c", "i8"), ("alpha", "f4"), ("beta", "f4")])
_ATTENTION_NAMES = ["B", "H", "D", "qL", "kL", "gqa_factor", "scale", "NQ", "NK", "NQ_aligned", "NK_aligned"]
_ATTENTION_NAMES += ["qL_rem", "kL_rem", "qL_off", "strides"]
ATTENTION_PARAMS = np.dtype(
    {
        "names": _ATTENTION_NAMES,
        "formats": ["i4"] * 6 + ["f4"] + ["i4"] * 7 + ["(4,3)i8"],
    },
    align=True,
)


@dataclass
class Launch:
    headers: Sequence[str]
    function: str
    arguments: Sequence[object]  # of the template
    buffers: Mapping[int, Any]
    grid: Sequence[int]
    sample: Sequence[int]
    threadgroup: Sequence[int]
    constants: Mapping[int, object] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    def source(self) -> Source:
        lines = ["#include <metal_stdlib>"]
        lines += [f'#include "{_HEADERS}/{header}"' for header in ("utils.h", *self.headers)]
        arguments = ", ".join(map(str, self.arguments))
        lines.append(f'instantiate_kernel("{self.function}", {self.function}, {arguments})')
        return Source.load("\n".join(lines) + "\n", [_INCLUDE], {"MLX_METAL_JIT": 1})

    def work(self) -> Work:
        options: dict[str, Any] = {"constants": self.constants, "sample": self.sample, "sizes": self.sizes}
        return measure_work(self.source(), self.function, self.buffers, self.grid, self.threadgroup, **options)


def _draw(shape: Sequence[int], dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)


def gemm(
    m: int, n: int, k: int, batch: int = 1, dtype: str = "float32", tile: Sequence[int] = (64, 64, 16, 2, 2),
    bias: bool = False, transposed: bool = False,
) -> Launch:  # fmt: skip
    """x [m, k] times w [k, n]; `transposed`: w [n, k]."""
    block_m, block_n, block_k, *warps = tile
    tiles_n, tiles_m = -(-n // block_n), -(-m // block_m)
    rows = block_m if m % block_m == 0 else m  # of the sample, one tile
    size = TYPES[dtype][1]().itemsize
    params, addmm = np.zeros(1, GEMM_PARAMS), np.zeros(1, ADDMM_PARAMS)
    sizes = (rows, n, k, k, k if transposed else n, n, tiles_n, -(-rows // block_m))
    params[0] = (*sizes, rows * k, n * k, rows * n, 0, k // block_k, 1, 0)
    addmm[0] = (0, 1, 0, 1.0, 1.0)
    buffers: dict[int, Any] = {0: _draw((rows, k), dtype), 1: _draw((n, k) if transposed else (k, n), dtype)}
    buffers |= {3: np.zeros((rows, n), TYPES[dtype][1]), 4: params}
    buffers |= {2: _draw((n,), dtype), 5: addmm} if bias else {}
    constants = {10: False, 100: bias, 110: False, 200: m % block_m == 0, 201: n % block_n == 0, 202: k % block_k == 0}
    flags = ("false", "true" if transposed else "false")
    return Launch(
        (*GEMM, "steel/gemm/kernels/steel_gemm_fused.h"), "gemm", (TYPES[dtype][0], *tile, *flags), buffers,
        (tiles_n, tiles_m, batch), (tiles_n, -(-rows // block_m), 1), (32, warps[1], warps[0]), constants,
        {"A": batch * m * k * size, "B": batch * n * k * size, "C": n * size, "D": batch * m * n * size},
    )  # fmt: skip


def gemv(rows: int, columns: int, batch: int = 1, dtype: str = "float32") -> Launch:
    """w [rows, columns] times x, with the tile that MLX takes for many rows."""
    tile = (8, 1, 1, 32, 4, 4) if rows >= 4096 else (4, 1, 1, 32, 4, 4)
    per_group = tile[0] * tile[2] * tile[4]
    size = TYPES[dtype][1]().itemsize
    part, one, zero = 4 * per_group, np.ones(1, np.int32), np.zeros(1, np.int64)
    buffers = {0: _draw((part, columns), dtype), 1: _draw((columns,), dtype), 2: np.zeros(part, TYPES[dtype][1])}
    buffers |= {3: np.zeros(part, TYPES[dtype][1]), 4: columns, 5: part, 6: columns, 7: 1.0, 8: 0.0, 9: 1}
    buffers |= {10: one, 11: zero, 12: zero, 13: zero, 14: 1}
    sizes = {"mat": batch * rows * columns * size, "in_vec": batch * columns * size, "out_vec": batch * rows * size}
    grid, sample = (-(-rows // per_group), 1, batch), (4, 1, 1)
    arguments = (TYPES[dtype][0], *tile, 0, "false")
    return Launch(("gemv.h",), "gemv", arguments, buffers, grid, sample, (32, tile[1], tile[0]), {}, sizes)


def qmv(rows: int, columns: int, bits: int, dtype: str = "bfloat16") -> Launch:
    """One row of x times a quantized matrix, groups of 64."""
    part, words, groups = 32, columns * bits // 32, columns // 64
    out = np.zeros(part, TYPES[dtype][1])
    scales = _draw((part, groups), dtype)
    w = np.random.default_rng(1).integers(0, 1 << 32, (part, words), np.uint32)
    buffers: dict[int, Any] = dict(enumerate([w, scales, scales.copy(), _draw((columns,), dtype), out, columns, part]))
    shape, strides = np.ones(4, np.int32), np.zeros(4, np.int64)
    buffers |= {7: 1, 8: shape, 9: strides, 10: 1, 11: shape, 12: strides, 13: strides, 14: strides}
    sizes = {"w": rows * words * 4, "scales": rows * groups * 2, "biases": rows * groups * 2, "y": rows * 2}
    headers = (*GEMM, "quantized_utils.h", "quantized.h")
    arguments = (TYPES[dtype][0], 64, bits, "false")
    return Launch(
        headers, "affine_qmv_fast", arguments, buffers, (1, rows // 8, 1), (1, part // 8, 1), (32, 2, 1), {}, sizes
    )


def attention(length: int, dim: int, heads: int, dtype: str, causal: bool = False, keys: int | None = None) -> Launch:
    """One tile of queries stands for all (the last one and the first, half each, with a causal mask: on average)."""
    block_q, block_k = 32, 32 if dim < 128 else 16
    length_k = keys or length
    tiles_q, tiles_k = length // block_q, length_k // block_k
    queries = _draw((block_q, dim), dtype)
    k, v = (_draw((length_k, dim), dtype) for _ in range(2))
    params = np.zeros(1, ATTENTION_PARAMS)
    strides = [[x.size, x.size, dim] for x in (queries, k, v, queries)]
    offset = (length_k - block_q) // 2 if causal else 0
    params[0] = (1, 1, dim, block_q, length_k, 1, dim**-0.5, 1, tiles_k, 1, tiles_k, 0, 0, offset, strides)
    constants = {200: True, 201: True, 300: False, 301: causal, 302: False, 303: False}
    buffers = {0: queries, 1: k, 2: v, 3: np.zeros_like(queries), 4: params}
    size = heads * dim * 2
    sizes = {"Q": size * length, "K": size * length_k, "V": size * length_k, "O": size * length}
    arguments = (TYPES[dtype][0], block_q, block_k, dim, dim, 4, 1, "bool", "float")
    return Launch(
        ("steel/attn/kernels/steel_attention.h",), "attention", arguments, buffers, (tiles_q, heads, 1), (1, 1, 1),
        (32, 4, 1), constants, sizes,
    )  # fmt: skip


def decode(keys: int, dim: int, heads: int, kv_heads: int, blocks: int, dtype: str) -> Launch:
    """The first of two passes of a decode; the second reads what it writes and is small."""
    group = heads // kv_heads
    part = blocks if keys * dim < 1 << 22 else 8  # blocks of keys in the sample
    q, out = _draw((group, 1, dim), dtype), np.zeros((group, 1, blocks, dim), TYPES[dtype][1])
    k, v = (_draw((keys, dim), dtype) for _ in range(2))
    sums, maxima = (np.zeros((group, 1, blocks), np.float32) for _ in range(2))
    strides = [np.array(n, np.uint64) for n in (keys * dim, dim)]
    buffers: dict[int, Any] = {0: q, 1: k, 2: v, 3: out, 4: sums, 5: maxima, 7: keys, 12: dim**-0.5}
    buffers |= dict(enumerate([*strides, *strides], start=8))
    size = kv_heads * keys * dim * 2
    return Launch(
        ("sdpa_vector.h",), "sdpa_vector_2pass_1", (TYPES[dtype][0], dim), buffers, (kv_heads, 1, blocks), (1, 1, part),
        (32, group, 1), dict.fromkeys(range(20, 26), False) | {26: blocks}, {"keys": size, "values": size},
    )  # fmt: skip


def combine(dim: int, heads: int, blocks: int, dtype: str) -> Launch:
    """The second pass of a decode."""
    partials, out = _draw((1, 1, blocks, dim), dtype), np.zeros((1, 1, dim), TYPES[dtype][1])
    sums = np.ones((1, 1, blocks), np.float32)
    buffers = dict(enumerate([partials, sums, sums.copy(), out, blocks]))
    sizes = {"partials": heads * partials.nbytes, "sums": heads * sums.nbytes, "maxs": heads * sums.nbytes}
    return Launch(
        ("sdpa_vector.h",), "sdpa_vector_2pass_2", (TYPES[dtype][0], dim), buffers, (heads, 1, 1), (1, 1, 1),
        (1024, 1, 1), dict.fromkeys(range(20, 26), False) | {26: blocks}, sizes,
    )  # fmt: skip


def sigmoid(size: int) -> Launch:
    """An element a thread."""
    part = 8 * 1024
    buffers = {0: _draw((part,), "float32"), 1: np.zeros(part, np.float32), 2: np.array(part, np.uint32)}
    return Launch(
        ("unary_ops.h", "unary.h"), "unary_v", ("float", "float", "Sigmoid", 1), buffers, (size // 1024, 1, 1),
        (8, 1, 1), (1024, 1, 1), {}, {"in": size * 4, "out": size * 4},
    )  # fmt: skip


_BF16_LARGE = (64, 64, 16, 1, 2)
LAUNCHES: dict[str, Callable[[], Launch]] = {
    "gemm float32 1000x64x1024x32": lambda: gemm(64, 32, 1024, 1000),
    "gemm float32 1000x1024x64x256": lambda: gemm(1024, 256, 64, 1000),
    "gemm float32 64000x256x32": lambda: gemm(64000, 32, 256),
    "gemm float32 1000000x64x1024": lambda: gemm(1000000, 1024, 64),
    "addmm float32 102400x256x1024": lambda: gemm(102400, 1024, 256, bias=True),
    "addmm float32 102400x512x1024": lambda: gemm(102400, 1024, 512, bias=True),
    "gemm float32 16x1024x1024x1024": lambda: gemm(1024, 1024, 1024, 16),
    "gemm float32 4x1024x1024x4096": lambda: gemm(1024, 4096, 1024, 4),
    "gemm float32 4096x4096x4096": lambda: gemm(4096, 4096, 4096),
    "gemm float32 1024x11008x4096": lambda: gemm(1024, 4096, 11008),
    "gemm float32 8192x11008x4096": lambda: gemm(8192, 4096, 11008),
    "gemm float32 2048x4096x11008": lambda: gemm(2048, 11008, 4096),
    "gemm bfloat16 4096x5376x4096": lambda: gemm(4096, 4096, 5376, dtype="bfloat16", tile=_BF16_LARGE),
    "gemm bfloat16 15731x2688x4096": lambda: gemm(15744, 4096, 2688, dtype="bfloat16", tile=_BF16_LARGE),
    "gemm bfloat16 15731x5376x5376": lambda: gemm(15744, 5376, 5376, dtype="bfloat16", tile=_BF16_LARGE),
    "gemv float32 32x32768x128": lambda: gemv(32768, 128, 32),
    "gemv bfloat16 17408x5120": lambda: gemv(17408, 5120, dtype="bfloat16"),
    "sigmoid float32 8388608": lambda: sigmoid(64 * 128 * 1024),
    "sigmoid float32 2097152": lambda: sigmoid(128 * 16 * 1024),
    "qmv 4 bits 17408x5120": lambda: qmv(17408, 5120, 4),
    "qmv 2 bits 17408x5120": lambda: qmv(17408, 5120, 2),
    "attention float16 32x512x64": lambda: attention(512, 64, 32, "float16"),
    "attention float16 32x1024x64": lambda: attention(1024, 64, 32, "float16"),
    "attention float16 32x2048x64": lambda: attention(2048, 64, 32, "float16"),
    "attention float16 32x4096x64": lambda: attention(4096, 64, 32, "float16"),
    "attention bfloat16 16x8192x72": lambda: attention(8192, 72, 16, "bfloat16"),
    "decode bfloat16 32/4x100000x256": lambda: decode(100000, 256, 32, 4, 1024, "bfloat16"),
}
