"""Counts of the Metal kernels of flash_attention's gradients, against what the algorithm needs, and freedom from races.
test_op.py tests their results, with --backend simulator."""

import re
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _ext
from support import GRADIENT_FACTOR, assert_same_bits
from tests.flash_attention.cases import FEATURES, assert_close, check, draw, gradients_of
from tests.flash_attention.formulas import ROUNDING, attention
from tests.flash_attention.profiles import Counts

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

TILE = re.compile(r"X\(dq, (?:dtype|float32), \w+, (\d+), (\d+), (\d+), (\d+), (\w+), \w+, (\d+), \w+\)")
SUMS_TILE = re.compile(r"X\(dtype, type, (\d+), (\d+), (\d+)\)")
TILE_TABLE = Path(__file__).parents[2] / "metal" / "flash_attention" / "tiles.h"

SQUARE = 32  # rows and keys of which weights are stored and read


@dataclass(frozen=True)
class Case:
    dtype: str
    head_dim: int
    causal: bool = False
    q_heads: int = 2
    kv_heads: int = 1
    length: int = 256


@dataclass(frozen=True)
class Tile:
    rows: int  # that a threadgroup keeps
    passing: int  # rows of the other side that are looked at at a time
    simdgroups: int
    holds: bool  # the kept rows stay in registers or threadgroup memory


def tile_of(case: Case) -> Tile:
    """The first tile of dq in the table that fits the heads."""
    wide, narrow = TILE_TABLE.read_text().split("#define MLX_ANVIL_ATTENTION_BACKWARD_TILES(X)")
    for dim, _, fragments, passing, kept, simdgroups in TILE.findall(narrow if case.dtype == "float32" else wide):
        if int(dim) >= case.head_dim:
            rows = 8 * int(simdgroups) * int(fragments)
            return Tile(rows, int(passing), int(simdgroups), kept != "kKeptNowhere")
    raise AssertionError(f"no tile for {case}")


def sums_tile_of(case: Case) -> tuple[int, int]:
    """Keys of a threadgroup, and SIMD groups that share them."""
    text = TILE_TABLE.read_text().split("#define MLX_ANVIL_ATTENTION_SUMS_TILES_OF")[1]
    _, keys, columns = next(tile for tile in SUMS_TILE.findall(text) if int(tile[0]) >= case.head_dim)
    return SQUARE * int(keys), int(columns)


def profile(case: Case) -> dict[str, Counts]:
    """Counts of each kernel that the op's own dispatch launches, by pass. Its results are checked."""
    rng = np.random.default_rng(case.head_dim)
    shapes = {"q": case.q_heads, "k": case.kv_heads, "v": case.kv_heads, "d_out": case.q_heads}
    given = {
        name: rng.standard_normal((1, heads, case.length, case.head_dim)).astype(case.dtype)
        for name, heads in shapes.items()
    }
    q, k, v, d_out = (mx.array(x) for x in given.values())
    options = {"mask": "causal"} if case.causal else {}
    exact = attention(q, k, v, d_out, **options)
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        gradients = mx.vjp(lambda *x: mlx_anvil.flash_attention(*x, **options), [q, k, v], [d_out])[1]
        mx.eval(gradients)
    counts = {}
    for launch in profiles:
        found = re.match(r"flash_attention_(?:backward_)?(delta|dq|sums)_", launch.kernel)
        if not found:
            assert "forward" in launch.kernel
            continue
        counts.setdefault(found[1], Counts()).add(launch)
    for name, gradient in zip("qkv", gradients, strict=True):
        error = np.abs(np.array(gradient) - exact.gradients[name]).max()
        assert error <= (2e-5 if case.dtype == "float32" else 5e-3) * np.abs(exact.gradients[name]).max(), name
    return counts


def visits(case: Case, rows: int, tile: int) -> int:
    """Pairs of a block of kept rows and a tile of passing rows of which the mask leaves something visible. The number
    is the same for blocks of queries and of keys, because the triangle is symmetric."""
    blocks, tiles = -(-case.length // rows), -(-case.length // tile)
    if not case.causal:
        return blocks * tiles
    return sum(-(-min((i + 1) * rows, case.length) // tile) for i in range(blocks))


CASES = [
    Case("float16", 64),
    Case("float16", 64, causal=True),
    Case("float16", 128),
    Case("float32", 64),
    Case("float32", 128, causal=True),
    Case("float16", 192, length=128),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts(case: Case):
    counts = profile(case)
    itemsize, length = np.dtype(case.dtype).itemsize, case.length
    row = case.head_dim * itemsize
    assert set(counts) == {"delta", "dq", "sums"}

    delta = counts["delta"]
    assert delta.device_bytes_read == case.q_heads * length * (2 * row + 2 * 4)  # out, d_out; lse, d_lse
    assert delta.device_bytes_written == case.q_heads * length * 4
    assert delta.barriers == delta.matrix_multiplies == 0

    # Weights are computed in whole squares of which the mask leaves something visible. Products: 8x8x8 at a time.
    pairs = case.q_heads * visits(case, SQUARE, SQUARE) * SQUARE * SQUARE
    weights = 2 * pairs * itemsize
    dq, tile = counts["dq"], tile_of(case)
    assert dq.matrix_multiplies == 3 * pairs * case.head_dim / 512

    # A threadgroup reads each tile once and meets before and after.
    tiles = case.q_heads * visits(case, tile.rows, tile.passing)
    assert dq.barriers == 2 * tiles

    # Bytes: tiles, the kept rows once, or once a tile where there is no room for them.
    kept = case.q_heads * length if tile.holds else pairs // tile.passing
    needed = tiles * tile.passing * 2 * row + kept * 2 * row
    assert needed <= dq.device_bytes_read <= 1.1 * needed
    assert dq.device_bytes_written == case.q_heads * length * row + weights

    # Two gradients, with a product each. SIMD groups that share keys read the same weights.
    sums, (keys, sharing) = counts["sums"], sums_tile_of(case)
    assert sums.matrix_multiplies == 2 * pairs * case.head_dim / 512
    tiles = 2 * case.q_heads * visits(case, keys, SQUARE)
    assert sums.barriers == 2 * tiles
    needed = tiles * SQUARE * row + weights * sharing
    assert needed <= sums.device_bytes_read <= 1.1 * needed
    assert sums.device_bytes_written == 2 * case.kv_heads * length * row
    for done in (dq, sums):
        assert done.bank_conflicts == 0
        assert done.threadgroup_memory <= 32768


@pytest.fixture
def one_block_a_chunk():
    """Weights are stored for as few queries at a time as possible."""
    _ext._force_choices({"flash_attention.stored_kb": 1})
    yield
    _ext._force_choices({})


CHUNKS = [
    ((2, 2), (150, 150), "none"),
    ((4, 2), (150, 170), "causal"),  # queries of a group's heads in one chunk
    ((2, 1), (134, 400), "window"),  # keys that only some chunks see, and that none sees
    ((2, 1), (70, 70), "bool mask"),
]


@pytest.mark.slow
@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize(("heads", "lengths", "feature"), CHUNKS, ids=str)
def test_chunks_of_queries(one_block_a_chunk, heads, lengths, feature, checked):
    case = draw(heads, lengths, (40, 40), mx.float16, feature, batch=2)
    with mlx_anvil.simulate(checked=checked), mlx_anvil.trace() as trace:
        check(case)
    blocks = -(-lengths[0] // 64)
    launched = [kernel for kernel in trace.kernels if "_sums_" in kernel]
    assert len(launched) == 2 * 2 * heads[1] * blocks


@pytest.mark.parametrize("feature", ["causal", "window", "sinks"])
def test_chunks_give_the_same_bits(one_block_a_chunk, feature):
    """Where heads share no keys: sums go on from one chunk to the next."""
    case = draw((2, 2), (150, 170), (64, 64), mx.float16, feature)
    results = []
    for choices in ({"flash_attention.stored_kb": 1}, {"flash_attention.stored_kb": 40}, {}):
        _ext._force_choices(choices)
        with mlx_anvil.simulate():
            _, gradients = gradients_of(case)
            mx.eval(gradients)
        results.append(gradients)
    for name, gradient in results[0].items():
        for other in results[1:]:
            assert_same_bits(gradient, other[name])


# Dtypes take turns over the features, and every kind of kernel is there: with and without room for the kept rows, vectors
# and single elements.
RACES = [(("float16", "float32")[i % 2], feature, (64, 64)) for i, feature in enumerate(FEATURES)]
RACES += [("bfloat16", "additive mask", (80, 80)), ("bfloat16", "window", (256, 256)), ("float32", "none", (192, 192))]
RACES += [("float16", "causal", (192, 128)), ("float16", "sinks", (111, 40))]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "feature", "dims"), RACES, ids=str)
def test_no_races(dtype: str, feature: str, dims: tuple[int, int]):
    """Three schedules with every access checked: no finding, and the same bits."""
    of_dtype = getattr(mx, dtype)
    case = draw((4, 2), (45, 71), dims, of_dtype, feature)
    results = []
    for seed in range(3):
        with mlx_anvil.simulate(checked=True, seed=seed):
            _, gradients = gradients_of(case)
            mx.eval(gradients)
        results.append(gradients)
    rounding = ROUNDING.get(of_dtype)
    exact, composed = case.reference(), case.reference(round_to=rounding) if rounding else None
    for name, gradient in results[0].items():
        for other in results[1:]:
            assert_same_bits(gradient, other[name])
        rounded, terms = composed and composed.gradients[name], exact.terms.get(name)
        assert_close(f"gradient of {name}", gradient, exact.gradients[name], rounded, GRADIENT_FACTOR, terms=terms)
