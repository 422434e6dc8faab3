"""Launches of MLX's kernels beside those of estimate_launches.py: quantized products, a decode in one pass, and rows.

A kernel that the wheel has no header of is read from MLX's repository (mlx_source.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import numpy as np

import estimate_launches as launches
from agx import _INCLUDE
from estimate_launches import GEMM, TYPES, Launch, _draw
from mlx_anvil.mslc import Source
from mlx_anvil.mslc.estimate_work import Work, measure_work
from mlx_source import metal_file

QUANTIZED = (*GEMM, "quantized_utils.h", "quantized.h")

# ---- products


def qmv_rows(rows: int, outputs: int, columns: int, bits: int, dtype: str = "float16") -> Launch:
    """MLX's kernel of one row, for each row."""
    one = launches.qmv(outputs, columns, bits, dtype)
    sizes = {**one.sizes, "y": rows * outputs * 2, "x": rows * columns * 2}
    return replace(one, grid=(rows, outputs // 8, 1), sizes=sizes)


def qmv_wide(rows: int, outputs: int, columns: int, bits: int, dtype: str = "float16") -> Launch:
    """MLX's kernel of 2 to 5 rows at once."""
    tiles = ceil(rows / 5)
    vectors, lanes = ceil(rows / tiles), 8
    per_group = 2 * 32 // lanes
    base = launches.qmv(outputs, columns, bits, dtype)
    x, out = _draw((rows, columns), dtype), np.zeros((rows, 32), TYPES[dtype][1])
    buffers: dict[int, Any] = {i: base.buffers[i] for i in range(3)} | {3: x, 4: out, 5: columns, 6: 32, 7: rows}
    buffers |= {8 + i: base.buffers[7 + i] for i in range(8)}
    sizes = {**base.sizes, "y": rows * outputs * 2}
    grid, sample = (ceil(rows / vectors), outputs // per_group, 1), (ceil(rows / vectors), 32 // per_group, 1)
    arguments = (TYPES[dtype][0], 64, bits, vectors, lanes, "false")
    return Launch(QUANTIZED, "affine_qmv_wide", arguments, buffers, grid, sample, (32, 2, 1), {}, sizes)


def qmm(rows: int, outputs: int, columns: int, bits: int, dtype: str = "float16") -> Launch:
    """MLX's product of many rows: one of its tiles of 32 by 32 is simulated."""
    base, part = launches.qmv(outputs, columns, bits, dtype), min(rows, 32)
    buffers: dict[int, Any] = dict(base.buffers)
    buffers |= {3: _draw((part, columns), dtype), 4: np.zeros((part, 32), TYPES[dtype][1]), 7: part}
    buffers |= {8 + i: base.buffers[7 + i] for i in range(8)}
    sizes = {**base.sizes, "x": rows * columns * 2, "y": rows * outputs * 2}
    arguments = (TYPES[dtype][0], 64, bits, "true", "false")
    grid = (outputs // 32, ceil(rows / 32), 1)
    return Launch(QUANTIZED, "affine_qmm_t", arguments, buffers, grid, (1, 1, 1), (32, 2, 2), {}, sizes)


def qmm_split(
    rows: int, outputs: int, columns: int, bits: int, split: int, dtype: str = "float16"
) -> Launch:  # fmt: skip
    """The same, with the summed dimension in parts."""
    whole = qmm(rows, outputs, columns, bits, dtype)
    part = min(rows, 32)
    buffers: dict[int, Any] = {i: whole.buffers[i] for i in range(8)} | {8: columns // split, 9: part * 32}
    buffers[4] = np.zeros((split, part, 32), np.float32)
    sizes = {**whole.sizes, "y": rows * outputs * split * 4}
    return replace(
        whole, function="affine_qmm_t_splitk", arguments=(TYPES[dtype][0], 64, bits, "true"), buffers=buffers,
        grid=(*whole.grid[:2], split), sample=(1, 1, 1), sizes=sizes,
    )  # fmt: skip


# ---- attention


def decode_at_once(keys: int, dim: int, heads: int, kv_heads: int, dtype: str = "float16") -> Launch:
    q, out = _draw((1, 1, dim), dtype), np.zeros((1, 1, dim), TYPES[dtype][1])
    k, v = (_draw((keys, dim), dtype) for _ in range(2))
    strides = [np.array(n, np.uint64) for n in (keys * dim, dim)]
    buffers: dict[int, Any] = {0: q, 1: k, 2: v, 3: out, 4: heads // kv_heads, 5: keys, 10: dim**-0.5}
    buffers |= dict(enumerate([*strides, *strides], start=6))
    size = kv_heads * keys * dim * 2
    return Launch(
        ("sdpa_vector.h",), "sdpa_vector", (TYPES[dtype][0], dim), buffers, (heads, 1, 1), (1, 1, 1), (1024, 1, 1),
        dict.fromkeys(range(20, 26), False), {"keys": size, "values": size},
    )  # fmt: skip


# ---- row by row


def _from_repository(file: str) -> Source:
    return Source.load(metal_file(file), [_INCLUDE], {"MLX_METAL_JIT": 1})


@dataclass
class Whole:
    """A launch of a source that is not a template of the wheel's headers."""

    text: Source
    function: str
    buffers: dict[int, Any]
    grid: Sequence[int]
    sample: Sequence[int]
    threadgroup: Sequence[int]
    constants: dict[int, object]
    sizes: dict[str, float]

    def source(self) -> Source:
        return self.text

    def work(self) -> Work:
        return measure_work(
            self.text, self.function, self.buffers, self.grid, self.threadgroup, constants=self.constants,
            sample=self.sample, sizes=self.sizes,
        )  # fmt: skip


def rms_norm(rows: int, columns: int) -> Whole:
    """MLX's kernel of up to 4096 columns, float16."""
    part = min(rows, 8)
    x = _draw((part, columns), "float16")
    buffers: dict[int, Any] = {0: x, 1: _draw((columns,), "float16"), 2: np.zeros_like(x), 3: 1e-5}
    buffers |= {4: columns, 5: 1}
    threads = ceil(columns / 4 / 32) * 32
    size = rows * columns * 2.0
    return Whole(_from_repository("rms_norm.metal"), "rmsfloat16", buffers, (rows, 1, 1), (part, 1, 1),
                 (threads, 1, 1), {20: True}, {"x": size, "out": size})  # fmt: skip


def argmax(rows: int, columns: int) -> Whole:
    """MLX's argmax over the last dimension, float16."""
    buffers: dict[int, Any] = {0: _draw((1, columns), "float16"), 1: np.zeros(1, np.uint32)}
    buffers |= {2: np.ones(1, np.int32), 3: np.zeros(1, np.int64), 4: np.zeros(1, np.int64)}
    buffers |= {5: np.zeros(1, np.uint64), 6: np.ones(1, np.int64), 7: np.array([columns], np.uint64)}
    return Whole(_from_repository("arg_reduce.metal"), "argmax_float16", buffers, (1, rows, 1), (1, 1, 1),
                 (1024, 1, 1), {}, {"in": rows * columns * 2.0})  # fmt: skip


def rope(heads: int, length: int, dim: int) -> Whole:
    """q or k of one batch, contiguous, float16."""
    source, single = _from_repository("rope.metal"), length == 1
    part = min(length, 8)
    size = heads * length * dim * 2.0
    x = _draw((heads, part, dim), "float16")
    buffers: dict[int, Any] = {0: x, 1: np.zeros_like(x), 2: np.array([100], np.int32), 3: 1.0, 10: 13.3}
    constants: dict[int, object] = {1: True, 2: False, 3: False}
    sizes = {"in": size, "out": size}
    if single:
        buffers[4] = np.array([dim], np.int64)
        high = min(heads, 16)
        grid = (1, ceil(heads / high), 1)
        return Whole(source, "rope_single_float16", buffers, grid, grid, (64, high, 1), constants, sizes)
    strides = np.array([part * dim, dim, 1], np.int64)
    buffers |= {4: strides, 5: strides.copy(), 6: np.zeros(1, np.int64), 7: heads}
    planes = ceil(heads / 4)
    return Whole(source, "rope_float16", buffers, (1, ceil(length / 8), planes), (1, 1, planes), (64, 8, 1), constants,
                 sizes)  # fmt: skip


def gather(ids: int, columns: int, dtype: str) -> Launch:
    """Rows of a matrix, chosen by ids: MLX's gather along the first axis."""
    name, kind = {"uint32": ("uint32_t", np.uint32), "float16": ("half", np.float16)}[dtype]
    each, part = 1 if dtype == "uint32" else 2, min(ids, 32)
    wide, high = _block(columns // each, ids)
    rows = np.random.default_rng(2).integers(0, 1000, (1024, columns)).astype(kind)
    buffers: dict[int, Any] = {0: rows, 1: np.arange(0, 31 * part, 31, np.int32), 2: np.zeros((part, columns), kind)}
    buffers |= {3: np.int64(columns), 4: 1024}
    size = ids * columns * np.dtype(kind).itemsize
    grid, sample = ((columns // each // wide, ceil(n / high), 1) for n in (ids, part))
    return Launch(("indexing/indexing.h", "indexing/gather_front.h"), "gather_front", (name, "int32_t", "int", each),
                  buffers, grid, sample, (wide, high, 1), {}, {"src": size, "out": size, "indices": ids * 4})  # fmt: skip


def dequantize(rows: int, columns: int) -> Launch:
    """4 bits in groups of 64, float16."""
    part = min(rows, 8)
    codes = np.random.default_rng(3).integers(0, 256, (part, columns // 2)).astype(np.uint8)
    factors = _draw((part, columns // 64), "float16")
    buffers = dict(enumerate([codes, factors, factors.copy(), np.zeros((part, columns), np.float16)]))
    sizes = {"w": rows * codes.shape[1], "out": rows * columns * 2}
    sizes |= dict.fromkeys(("scales", "biases"), rows * columns // 64 * 2)
    grid, sample = ((columns // 2 * n // 1024, 1, 1) for n in (rows, part))
    return Launch((*GEMM, "quantized_utils.h", "quantized.h"), "affine_dequantize", ("half", 64, 4), buffers,
                  grid, sample, (1024, 1, 1), {}, sizes)  # fmt: skip


def _block(wide: int, high: int) -> tuple[int, int]:
    """MLX's threadgroup for a grid: powers of two that grow in turn, up to 1024 threads."""
    sizes = [1, 1]
    while True:
        before = list(sizes)
        for i, most in enumerate((wide, high)):
            if 2 * sizes[i] <= most and prod(sizes) < 1024:
                sizes[i] *= 2
        if sizes == before:
            return sizes[0], sizes[1]


def add(size: int) -> Launch:
    """Of two arrays, four elements a thread."""
    each = 4 if size >= 1 << 16 else 1
    part = min(size, 8 * 1024 * each)
    arrays = [_draw((part,), "float16") for _ in range(2)]
    buffers = dict(enumerate([*arrays, np.zeros(part, np.float16), np.array(part, np.uint32)]))
    threads = min(1024, size // each)
    return Launch(("binary_ops.h", "binary.h"), "binary_vv", ("half", "half", "Add", each), buffers,
                  (ceil(size / threads / each), 1, 1), (ceil(part / threads / each), 1, 1), (threads, 1, 1), {},
                  dict.fromkeys("abc", size * 2.0))  # fmt: skip


_SWIGLU = """#include <metal_stdlib>
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/unary_ops.h"
#include "mlx/backend/metal/kernels/binary_ops.h"
[[kernel]] void swiglu(const device half* gate [[buffer(0)]], const device half* up [[buffer(1)]],
                       device half* out [[buffer(2)]], constant const uint& size [[buffer(3)]],
                       uint3 pos [[thread_position_in_grid]]) {
  uint index = 4 * pos.x;
  for (int i = 0; i < 4 && index < size; ++i) {
    half a = gate[index], b = up[index];
    half c = Sigmoid()(a);
    half d = Multiply()(a, c);
    out[index] = Multiply()(d, b);
    index++;
  }
}
"""


def swiglu(size: int) -> Whole:
    """silu(gate) * up as mx.compile writes it: one kernel, in float16 all along."""
    part = min(size, 4 * 8 * 256)
    source = Source.load(_SWIGLU, [_INCLUDE], {"MLX_METAL_JIT": 1})
    arrays = [_draw((part,), "float16") for _ in range(2)]
    buffers = dict(enumerate([*arrays, np.zeros(part, np.float16), np.array(part, np.uint32)]))
    return Whole(source, "swiglu", buffers, (ceil(size / 1024), 1, 1), (ceil(part / 1024), 1, 1), (256, 1, 1), {},
                 dict.fromkeys(("gate", "up", "out"), size * 2.0))  # fmt: skip


def softmax(rows: int, columns: int) -> Launch:
    """Of up to 4096 columns, float32."""
    part = 8
    x = _draw((part, columns), "float32")
    threads, size = ceil(columns / 4 / 32) * 32, rows * columns * 4
    return Launch(
        ("softmax.h",), "softmax_single_row", ("float", "float"), {0: x, 1: np.zeros_like(x), 2: columns},
        (rows, 1, 1), (part, 1, 1), (threads, 1, 1), {}, {"in": size, "out": size},
    )  # fmt: skip


# What else published times are of (estimate.py).
_K, _N = 5120, 17408
PUBLISHED: dict[str, Callable[[], Any]] = {
    **{f"qmv_wide 4 bits {m} rows {_N}x{_K}": lambda m=m: qmv_wide(m, _N, _K, 4, "bfloat16") for m in (2, 4, 6, 8, 9)},
    **{f"qmm 4 bits {m} rows {_N}x{_K}": lambda m=m: qmm(m, _N, _K, 4, "bfloat16") for m in (12, 16, 32, 33)},
    "qmm 4 bits 256 rows 2048x8192": lambda: qmm(256, 2048, 8192, 4),
    "qmm 4 bits 64 rows 2048x8192, 4 parts": lambda: qmm_split(64, 2048, 8192, 4, 4),
    "qmm 4 bits 128 rows 2048x8192, 2 parts": lambda: qmm_split(128, 2048, 8192, 4, 2),
    "softmax float32 65536x1024": lambda: softmax(65536, 1024),
    "softmax float32 524288x128": lambda: softmax(524288, 128),
}
