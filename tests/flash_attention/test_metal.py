"""Cost of the Metal kernels of flash_attention beside MLX's on the same arrays, and freedom from races. test_op.py
tests their results, with --backend simulator."""

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from tests.flash_attention.cases import FEATURES, assert_close, draw
from tests.flash_attention.formulas import ROUNDING
from tests.flash_attention.profiles import MLX, Call, Shape, profile_ours

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

# Every count that differs between good and bad kernels whatever the GPU; none may be higher than MLX's.
BUDGETS = (
    "device_bytes_read",
    "device_bytes_written",
    "matrix_multiplies",
    "threadgroup_bytes",
    "bank_conflicts",
    "barriers",
)


def assert_within_budget(call: Call, theirs: str, budgets: Iterable[str] = BUDGETS, reads: float = 1.0) -> None:
    """`reads`: what ours may read, over what MLX's does."""
    ours, mlx = profile_ours(call), MLX[theirs](call)
    most = {name: getattr(mlx, name) * (reads if name == "device_bytes_read" else 1) for name in budgets}
    over = {name: (getattr(ours, name), most[name]) for name in budgets if getattr(ours, name) > most[name]}
    assert not over


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_forward_beside_steel_attention(rng: np.random.Generator, head_dim: int, dtype: str, causal: bool):
    assert_within_budget(Call.draw(rng, Shape(2, 1, 128, 128, head_dim), dtype, causal), "steel_attention")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_ragged_forward_beside_steel_attention(rng: np.random.Generator, head_dim: int, causal: bool):
    assert_within_budget(Call.draw(rng, Shape(1, 1, 97, 145, head_dim), "float16", causal), "steel_attention")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("q_heads", "q_len"), [(1, 1), (4, 1), (4, 3)])
def test_decode_beside_sdpa_vector(rng: np.random.Generator, q_heads: int, q_len: int, head_dim: int, dtype: str):
    """Lanes with different keys read the same columns of q: with few keys, that is up to a sixth of all reads."""
    call = Call.draw(rng, Shape(q_heads, 1, q_len, 200, head_dim), dtype, q_len > 1)
    assert_within_budget(call, "sdpa_vector", reads=1.2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_decode_beside_sdpa_vector(rng: np.random.Generator, head_dim: int, dtype: str):
    """Ours adds up in threadgroup memory what MLX's writes to device memory, as more and smaller parts."""
    budgets = [name for name in BUDGETS if name not in ("threadgroup_bytes", "barriers")]
    assert_within_budget(Call.draw(rng, Shape(4, 1, 1, 2048, head_dim), dtype, False), "sdpa_vector_2pass", budgets)


def test_more_parts_than_lanes(rng: np.random.Generator):
    """On a large GPU, a single head is split into more parts than a SIMD group has lanes to combine."""
    q, k, v = (rng.standard_normal((1, 1, length, 32)).astype(np.float32) for length in (1, 9000, 9000))
    arrays = [mx.array(x) for x in (q, k, v)]
    with mlx_anvil.simulate(checked=True, matrix_units=True), mlx_anvil.trace() as trace:
        out = mlx_anvil.flash_attention(*arrays)
        mx.eval(out)
    assert trace.events[0].grid[0] > 32
    scores = (k[0, 0].astype(np.float64) @ q[0, 0, 0]) * 32**-0.5
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(np.array(out)[0, 0, 0], weights @ v[0, 0] / weights.sum(), rtol=0, atol=1e-6)


def test_a_group_shares_reads_of_keys(rng: np.random.Generator):
    """A SIMD group of a decode reads keys for up to four heads; of eight heads, two SIMD groups read the same.
    Every SIMD group also reads q, and the parts of every head are read again."""
    one, four, eight = (
        profile_ours(Call.draw(rng, Shape(heads, 1, 1, 512, 128), "float16", False)).device_bytes_read
        for heads in (1, 4, 8)
    )
    assert four <= 1.5 * one
    assert eight <= 2.5 * one


@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("q_len", "dims"), [(45, (64, 64)), (33, (192, 128)), (5, (80, 80)), (3, (111, 40))], ids=str)
def test_no_races(q_len: int, dims: tuple[int, int], feature: str, dtype: mx.Dtype):
    """Three schedules with every access checked: no finding, and the same bits."""
    case = draw((4, 2), (q_len, 71), dims, dtype, feature)
    results = []
    for seed in range(3):
        with mlx_anvil.simulate(checked=True, seed=seed):
            out, lse = mlx_anvil.flash_attention(case.q, case.k, case.v, return_lse=True, **case.options)
            mx.eval(out, lse)
        results.append((out, lse))
    for out, lse in results[1:]:
        assert mx.array_equal(out, results[0][0])
        assert mx.array_equal(lse, results[0][1])
    rounding = ROUNDING.get(dtype)
    exact, composed = case.reference(), case.reference(round_to=rounding) if rounding else None
    assert_close("out", results[0][0], exact.out, composed and composed.out, 2)


@pytest.mark.parametrize("queries", [2, 9])
def test_rows_that_are_far_apart(rng: np.random.Generator, queries: int):
    """Offsets within a tile have 32 bits, so rows more than 2^22 elements apart are not moved as vectors."""
    x = rng.standard_normal((10, 64)).astype(np.float16)
    keys = {}
    outs = []
    for stride in (64, 1 << 22, (1 << 22) + 8):
        buffer = np.zeros((10, stride), np.float16)
        buffer[:, :64] = x
        k = mx.as_strided(mx.array(buffer), (1, 1, 10, 64), (10 * stride, 10 * stride, stride, 1))
        with mlx_anvil.simulate(), mlx_anvil.trace() as trace:
            outs.append(mlx_anvil.flash_attention(k[:, :, :queries], k, k))
            mx.eval(outs[-1])
        keys[stride] = "_c5t" in trace.events[0].kernel
    assert list(keys.values()) == [True, True, False]
    for out in outs[1:]:
        assert (out == outs[0]).all().item()
