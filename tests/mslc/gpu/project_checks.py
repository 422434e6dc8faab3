"""Checks of the project's own kernels beyond silu_gate, for run_ptx.py: launched as the ops' dispatch launches them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from dtypes import DECODE, ENCODE, EPSILON, PROJECT_NAME, attention, close

# metal/flash_attention/params.h
ATTENTION = [(f"{name}_strides", "i8", 4) for name in ("q", "k", "v", "mask")]
ATTENTION += [("sinks_strides", "i8", 2)]
ATTENTION += [(name, "i4") for name in ("q_heads", "kv_heads", "group", "q_len", "kv_len", "head_dim", "v_head_dim")]
ATTENTION += [(name, "i4") for name in ("band_low", "band_high")]
ATTENTION += [(name, "f4") for name in ("score_scale", "softcap", "scale")]
ATTENTION += [("out_strides", "i8", 3)]
ATTENTION += [(name, "i4") for name in ("parts", "keys_per_part", "page_shift", "pages", "last_page", "unused")]
ATTENTION = np.dtype(ATTENTION)

# metal/quantized_matmul/params.h
QUANTIZED = np.dtype([(n, "i4") for n in ("rows", "columns", "outputs", "group_shift", "rows_per_part")])

# Constants of the bundle's files: dense arrays, no mask, no sinks, no log-sum-exp, one length, no pages, keys in one
# part, blocks of rows along x.
ATTENTION_CONSTANTS = {
    0: True,
    1: False,
    2: False,
    3: False,
    4: False,
    5: True,
    6: False,
    9: False,
    10: True,
    11: False,
    12: False,
    13: False,
    16: False,
}
QUANTIZED_CONSTANTS = {0: True, 1: False, 2: False, 3: True}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def unpack(w: np.ndarray, bits: int) -> np.ndarray:
    """Codes of rows of uint32: streams of bits from the lowest of the first word."""
    stream = np.unpackbits(w.view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(*w.shape[:-1], -1, bits).astype(np.int64) @ (1 << np.arange(bits))


class ProjectChecks:
    """`self.module(name)` runs kernels of a file, `self.rng` draws."""

    # ---- flash_attention

    def attention_case(self, file, kernel, dtype, shape, causal, grid, threads):
        heads, kv_heads, queries, keys, dim = shape
        lengths = (heads, queries), (kv_heads, keys), (kv_heads, keys)
        q, k, v = (ENCODE[dtype](self.rng.standard_normal((*length, dim))) for length in lengths)
        out, params, scale = np.zeros_like(q), np.zeros(1, ATTENTION), dim**-0.5
        for name, x in (("q", q), ("k", k), ("v", v)):
            params[f"{name}_strides"] = x.size, x[0].size, dim, 1
        params["out_strides"] = params["q_strides"][:, :3]
        sizes = {"q_heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "q_len": queries, "kv_len": keys}
        sizes |= {"head_dim": dim, "v_head_dim": dim, "parts": 1, "keys_per_part": keys}
        for name, value in sizes.items():
            params[name] = value
        params["band_low"] = -2 * (queries + keys)
        params["band_high"] = keys - queries + (0 if causal else queries)
        params["score_scale"], params["scale"] = scale * np.log2(np.e), scale
        unused = np.zeros(1, np.float32)
        tables = [unused] * (2 if file == "flash_decode" else 1)  # of sequences, of pages
        buffers = dict(enumerate([q, k, v, q, unused, *tables, out, unused, params]))
        self.module(file).run(kernel, buffers, grid, threads)
        exact = attention(*(DECODE[dtype](x) for x in (q, k, v)), scale, causal)
        return f"{kernel}{', causal' if causal else ''}: " + close(DECODE[dtype](out), exact, 2 * EPSILON[dtype] + 5e-6)

    def check_flash_attention(self) -> Iterator[str]:
        """Forward, with ragged lengths."""
        for dtype in ENCODE:
            for dim, threads in ((64, 256), (128, 256 if dtype != "float" else 128)):
                for causal in (False, True):
                    shape = (4, 2, 70, 101, dim)
                    kernel = f"flash_attention_forward_{PROJECT_NAME[dtype]}_d{dim}v{dim}"
                    grid = (-(-shape[2] // (threads // 4)), shape[0], 1)  # 8 rows per SIMD group
                    yield self.attention_case("flash_forward", kernel, dtype, shape, causal, grid, (threads,))

    def check_flash_attention_decode(self) -> Iterator[str]:
        for dtype in ENCODE:
            for dim in (64, 128):
                kernel = f"flash_attention_decode_{PROJECT_NAME[dtype]}_d{dim}r4"
                shape = (8, 2, 1, 333, dim)
                yield self.attention_case("flash_decode", kernel, dtype, shape, True, (1, 2, 1), (512,))

    # ---- quantized_matmul

    def quantized_case(self, dtype, name, bits, rows, outputs, columns, group):
        """Arrays of one matrix, and what it stands for."""
        w = self.rng.integers(0, 2**32, (outputs, columns * bits // 32), dtype=np.uint32)
        codes = unpack(w, bits)
        per_group = (outputs, columns // group)
        if name.startswith("affine"):
            scales, biases = (ENCODE[dtype](self.rng.standard_normal(per_group) * s) for s in (2.0**-bits, 0.5))
            weights = codes * DECODE[dtype](scales).repeat(group, -1) + DECODE[dtype](biases).repeat(group, -1)
            return (w, scales, biases), weights
        raw = self.rng.integers(120, 124, per_group).astype(np.uint8)
        values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
        return (w, raw, np.zeros(8, ENCODE[dtype](np.zeros(1)).dtype)), values * (2.0 ** (raw - 127.0)).repeat(
            group, -1
        )

    def check_quantized(self) -> Iterator[str]:
        """Every kind of kernel, for three ways to unpack."""
        for dtype in ENCODE:
            for name, bits, group in (("affine4", 4, 64), ("affine3", 3, 32), ("mxfp4", 4, 32)):
                for kernel, rows, outputs, columns in (
                    ("gemv", 1, 37, 1344),
                    ("gemv", 8, 37, 320),
                    ("swiglu", 4, 21, 1088),
                    ("plain", 2, 67, 1344),
                    ("plain", 8, 301, 320),
                    ("matmul_transposed", 40, 72, 192),
                    ("matmul_plain", 40, 72, 192),
                ):
                    if kernel.startswith("matmul") and dtype != "float":
                        continue  # 16-bit products of many rows are dense on such GPUs
                    sizes = (rows, outputs, columns)
                    yield self.run_quantized(kernel, dtype, name, bits, group, *sizes)

    def run_quantized(self, kernel, dtype, name, bits, group, rows, outputs, columns):
        matrices = [
            self.quantized_case(dtype, name, bits, rows, outputs, columns, group)
            for _ in range(2 if kernel == "swiglu" else 1)
        ]
        plain = kernel in ("plain", "matmul_plain")
        x = ENCODE[dtype](self.rng.standard_normal((rows, outputs if plain else columns)))
        out = ENCODE[dtype](np.zeros((rows, columns if plain else outputs)))
        params = np.zeros(1, QUANTIZED)
        params[0] = (rows, columns, outputs, group.bit_length() - 1, outputs)
        arrays = [array for arrays, _ in matrices for array in arrays]
        buffers = dict(enumerate([x, *arrays, out, params]))
        streams = (2 if rows > 4 else 4) // len(matrices)
        grid = {
            "plain": (-(-columns // (32 * min(32, 64 // rows))), 1, 1),
            "matmul_transposed": (-(-outputs // 64), -(-rows // 32), 1),
            "matmul_plain": (-(-columns // 64), -(-rows // 32), 1),
        }.get(kernel, (-(-outputs // (4 * streams)), 1, 1))
        suffix = "" if kernel.startswith("matmul") else f"_r{rows}"
        full = f"quantized_{kernel}_{PROJECT_NAME[dtype]}_{name}{suffix}"
        file = {"plain": "quantized_plain", "gemv": "quantized_gemv", "swiglu": "quantized_gemv"}
        self.module(file.get(kernel, "quantized_matmul")).run(full, buffers, grid, (256 if kernel == "plain" else 128,))
        factors = [DECODE[dtype](x) @ (weights if plain else weights.T) for _, weights in matrices]
        exact = factors[0] if len(factors) == 1 else factors[0] / (1 + np.exp(-factors[0])) * factors[1]
        return f"{full}: " + close(DECODE[dtype](out), exact, EPSILON[dtype] + 3e-6)
