"""One launch of each kernel that the mutations change, with the expected result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.mslc.control import mlx_kernels
from tests.mslc.control.mlx_kernels import DECODE, ENCODE
from tests.mslc.control.test_attention import ATTENTION_PARAMS, attention
from tests.mslc.control.test_quantized import batch, quantized

HERE = Path(__file__).parent
ROOT = HERE.parents[2]  # of the repository: our own kernels are included from there


@dataclass
class Launch:
    source: str | Path
    kernel: str
    buffers: dict[int, object]
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    output: np.ndarray
    reference: np.ndarray
    tolerance: float
    constants: Mapping[int | str, object] = field(default_factory=dict)
    defines: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "float"

    def error(self) -> float:
        """Error of the output relative to the largest value; infinite for NaN."""
        error = np.abs(DECODE[self.dtype](self.output) - self.reference).max() / np.abs(self.reference).max()
        return float(np.nan_to_num(error, nan=np.inf))


def mlx(header: str, instance: tuple, *before: str, **defines: int) -> dict:
    source = mlx_kernels.source([*before, header], [instance])
    return {"source": source, "defines": {"MLX_METAL_JIT": 1, **defines}}


def softmax(rng: np.random.Generator) -> Launch:
    x = 3 * rng.standard_normal((3, 203)).astype(np.float32)
    weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    out = np.zeros_like(x)
    return Launch(
        **mlx("softmax.h", ("softmax", "softmax_single_row", "float", "float")),
        kernel="softmax",
        buffers={0: x, 1: out, 2: x.shape[1]},
        grid=(3,),
        threadgroup=(64,),
        output=out,
        reference=weights / weights.sum(-1, keepdims=True),
        tolerance=1e-5,
    )


def sdpa_vector(rng: np.random.Generator) -> Launch:
    heads, length, head_dim, padding = 2, 21, 64, 32
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((heads, 1, head_dim), (heads, length, head_dim)))
    v = rng.standard_normal((heads, length, head_dim + padding)).astype(np.float32)
    out = np.zeros_like(q)
    scale = head_dim**-0.5
    k_strides, v_strides = ([np.array(s, np.uint64) for s in (x[0].size, x.shape[2])] for x in (k, v))
    values = dict(enumerate((q, k, v, out, 1, length, *k_strides, *v_strides, scale)))
    return Launch(
        **mlx("sdpa_vector.h", ("sdpa", "sdpa_vector", "float", head_dim)),
        kernel="sdpa",
        buffers=values,
        grid=(heads, 1, 1),
        threadgroup=(1024, 1, 1),
        output=out,
        reference=attention(*(x.astype(np.float64) for x in (q, k, v[..., :head_dim])), scale),
        tolerance=1e-5,
        constants=dict.fromkeys(range(20, 26), False),
    )


def steel_attention(rng: np.random.Generator) -> Launch:
    """One partial block of keys: everything after the 19 keys is padding."""
    head_dim, queries, keys, block = 64, 32, 19, 32
    q, k, v = (ENCODE["half"](rng.standard_normal((1, n, head_dim))) for n in (queries, keys, keys))
    out = np.zeros_like(q)
    scale = head_dim**-0.5
    params = np.zeros(1, ATTENTION_PARAMS)
    strides = [[n * head_dim, n * head_dim, head_dim] for n in (queries, keys, keys, queries)]
    params[0] = (1, 1, head_dim, queries, keys, 1, scale, 1, 1, 1, 0, 0, keys, keys - queries, strides)
    instance = ("attention", "attention", "half", block, block, head_dim, head_dim, 4, 1, "bool", "float")
    return Launch(
        **mlx("steel/attn/kernels/steel_attention.h", instance),
        kernel="attention",
        buffers={0: q, 1: k, 2: v, 3: out, 4: params},
        grid=(1, 1, 1),
        threadgroup=(32, 4, 1),
        output=out,
        reference=attention(*(DECODE["half"](x) for x in (q, k, v)), scale),
        tolerance=2e-3,
        constants={200: True, 201: False, 300: False, 301: False, 302: False, 303: False},
        dtype="half",
    )


def quantized_matmul_nax(rng: np.random.Generator) -> Launch:
    """MLX's product on matrix units: 4-bit weights in threadgroup memory, 45 rows in tiles of 64."""
    m, n, k, group, dtype = 45, 64, 64, 64, "half"
    packed, scales, biases, weights = quantized(rng, n, k, group, 4, dtype)
    x = ENCODE[dtype](rng.standard_normal((m, k)))
    out = np.zeros((m, n), x.dtype)
    instance = ("qmm_t", "affine_qmm_t_nax", dtype, group, 4, "true", "false")
    before = ("steel/gemm/gemm_nax.h", "quantized_utils.h")
    return Launch(
        **mlx("quantized_nax.h", instance, *before, __METAL_VERSION__=400),
        kernel="qmm_t",
        buffers={0: packed, 1: scales, 2: biases, 3: x, 4: out, 5: k, 6: n, 7: m, **batch(8, 8)},
        grid=(1, 1, 1),
        threadgroup=(32, 2, 2),
        output=out,
        reference=DECODE[dtype](x) @ weights.T,
        tolerance=2e-3,
        dtype=dtype,
    )


ELEMENTWISE_PARAMS = np.dtype(
    [("size", "i8"), ("shape", "i8", 8), ("strides", "i8", (4, 8)), ("rank", "i4"), ("reserved", "i4")]
)


def _silu_gate(kernel: str, gate: np.ndarray, up: np.ndarray, params: np.ndarray, grid: int, aligned: bool) -> Launch:
    out = np.zeros(params[0]["size"], np.float16)
    x = [value.astype(np.float64) for value in (gate, up)]
    return Launch(
        source=ROOT / "metal/silu_gate/silu_gate.metal",
        kernel=kernel,
        buffers={0: gate, 1: up, 2: out, 3: params},
        grid=(grid, 1, 1),
        threadgroup=(32, 1, 1),
        output=out,
        reference=x[0] / (1 + np.exp(-x[0])) * x[1],
        tolerance=2e-3,
        constants={0: aligned},
        dtype="half",
    )


def silu_gate_flat(rng: np.random.Generator) -> Launch:
    gate, up = rng.standard_normal((2, 1003)).astype(np.float16)
    params = np.zeros(1, ELEMENTWISE_PARAMS)
    params["size"] = gate.size
    aligned = np.zeros((2, 1008), np.float16)[:, : gate.size]
    aligned[...] = gate, up
    return _silu_gate("silu_gate_forward_float16_flat", aligned[0], aligned[1], params, 2, True)


def silu_gate_unaligned(rng: np.random.Generator) -> Launch:
    """The same, on arrays that start one element into their memory."""
    gate, up = rng.standard_normal((2, 1004)).astype(np.float16)[:, 1:]
    params = np.zeros(1, ELEMENTWISE_PARAMS)
    params["size"] = gate.size
    return _silu_gate("silu_gate_forward_float16_flat", gate, up, params, 2, False)


def silu_gate_strided(rng: np.random.Generator) -> Launch:
    """gate is a transposed view of its buffer: [13, 20] with strides (1, 13)."""
    gate, up = rng.standard_normal((2, 13 * 20)).astype(np.float16)
    params = np.zeros(1, ELEMENTWISE_PARAMS)
    params[0]["size"], params[0]["rank"] = gate.size, 2
    params[0]["shape"][:2] = 13, 20
    params[0]["strides"][0, :2] = 1, 13
    params[0]["strides"][1, :2] = 20, 1
    launch = _silu_gate("silu_gate_forward_float16_strided", gate, up, params, 2, False)
    x, y = gate.astype(np.float64).reshape(20, 13).T, up.astype(np.float64).reshape(13, 20)
    launch.reference = (x / (1 + np.exp(-x)) * y).reshape(-1)
    return launch


def histogram(rng: np.random.Generator) -> Launch:
    x = rng.integers(0, 16, 500).astype(np.uint32)
    counts = np.zeros(16, np.uint32)
    expected = np.bincount(x, minlength=16).astype(np.float64)
    buffers = {0: x, 1: counts, 2: np.array(x.size, np.uint32)}
    return Launch(HERE / "kernels.metal", "histogram", buffers, (3,), (64,), counts, expected, 0)


def transpose(rng: np.random.Generator) -> Launch:
    x = rng.standard_normal((21, 37)).astype(np.float16)
    out = np.zeros((37, 21), np.float16)
    buffers = {0: x, 1: out, 2: np.array(x.shape, np.uint32)}
    expected = x.T.astype(np.float64)
    return Launch(HERE / "kernels.metal", "transpose", buffers, (3, 2), (16, 16), out, expected, 0, dtype="half")


def product(rng: np.random.Generator) -> Launch:
    a, b = rng.standard_normal((8, 13)).astype(np.float32), rng.standard_normal((13, 8)).astype(np.float32)
    out = np.zeros((8, 8), np.float32)
    buffers = {0: a, 1: b, 2: out, 3: np.array(13, np.uint32)}
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return Launch(HERE / "kernels.metal", "product", buffers, (1,), (32,), out, expected, 1e-5)


LAUNCHES: dict[str, Callable[[np.random.Generator], Launch]] = {
    function.__name__: function
    for function in (
        softmax,
        sdpa_vector,
        steel_attention,
        quantized_matmul_nax,
        silu_gate_flat,
        silu_gate_unaligned,
        silu_gate_strided,
        histogram,
        transpose,
        product,
    )
}
