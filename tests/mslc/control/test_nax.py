"""MLX's kernels for the M5's matrix units (`*_nax.h`, Metal 4), unmodified, against NumPy in float64."""

import numpy as np
import pytest

from mlx_anvil.mslc import SimulationError
from mlx_anvil.mslc.compiler import CHECKED
from tests.mslc.control.mlx_kernels import DECODE, ENCODE, HEADERS, TOLERANCE, include_dir, library
from tests.mslc.control.test_attention import ATTENTION_PARAMS, attention
from tests.mslc.control.test_matrix import ADDMM_PARAMS, GEMM_PARAMS
from tests.mslc.control.test_quantized import MODES, batch, fp_quantized, quantized

pytestmark = pytest.mark.skipif(
    not (include_dir() / HEADERS / "steel/gemm/nax.h").exists(), reason="this MLX has no kernels for matrix units"
)

METAL_4 = 400
GEMM = ["steel/gemm/gemm_nax.h"]
SPLIT_K_PARAMS = np.dtype(
    [(name, "i4") for name in ("M", "N", "K", "lda", "ldb", "ldc", "tiles_n", "tiles_m")]
    + [(name, "i4") for name in ("partitions", "partition_stride", "partition_size", "swizzle_log", "k_iterations")]
)
# With relaxed precision float factors keep the 10 bits of TF32; the other types are exact before the last rounding.
RELAXED = {**TOLERANCE, "float": 2e-3}


def assert_close(actual, reference, dtype):
    error = np.abs(actual - reference).max() / np.abs(reference).max()
    assert error <= RELAXED[dtype], f"error {error:.2e} of the largest value, allowed {RELAXED[dtype]:.0e}"


def flags(transposed):
    return ["true" if t == "t" else "false" for t in transposed]


def factors(rng, dtype, transposed, m, n, k, batches=1):
    """Two matrices as stored and the product that they stand for."""
    a = ENCODE[dtype](rng.standard_normal((batches, k, m) if transposed[0] == "t" else (batches, m, k)))
    b = ENCODE[dtype](rng.standard_normal((batches, n, k) if transposed[1] == "t" else (batches, k, n)))
    left, right = (DECODE[dtype](x) for x in (a, b))
    left = left.swapaxes(1, 2) if transposed[0] == "t" else left
    right = right.swapaxes(1, 2) if transposed[1] == "t" else right
    return a, b, left @ right


def gemm_params(a, b, m, n, k, tile, batches=1):
    params = np.zeros(1, GEMM_PARAMS)
    tiles_n, tiles_m = -(-n // tile[1]), -(-m // tile[0])
    sizes = (m, n, k, a.shape[2], b.shape[2], n, tiles_n, tiles_m)
    params[0] = (*sizes, m * k, n * k, m * n, 0, k // tile[2], int(batches > 1), 0)
    return params


@pytest.mark.parametrize("transposed", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16_t"])
def test_gemm_fused(rng, dtype, transposed):
    m, n, k = (int(x) for x in rng.integers((65, 65, 17), (110, 130, 200)))
    check_gemm_fused(rng, dtype, transposed, m, n, k)


def test_gemm_fused_of_whole_tiles(rng):
    check_gemm_fused(rng, "half", "nt", 128, 64, 128)


def test_gemm_fused_has_no_races(rng):
    check_gemm_fused(rng, "half", "nn", 45, 70, 41, options=CHECKED)


def check_gemm_fused(rng, dtype, transposed, m, n, k, options=None, tile=(64, 64, 64, 2, 2)):
    batches = 2
    constants = {10: False, 100: True, 110: True, 200: m % tile[0] == 0, 201: n % tile[1] == 0, 202: k % tile[2] == 0}
    kernels = library(
        [*GEMM, "steel/gemm/kernels/steel_gemm_fused_nax.h"],
        [("gemm", "gemm", dtype, *tile, *flags(transposed))],
        constants,
        options,
        METAL_4,
    )
    a, b, product = factors(rng, dtype, transposed, m, n, k, batches)
    c = ENCODE[dtype](rng.standard_normal((batches, m, n)))
    out = ENCODE[dtype](np.full((batches, m, n), np.nan))
    params = gemm_params(a, b, m, n, k, tile, batches)
    addmm = np.zeros(1, ADDMM_PARAMS)
    addmm[0] = (n, 1, m * n, 0.5, -1.5)
    grid = (int(params["tiles_n"][0]), int(params["tiles_m"][0]), batches)
    kernels.run("gemm", {0: a, 1: b, 2: c, 3: out, 4: params, 5: addmm}, grid, (32, tile[4], tile[3]))
    assert_close(DECODE[dtype](out), 0.5 * product - 1.5 * DECODE[dtype](c), dtype)


def test_a_lane_of_one_fragment_of_columns_writes_beyond_its_operand(rng):
    """BaseNAXFrag::mma of two row fragments (MLX 0.32.4) describes 16 x 32 and fills 32 x 16: 16 elements of 8.

    Only tiles with 16 columns a SIMD group reach it; MLX instantiates none.
    """
    with pytest.raises(SimulationError, match="element 8 of a cooperative tensor that has 8 elements") as error:
        check_gemm_fused(rng, "half", "nt", 64, 32, 64, tile=(64, 32, 64, 2, 2))
    assert error.value.findings[0].file.endswith("steel/gemm/nax.h")


def test_gemm_split_k(rng):
    m, n, k, partitions, dtype, tile = 75, 66, 300, 3, "half", (64, 64, 64, 2, 2)
    kernels = library(
        [*GEMM, "steel/gemm/kernels/steel_gemm_splitk_nax.h"],
        [("gemm", "gemm_splitk_nax", dtype, *tile, *flags("nt"))],
        {200: False, 201: False},
        metal_version=METAL_4,
    )
    a, b, product = factors(rng, dtype, "nt", m, n, k)
    out = np.full((partitions, m, n), np.nan, np.float32)
    params = np.zeros(1, SPLIT_K_PARAMS)
    params[0] = (m, n, k, k, k, n, 2, 2, partitions, m * n, 128, 0, 0)
    kernels.run("gemm", {0: a, 1: b, 2: out, 3: params}, (2 * 2 * partitions, 1, 1), (32, 2, 2))
    assert_close(out.sum(0), product[0], "float")


def test_gemm_segmented(rng):
    m, n, k, dtype, tile = 75, 66, 200, "half", (64, 64, 64, 2, 2)
    kernels = library(
        [*GEMM, "steel/gemm/kernels/steel_gemm_segmented_nax.h"],
        [("gemm", "segmented_mm_nax", dtype, *tile, *flags("nn"))],
        {199: True, 200: False, 201: False},
        metal_version=METAL_4,
    )
    a, b, _ = factors(rng, dtype, "nn", m, n, k)
    segments = np.array([[0, 37], [37, 200], [64, 128]], np.uint32)
    out = ENCODE[dtype](np.full((len(segments), m, n), np.nan))
    params = gemm_params(a, b, m, n, k, tile)
    kernels.run("gemm", {0: a, 1: b, 2: segments, 3: out, 4: params}, (len(segments), 2, 2), (32, 2, 2))
    left, right = DECODE[dtype](a)[0], DECODE[dtype](b)[0]
    assert_close(DECODE[dtype](out), np.stack([left[:, i:j] @ right[i:j] for i, j in segments]), dtype)


# Blocks at the edge move back inside where the matrix is large enough, and are masked where it is not.
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (45, 71, 130), (13, 29, 72)])
@pytest.mark.parametrize(("transposed", "k_groups"), [("nn", 1), ("nt", 2)])
def test_gemm_thin(rng, transposed, k_groups, m, n, k):
    dtype, rows, columns = "half", 1, 2  # fragments of a SIMD group
    kernels = library(
        [*GEMM, "steel/gemm/kernels/steel_gemm_thin_nax.h"],
        [("gemm", "gemm_thin_nax", dtype, rows, columns, 1, 2, k_groups, flags(transposed)[1])],
        {100: True, 110: True, 200: m % 16 == 0, 201: n % 64 == 0, 202: k % 64 == 0},
        metal_version=METAL_4,
    )
    a, b, product = factors(rng, dtype, transposed, m, n, k)
    c = ENCODE[dtype](rng.standard_normal((m, n)))
    out = ENCODE[dtype](np.full((m, n), np.nan))
    params = gemm_params(a, b, m, n, k, (16, 64, 64))
    params["gemm_k_iterations_aligned"] = -(-k // (64 * k_groups))
    addmm = np.zeros(1, ADDMM_PARAMS)
    addmm[0] = (n, 1, 0, 0.5, -1.5)
    groups = int(params["tiles_m"][0] * params["tiles_n"][0])
    kernels.run("gemm", {0: a, 1: b, 2: c, 3: out, 4: params, 5: addmm}, (groups, 1, 1), (32, 2 * k_groups, 1))
    assert_close(DECODE[dtype](out), 0.5 * product[0] - 1.5 * DECODE[dtype](c), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "mode", "head_dim"),
    [
        ("half", 64, 64, "plain", 64),
        ("half", 75, 171, "causal", 128),
        ("bfloat16_t", 45, 71, "bool mask", 64),
        ("float", 45, 71, "additive mask", 64),
    ],
)
def test_attention(rng, dtype, queries, keys, mode, head_dim):
    heads, kv_heads, block_q, block_k = 2, 1, 64, 32
    masked = mode.endswith("mask")
    constants = {200: queries % block_q == 0, 201: keys % block_k == 0, 300: masked, 301: mode == "causal"}
    mask_type = dtype if mode == "additive mask" else "bool"
    kernels = library(
        ["steel/attn/kernels/steel_attention_nax.h"],
        [("attention", "attention_nax", dtype, block_q, block_k, head_dim, head_dim, 4, 1, mask_type, "float")],
        {**constants, 302: True, 303: True},
        metal_version=METAL_4,
    )
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    q, k, v = (ENCODE[dtype](rng.standard_normal((h, n, head_dim))) for h, n in sizes[:3])
    sinks = ENCODE[dtype](rng.standard_normal(heads))
    out = ENCODE[dtype](np.full(q.shape, np.nan))
    lse = np.full((heads, queries), np.nan, np.float32)
    scale, tiles_q = head_dim**-0.5, -(-queries // block_q)
    params = np.zeros(1, ATTENTION_PARAMS)
    shape = (1, heads, head_dim, queries, keys, heads // kv_heads, scale, tiles_q, -(-keys // block_k))
    rest = (queries // block_q, keys // block_k, queries % block_q, keys % block_k, keys - queries)
    params[0] = (*shape, *rest, [[h * n * head_dim, n * head_dim, head_dim] for h, n in sizes])
    buffers = {0: q, 1: k, 2: v, 3: out, 4: params, 7: sinks, 8: lse}
    mask = None
    if masked:
        mask = rng.random((heads, queries, keys)) < 0.7
        mask[..., 0] = True
        if mode == "additive mask":
            mask = ENCODE[dtype](np.where(mask, rng.standard_normal(mask.shape), -np.inf))
        buffers |= {5: np.array([heads * queries * keys, queries * keys, keys], np.int64), 6: mask}
    kernels.run("attention", buffers, (tiles_q, heads, 1), (32, 4, 1))
    mask = DECODE[dtype](mask) if mode == "additive mask" else mask
    values = (DECODE[dtype](x) for x in (q, k, v))
    reference = attention(*values, scale, mask, mode == "causal", DECODE[dtype](sinks))
    assert_close(DECODE[dtype](out), reference, dtype)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize(("dtype", "bits"), [("half", 4), ("bfloat16_t", 8), ("float", 3)])
def test_quantized_matmul(rng, dtype, bits):
    group = 64
    kernels = library(
        [*GEMM, "quantized_utils.h", "quantized_nax.h"],
        [
            ("qmm_t", "affine_qmm_t_nax", dtype, group, bits, "false", "false"),
            ("qmm_n", "affine_qmm_n_nax", dtype, group, bits, "false"),
        ],
        metal_version=METAL_4,
    )
    m, n, k = 75, 101, 192
    packed, scales, biases, values = quantized(rng, n, k, group, bits, dtype)
    x = ENCODE[dtype](rng.standard_normal((m, k)))
    out = ENCODE[dtype](np.full((m, n), np.nan))
    buffers = {0: packed, 1: scales, 2: biases, 3: x, 4: out, 5: k, 6: n, 7: m, **batch(8, 8)}
    kernels.run("qmm_t", buffers, (-(-n // 64), -(-m // 64), 1), (32, 2, 2))
    assert_close(DECODE[dtype](out), DECODE[dtype](x) @ values.T, dtype)

    n = 128  # the groups lie along the columns of the result
    packed, scales, biases, values = quantized(rng, k, n, group, bits, dtype)
    out = ENCODE[dtype](np.full((m, n), np.nan))
    buffers = {0: packed, 1: scales, 2: biases, 3: x, 4: out, 5: k, 6: n, 7: m, **batch(8, 8)}
    kernels.run("qmm_n", buffers, (n // 64, -(-m // 64), 1), (32, 2, 2))
    assert_close(DECODE[dtype](out), DECODE[dtype](x) @ values, dtype)


@pytest.mark.parametrize("mode", MODES)
def test_fp_quantized_matmul(rng, mode):
    (group, bits), dtype = MODES[mode], "half"
    kernels = library(
        [*GEMM, "quantized_utils.h", "fp_quantized_nax.h"],
        [("qmm_t", "fp_qmm_t_nax", dtype, group, bits, "false", "false", 64, 64, 64, 2, 2, "false", dtype)],
        metal_version=METAL_4,
    )
    m, n, k = 75, 101, 192
    packed, scales, values = fp_quantized(rng, n, k, mode)
    x = ENCODE[dtype](rng.standard_normal((m, k)))
    out = ENCODE[dtype](np.full((m, n), np.nan))
    scale = np.ones(1, np.float32)
    buffers = {0: packed, 1: scales, 2: scale, 3: x, 4: out, 5: k, 6: n, 7: m, **batch(8, 7)}
    kernels.run("qmm_t", buffers, (-(-n // 64), -(-m // 64), 1), (32, 2, 2))
    assert_close(DECODE[dtype](out), DECODE[dtype](x) @ values.T, dtype)


def gated_delta(q, k, v, g, beta, state):
    """The gated delta rule, step by step: q and k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv], state [Hv, Dv, Dk]."""
    repeat = v.shape[1] // k.shape[1]
    q, k = q.repeat(repeat, 1), k.repeat(repeat, 1)
    out = np.zeros(v.shape)
    for t in range(len(v)):
        state = state * g[t][:, None, None]
        change = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + change[:, :, None] * k[t][:, None, :]
        out[t] = np.einsum("hvk,hk->hv", state, q[t])
    return out, state


@pytest.mark.parametrize("dtype", ["float", "half"])
def test_gated_delta(rng, dtype):
    steps, key_heads, heads, key_dim, value_dim, chunk = 37, 1, 2, 64, 32, 16
    kernels = library(
        ["gated_delta_update_nax.h"],
        [("delta", "gated_delta_fused_nax", dtype, key_dim, value_dim, key_heads, heads, chunk, 1)],
        {200: False},
        metal_version=METAL_4,
    )
    q, k = (rng.standard_normal((steps, key_heads, key_dim)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((steps, heads, value_dim))
    g, beta = rng.uniform(0.8, 1, (steps, heads)), rng.uniform(0, 1, (steps, heads))
    q, k, v, g, beta = inputs = [ENCODE[dtype](x) for x in (q, k, v, g, beta)]
    state = rng.standard_normal((heads, value_dim, key_dim)).astype(np.float32)
    out, last = ENCODE[dtype](np.full(v.shape, np.nan)), np.full_like(state, np.nan)
    unused = dict.fromkeys((9, 10, 11), np.zeros(1, np.float32))
    buffers = {0: q, 1: k, 2: v, 3: state, 4: g, 5: beta, 6: out, 7: last, 8: steps, **unused}
    kernels.run("delta", buffers, (32, value_dim // 16, heads), (32, 2, 1), dispatch="threads")
    expected, expected_state = gated_delta(*(DECODE[dtype](x) for x in inputs), state.astype(np.float64))
    # Chunks of 16 steps multiply through an inverse, in factors of 10 bits.
    np.testing.assert_allclose(DECODE[dtype](out), expected, atol=5e-3 * np.abs(expected).max())
    np.testing.assert_allclose(last, expected_state, atol=5e-3 * np.abs(expected_state).max())
