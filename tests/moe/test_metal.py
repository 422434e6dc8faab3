"""Memory accesses of the Metal kernels: every byte of rows once, no bank conflicts."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

TOKENS, K, COLUMNS, EXPERTS = 16, 4, 256, 8
PAIRS, ROW = TOKENS * K, 2 * COLUMNS


def profile(call: Callable[..., object], *arrays: np.ndarray):
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(call(*(mx.array(x) for x in arrays)))
    return {of.kernel.split("_float16")[0]: of for of in profiles}


def half(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def test_combine_reads_every_byte_once(rng: np.random.Generator):
    inverse = rng.permutation(PAIRS).astype(np.int32).reshape(TOKENS, K)
    arrays = half(rng, PAIRS, COLUMNS), half(rng, TOKENS, K), half(rng, TOKENS, COLUMNS), half(rng, TOKENS, COLUMNS)

    def combine(y, weights, residual, shared):
        return mlx_anvil.moe_combine(y, weights, mx.array(inverse), residual=residual, shared=shared)

    forward = profile(combine, *arrays)["moe_combine"]
    metrics = forward.metrics()
    assert metrics["device_bytes_read_unique"] == sum(x.nbytes for x in arrays) + inverse.nbytes
    rows = arrays[0].nbytes + 2 * TOKENS * ROW
    lanes = COLUMNS // 8  # each reads the places and weights of its token
    assert metrics["device_bytes_read"] <= rows + lanes * PAIRS * (4 + 2)
    assert metrics["device_bytes_written"] == metrics["device_bytes_written_unique"] == TOKENS * ROW
    assert metrics["bank_conflicts"] == forward.barriers == 0

    def gradients(*primals):
        return mx.vjp(combine, list(primals), [primals[2]])[1]

    backward = profile(gradients, *arrays)["moe_backward"]
    metrics = backward.metrics()
    assert metrics["device_bytes_written"] == metrics["device_bytes_written_unique"] == PAIRS * (ROW + 2)
    assert metrics["device_bytes_read_unique"] == (PAIRS + TOKENS) * ROW + PAIRS * (4 + 2)
    assert metrics["bank_conflicts"] == backward.barriers == 0


@pytest.mark.parametrize("tokens", [TOKENS, 512])
def test_permute_writes_every_byte_once(tokens: int, rng: np.random.Generator):
    ids = rng.integers(0, EXPERTS, (tokens, K)).astype(np.int32)
    x = half(rng, tokens, COLUMNS)
    profiles = profile(lambda x: mlx_anvil.moe_permute(x, mx.array(ids), EXPERTS), x)
    integers = 4 * (3 * ids.size + EXPERTS + 1)
    rows = tokens * K * ROW
    if tokens == TOKENS:
        (of,) = profiles.values()
        assert of.metrics()["device_bytes_written"] == of.metrics()["device_bytes_written_unique"] == rows + integers
        assert of.barriers == 0
        return
    assert list(profiles) == ["moe_count_32", "moe_place_256", "moe_spread"]
    spread, place = profiles["moe_spread"].metrics(), profiles["moe_place_256"].metrics()
    assert spread["device_bytes_written"] == spread["device_bytes_written_unique"] == rows
    assert spread["device_bytes_read_unique"] == x.nbytes + ids.nbytes
    assert place["device_bytes_written"] == place["device_bytes_written_unique"] == integers


def test_more_tokens_and_elements_than_rows_of_a_grid(rng: np.random.Generator):
    """A grid has 65535 rows at most: its threadgroups go on to further tokens, and elements of vmap."""
    tokens = 65601
    y, x = (mx.array(rng.standard_normal((tokens, 1)).astype(np.float32)) for _ in range(2))
    inverse = mx.array(rng.permutation(tokens).astype(np.int32))[:, None]
    ids = mx.array(rng.integers(0, 2, (tokens, 1, 1)).astype(np.int32))
    with mx.stream(mx.cpu), mlx_anvil.simulate():
        out = mlx_anvil.moe_combine(y, None, inverse, residual=x)
        _, offsets, _, _ = mx.vmap(lambda x, i: mlx_anvil.moe_permute(x, i, 2))(x[:, None, :0], ids)
        mx.eval(out, offsets)
    np.testing.assert_array_equal(np.array(out), np.array(y[inverse[:, 0]] + x))
    first = np.array(ids).reshape(-1)
    np.testing.assert_array_equal(np.array(offsets), np.stack([0 * first, 1 - first, 0 * first + 1], axis=1))
