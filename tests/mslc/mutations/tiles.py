"""Launches of our own kernels that keep tiles in threadgroup memory, where vectors read and write them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.mslc.control.mlx_kernels import DECODE, ENCODE
from tests.mslc.mutations.launches import ROOT, Launch

# metal/flash_attention/params.h
COMMON = [(f"{name}_strides", "i8", 4) for name in ("q", "k", "v", "mask")]
COMMON += [("sinks_strides", "i8", 2)]
COMMON += [(name, "i4") for name in ("q_heads", "kv_heads", "group", "q_len", "kv_len", "head_dim", "v_head_dim")]
COMMON += [(name, "i4") for name in ("band_low", "band_high")]
COMMON += [(name, "f4") for name in ("score_scale", "softcap", "scale")]
FORWARD_FIELDS = [*COMMON, ("out_strides", "i8", 3), ("parts", "i4"), ("keys_per_part", "i4")]
FORWARD_FIELDS += [(name, "i4") for name in ("page_shift", "pages_per_sequence", "last_page", "unused")]
FORWARD = np.dtype(FORWARD_FIELDS)
CODES = [("scales_strides", "i8", 3), ("biases_strides", "i8", 3), ("bits", "i4"), ("group_shift", "i4")]
QUANTIZED = np.dtype([*FORWARD_FIELDS, ("keys", CODES), ("values", CODES)])
BACKWARD = [*COMMON, ("out_strides", "i8", 4), ("d_out_strides", "i8", 4), ("d_lse_strides", "i8", 3)]
BACKWARD += [(f"d_{name}_strides", "i8", 3) for name in "qkv"]
BACKWARD += [(name, "i4") for name in ("first_head", "first_row", "rows", "stored_keys", "sequences", "unused")]
HEAD_DIM, SCALE = 64, 0.125


def _attention_params(layout: list | np.dtype, queries: int, keys: int) -> np.ndarray:
    params = np.zeros(1, layout)
    head = params[0]
    for name in params.dtype.names:
        if name.endswith("_strides") and not name.startswith(("mask", "sinks")):
            rows = keys if name.split("_")[-2] in "kv" else queries
            strides = (rows * HEAD_DIM, rows * HEAD_DIM, HEAD_DIM, 1)
            head[name] = strides[: len(head[name])]
    for name in ("q_heads", "kv_heads", "group"):
        head[name] = 1
    head["q_len"], head["kv_len"], head["head_dim"], head["v_head_dim"] = queries, keys, HEAD_DIM, HEAD_DIM
    head["band_low"], head["band_high"] = -keys, keys
    head["score_scale"], head["scale"] = SCALE * np.log2(np.e), SCALE
    return params


def _attention(
    rng: np.random.Generator, queries: int, keys: int, dtype: str = "half"
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """q, k, v and the gradient of the output: as they are stored, and as the numbers that they are."""
    stored = [ENCODE[dtype](rng.standard_normal((n, HEAD_DIM))) for n in (queries, keys, keys, queries)]
    return stored, [DECODE[dtype](x) for x in stored]


def _forward(rng: np.random.Generator, file: str, kernel: str, queries: int, threads: int) -> Launch:
    keys, pages = 40, "decode" in file
    (q, k, v, _), (qs, ks, vs, _) = _attention(rng, queries, keys)
    weights = np.exp(SCALE * qs @ ks.T)
    out = np.zeros_like(q)
    params = _attention_params(FORWARD, queries, keys)
    params[0]["parts"], params[0]["keys_per_part"] = 1, keys
    return Launch(
        ROOT / file,
        kernel,
        dict(enumerate([q, k, v, q, q, q, *[q] * pages, out, out, params])),
        (1, 1, 1),
        (threads, 1, 1),
        out,
        weights @ vs / weights.sum(-1, keepdims=True),
        2e-3,
        constants={**dict.fromkeys((*range(5), 6, *range(9, 17)), False), 5: True},
        dtype="half",
    )


def _quantized_rows(rng: np.random.Generator, rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Codes of 4 bits, in groups of 32, with scales and biases of type half; and what they stand for."""
    group = 32
    codes = rng.integers(0, 16, (rows, HEAD_DIM), np.uint32)
    words = (codes.reshape(rows, -1, 8) << 4 * np.arange(8, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    scales, biases = (ENCODE["half"](rng.standard_normal((rows, HEAD_DIM // group)) * s) for s in (0.1, 0.5))
    values = codes * np.repeat(DECODE["half"](scales), group, 1) + np.repeat(DECODE["half"](biases), group, 1)
    return [words, scales, biases], values


def _quantized_attention(rng: np.random.Generator, file: str, kernel: str, queries: int, threads: int) -> Launch:
    keys, pages = 40, "decode" in file
    q = ENCODE["half"](rng.standard_normal((queries, HEAD_DIM)))
    (k, ks), (v, vs) = (_quantized_rows(rng, keys) for _ in range(2))
    weights = np.exp(SCALE * DECODE["half"](q) @ ks.T)
    out = np.zeros_like(q)
    params = _attention_params(QUANTIZED, queries, keys)
    head = params[0]
    head["parts"], head["keys_per_part"] = 1, keys
    for name, (words, scales, _) in (("k", k), ("v", v)):
        head[f"{name}_strides"] = words.size, words.size, words.shape[1], 1
        codes = head["keys" if name == "k" else "values"]
        codes["scales_strides"] = codes["biases_strides"] = scales.size, scales.size, scales.shape[1]
        codes["bits"], codes["group_shift"] = 4, 5
    return Launch(
        ROOT / file,
        kernel,
        dict(enumerate([q, *k, *v, q, q, q, *[q] * pages, out, out, params])),
        (1, 1, 1),
        (threads, 1, 1),
        out,
        weights @ vs / weights.sum(-1, keepdims=True),
        4e-3,
        constants={
            **dict.fromkeys((*range(5), 6, *range(9, 17), 18, 20, 21, 22), False),
            **dict.fromkeys((5, 17, 19), True),
        },
        dtype="half",
    )


def attention_quantized_forward(rng: np.random.Generator) -> Launch:
    file, kernel = "quantized_forward.metal", "flash_attention_quantized_forward_float16_d64v64"
    return _quantized_attention(rng, f"metal/flash_attention/{file}", kernel, 24, 256)


def attention_quantized_decode(rng: np.random.Generator) -> Launch:
    file, kernel = "quantized_decode.metal", "flash_attention_quantized_decode_float16_d64r1"
    return _quantized_attention(rng, f"metal/flash_attention/{file}", kernel, 1, 512)


def attention_forward(rng: np.random.Generator) -> Launch:
    return _forward(rng, "metal/flash_attention/forward.metal", "flash_attention_forward_float16_d64v64", 24, 256)


def attention_decode(rng: np.random.Generator) -> Launch:
    return _forward(rng, "metal/flash_attention/decode.metal", "flash_attention_decode_float16_d64r1", 1, 768)


def _backward(rng: np.random.Generator, gradient: str, dtype: str, threads: int) -> Launch:
    queries, keys = 24, 40
    (q, k, v, d_out), (qs, ks, vs, d_outs) = _attention(rng, queries, keys, dtype)
    scores = SCALE * qs @ ks.T
    lse = np.log(np.exp(scores).sum(-1, keepdims=True))
    weights = np.exp(scores - lse)
    delta = (weights @ vs * d_outs).sum(-1, keepdims=True)
    d_scores = weights * (d_outs @ vs.T - delta)
    out = np.zeros_like(q if gradient == "dq" else k)
    sequences = np.zeros((1, 5), np.int32)  # not read
    buffers = {0: q, 1: k, 2: v, 3: q, 4: sequences, 5: lse.astype(np.float32), 6: d_out}
    buffers |= {7: delta.astype(np.float32), 8: out}
    params = _attention_params(BACKWARD, queries, keys)
    others = {9: np.zeros_like(out), 10: out, 11: params} if gradient == "dq" else {9: np.zeros_like(out), 10: params}
    return Launch(
        ROOT / f"metal/flash_attention/backward_{gradient}.metal",
        f"flash_attention_backward_{gradient}_{'float16' if dtype == 'half' else 'float32'}_d64v64",
        {**buffers, **others},
        (-(-len(out) * 4 // threads), 1, 1),
        (threads, 1, 1),
        out,
        SCALE * (d_scores @ ks if gradient == "dq" else d_scores.T @ qs),
        5e-3 if dtype == "half" else 1e-5,
        constants={**dict.fromkeys((*range(5), *range(6, 13), 16), False), 5: True},
        dtype=dtype,
    )


def attention_backward_dq(rng: np.random.Generator) -> Launch:
    return _backward(rng, "dq", "half", 256)


def attention_backward_dkv(rng: np.random.Generator) -> Launch:
    return _backward(rng, "dkv", "float", 128)


def _quantized_matmul(rng: np.random.Generator, product: str) -> Launch:
    """Codes of 4 bits, in groups of 32."""
    rows, columns, outputs, group = 13, 64, 32, 32
    x = ENCODE["float"](rng.standard_normal((rows, columns if product == "transposed" else outputs)))
    codes = rng.integers(0, 16, (outputs, columns), np.uint32)
    words = (codes.reshape(outputs, -1, 8) << 4 * np.arange(8, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    scales, biases = (ENCODE["float"](rng.standard_normal((outputs, columns // group))) for _ in range(2))
    w = codes * np.repeat(DECODE["float"](scales), group, 1) + np.repeat(DECODE["float"](biases), group, 1)
    reference = DECODE["float"](x) @ (w.T if product == "transposed" else w)
    out = np.zeros(reference.shape, x.dtype)
    return Launch(
        ROOT / "metal/quantized_matmul/matmul.metal",
        f"quantized_matmul_{product}_float32_affine4",
        {0: x, 1: words, 2: scales, 3: biases, 4: out, 5: np.array([rows, columns, outputs, 5, 0, 0], np.int32)},
        (1, 1, 1),
        (128, 1, 1),
        out,
        reference,
        1e-5,
        constants={0: True, 3: True},
        dtype="float",
    )


def quantized_matmul_transposed(rng: np.random.Generator) -> Launch:
    return _quantized_matmul(rng, "transposed")


def quantized_matmul_plain(rng: np.random.Generator) -> Launch:
    return _quantized_matmul(rng, "plain")


TILED_LAUNCHES: dict[str, Callable[[np.random.Generator], Launch]] = {
    function.__name__: function
    for function in (
        attention_forward,
        attention_decode,
        attention_quantized_forward,
        attention_quantized_decode,
        attention_backward_dq,
        attention_backward_dkv,
        quantized_matmul_transposed,
        quantized_matmul_plain,
    )
}
