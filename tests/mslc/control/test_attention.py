"""MLX's attention kernels against NumPy."""

import numpy as np
import pytest

from tests.mslc.control.mlx_kernels import DECODE, ENCODE, assert_close, library

ATTENTION_PARAMS = np.dtype(
    {
        "names": [
            "B",
            "H",
            "D",
            "qL",
            "kL",
            "gqa_factor",
            "scale",
            "NQ",
            "NK",
            "NQ_aligned",
            "NK_aligned",
            "qL_rem",
            "kL_rem",
            "qL_off",
            "strides",
        ],
        "formats": ["i4"] * 6 + ["f4"] + ["i4"] * 7 + ["(4,3)i8"],
    },
    align=True,
)

HEAD_DIMS = [64, 96, 128, 256]


def attention(q, k, v, scale, mask=None, causal=False, sinks=None):
    """q [H, L, D], k and v [Hkv, N, D], in float64."""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat(repeat, 0), v.repeat(repeat, 0)
    scores = np.einsum("hqd,hkd->hqk", q, k) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if causal:
        row, column = np.indices(scores.shape[1:])
        scores = np.where(column <= row + scores.shape[2] - scores.shape[1], scores, -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64)[:, None, None] - highest)
    return np.einsum("hqk,hkd->hqd", weights / total, v)


def u64(value):
    return np.array(value, np.uint64)


def vector_constants(**given):
    """Function constants of sdpa_vector.h. Metal needs a value for each."""
    names = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
    return {**dict.fromkeys(names, False), "blocks": 1, **given}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16_t"])
def test_sdpa_vector(rng, dtype, head_dim):
    instances = [(f"sdpa_{d}", "sdpa_vector", dtype, d) for d in HEAD_DIMS]
    kernels = library(["sdpa_vector.h"], instances, vector_constants())
    heads, kv_heads, length = 4, 2, 77
    q, k, v = (
        ENCODE[dtype](rng.standard_normal(s))
        for s in ((heads, 1, head_dim), (kv_heads, length, head_dim), (kv_heads, length, head_dim))
    )
    out = np.zeros_like(q)
    scale = head_dim**-0.5
    stride = u64(length * head_dim), u64(head_dim)
    buffers = {
        0: q,
        1: k,
        2: v,
        3: out,
        4: heads // kv_heads,
        5: length,
        6: stride[0],
        7: stride[1],
        8: stride[0],
        9: stride[1],
        10: scale,
    }
    reference = attention(*(DECODE[dtype](x) for x in (q, k, v)), scale)
    results = []
    for seed in (0, 5):
        kernels.run(f"sdpa_{head_dim}", buffers, (heads, 1, 1), (1024, 1, 1), seed=seed)
        assert_close(DECODE[dtype](out), reference, dtype)
        results.append(out.copy())
        out[...] = 0
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16_t"])
def test_sdpa_vector_in_two_passes(rng, dtype, head_dim):
    heads, kv_heads, length, blocks, queries = 4, 2, 77, 32, 2
    instances = [(f"first_{d}", "sdpa_vector_2pass_1", dtype, d) for d in HEAD_DIMS]
    instances += [(f"second_{d}", "sdpa_vector_2pass_2", dtype, d) for d in HEAD_DIMS]
    kernels = library(["sdpa_vector.h"], instances, vector_constants(do_causal=True, blocks=blocks))
    q = ENCODE[dtype](rng.standard_normal((heads, queries, head_dim)))
    k, v = (ENCODE[dtype](rng.standard_normal((kv_heads, length, head_dim))) for _ in range(2))
    scale = head_dim**-0.5
    partials = np.zeros((heads, queries, blocks, head_dim), q.dtype)
    sums, maxima = (np.zeros((heads, queries, blocks), np.float32) for _ in range(2))
    head_stride, row_stride = u64(length * head_dim), u64(head_dim)
    strides = {8: head_stride, 9: row_stride, 10: head_stride, 11: row_stride}
    buffers = {0: q, 1: k, 2: v, 3: partials, 4: sums, 5: maxima, 7: length, **strides, 12: scale}
    kernels.run(f"first_{head_dim}", buffers, (kv_heads, 1, blocks), (32, heads // kv_heads, queries))
    out = np.zeros_like(q)
    buffers = {0: partials, 1: sums, 2: maxima, 3: out, 4: blocks}
    kernels.run(f"second_{head_dim}", buffers, (heads, queries, 1), (1024, 1, 1))
    reference = attention(*(DECODE[dtype](x) for x in (q, k, v)), scale, causal=True)
    assert_close(DECODE[dtype](out), reference, dtype)


@pytest.mark.parametrize("mode", ["bool mask", "additive mask", "sinks"])
def test_sdpa_vector_options(rng, mode):
    heads, length, head_dim, queries, dtype = 2, 45, 64, 3, "half"
    masked = mode.endswith("mask")
    constants = vector_constants(
        has_mask=masked, bool_mask=mode == "bool mask", float_mask=mode == "additive mask", has_sinks=mode == "sinks"
    )
    kernels = library(["sdpa_vector.h"], [("sdpa", "sdpa_vector", dtype, head_dim)], constants)
    q = ENCODE[dtype](rng.standard_normal((heads, queries, head_dim)))
    k, v = (ENCODE[dtype](rng.standard_normal((heads, length, head_dim))) for _ in range(2))
    out, scale = np.zeros_like(q), head_dim**-0.5
    stride = u64(length * head_dim), u64(head_dim)
    buffers = {0: q, 1: k, 2: v, 3: out, 4: 1, 5: length, 6: stride[0], 7: stride[1], 8: stride[0], 9: stride[1]}
    buffers[10] = scale
    mask = sinks = None
    if masked:
        shape = (heads, queries, length)
        mask = rng.random(shape) < 0.7 if mode == "bool mask" else ENCODE[dtype](rng.standard_normal(shape))
        buffers |= {11 if mode == "bool mask" else 12: mask, 13: 1, 14: length, 15: queries * length}
    else:
        sinks = ENCODE[dtype](rng.standard_normal(heads))
        buffers |= {16: sinks, 17: heads}
    kernels.run("sdpa", buffers, (heads, queries, 1), (1024, 1, 1))
    reference = attention(*(DECODE[dtype](x) for x in (q, k, v)), scale, mask, sinks=sinks)
    assert_close(DECODE[dtype](out), reference, dtype)


@pytest.mark.parametrize("mode", ["plain", "causal", "bool mask", "additive mask"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (45, 71)])
@pytest.mark.parametrize("dtype", ["half", "bfloat16_t", "float"])
def test_steel_attention(rng, dtype, queries, keys, mode):
    check_steel_attention(rng, dtype, queries, keys, mode, head_dim=64, block_k=32)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_steel_attention_of_other_head_dims(rng, head_dim):
    check_steel_attention(rng, "half", 45, 71, "causal", head_dim, block_k=32 if head_dim < 128 else 16)


def check_steel_attention(rng, dtype, queries, keys, mode, head_dim, block_k):
    heads, kv_heads, block_q = 2, 1, 32
    mask_type = dtype if mode == "additive mask" else "bool"
    constants = {
        200: queries % block_q == 0,
        201: keys % block_k == 0,
        300: mode.endswith("mask"),
        301: mode == "causal",
        302: False,
        303: False,
    }
    kernels = library(
        ["steel/attn/kernels/steel_attention.h"],
        [("attention", "attention", dtype, block_q, block_k, head_dim, head_dim, 4, 1, mask_type, "float")],
        constants,
    )
    q, k, v = (
        ENCODE[dtype](rng.standard_normal((h, n, head_dim)))
        for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    )
    out = np.zeros_like(q)
    scale = head_dim**-0.5
    params = np.zeros(1, ATTENTION_PARAMS)
    tiles_q, tiles_k = -(-queries // block_q), -(-keys // block_k)
    values = (
        1,
        heads,
        head_dim,
        queries,
        keys,
        heads // kv_heads,
        scale,
        tiles_q,
        tiles_k,
        queries // block_q,
        keys // block_k,
    )
    strides = [
        [h * n * head_dim, n * head_dim, head_dim]
        for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    ]
    params[0] = (*values, queries % block_q, keys % block_k, keys - queries, strides)
    buffers = {0: q, 1: k, 2: v, 3: out, 4: params}
    mask = None
    if mode.endswith("mask"):
        mask = rng.random((heads, queries, keys)) < 0.7
        mask[..., 0] = True
        if mode == "additive mask":
            mask = ENCODE[dtype](np.where(mask, rng.standard_normal(mask.shape), -np.inf))
        buffers |= {5: np.array([heads * queries * keys, queries * keys, keys], np.int64), 6: mask}
    kernels.run("attention", buffers, (tiles_q, heads, 1), (32, 4, 1))
    if mode == "additive mask":
        mask = DECODE[dtype](mask)
    reference = attention(*(DECODE[dtype](x) for x in (q, k, v)), scale, mask, mode == "causal")
    assert_close(DECODE[dtype](out), reference, dtype)
