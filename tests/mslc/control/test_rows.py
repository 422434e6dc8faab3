"""MLX's cross entropy and gated delta rule against NumPy."""

import numpy as np
import pytest

from tests.mslc.control.mlx_kernels import DECODE, ENCODE, assert_close, library

DTYPES = ["float", "half", "bfloat16_t"]


@pytest.mark.parametrize("size", [31, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(rng, dtype, size):
    rows, reads = 5, 4
    kernels = library(
        ["cross_entropy.h"],
        [("loss", "cross_entropy", dtype, "float", reads), ("vjp", "cross_entropy_vjp", dtype, "float", reads)],
    )
    logits = ENCODE[dtype](3 * rng.standard_normal((rows, size)))
    targets = rng.integers(-size, size, rows).astype(np.int32)  # negative ones count from the end
    loss = np.zeros(rows, np.float32)
    kernels.run("loss", {0: logits, 1: targets, 2: loss, 3: size}, (rows,), (128,))
    values = DECODE[dtype](logits)
    weights = np.exp(values - values.max(-1, keepdims=True))
    probabilities = weights / weights.sum(-1, keepdims=True)
    chosen = np.arange(rows), targets % size
    reference = -np.log(probabilities[chosen])
    assert_close(loss, reference, "float")

    cotangent = rng.standard_normal(rows).astype(np.float32)
    gradient = np.zeros_like(logits)
    buffers = {0: logits, 1: targets, 2: loss, 3: cotangent, 4: gradient, 5: size}
    kernels.run("vjp", buffers, (rows,), (128,))
    probabilities[chosen] -= 1
    assert_close(DECODE[dtype](gradient), cotangent[:, None] * probabilities, dtype)


def gated_delta(q, k, v, state, g, beta):
    """The recurrence, step by step: S = g S + k (beta (v - S k))^T, y = S q. q, k [B, T, Hk, Dk], v [B, T, Hv, Dv]."""
    repeat = v.shape[2] // k.shape[2]
    q, k = q.repeat(repeat, 2), k.repeat(repeat, 2)
    y = np.zeros_like(v)
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None]
        delta = (v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        y[:, t] = np.einsum("bhvk,bhk->bhv", state, q[:, t])
    return y, state


@pytest.mark.parametrize("function", ["gated_delta_seq", "gated_delta_fused_chunk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta_update(rng, dtype, function):
    batch, steps, key_heads, value_heads, key_dim, value_dim, chunk = 2, 13, 1, 2, 64, 32, 8
    kernels = library(
        ["gated_delta_update.h"],
        [("update", function, dtype, key_dim, value_dim, key_heads, value_heads, chunk)],
        {"save_state": False},
    )
    q, k = (rng.standard_normal((batch, steps, key_heads, key_dim)) / key_dim**0.5 for _ in range(2))
    v = rng.standard_normal((batch, steps, value_heads, value_dim))
    state = rng.standard_normal((batch, value_heads, value_dim, key_dim)).astype(np.float32)
    g, beta = (rng.uniform(low, 1, (batch, steps, value_heads)) for low in (0.7, 0.1))
    q, k, v, g, beta = (ENCODE[dtype](x) for x in (q, k, v, g, beta))
    y, last = np.zeros_like(v), np.zeros_like(state)
    buffers = {0: q, 1: k, 2: v, 3: state, 4: g, 5: beta, 6: y, 7: last, 8: steps}
    rows = value_dim if function == "gated_delta_seq" else value_dim // 8
    kernels.run("update", buffers, (32, rows, batch * value_heads), (32, 4, 1), dispatch="threads")
    inputs = (DECODE[dtype](x) for x in (q, k, v))
    reference, reference_state = gated_delta(*inputs, state.astype(np.float64), DECODE[dtype](g), DECODE[dtype](beta))
    assert_close(DECODE[dtype](y), reference, dtype)
    assert_close(last, reference_state, dtype)
