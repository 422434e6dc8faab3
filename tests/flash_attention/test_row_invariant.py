"""``row_invariant=True``: a row has the same bits in a call of 1 to 16 queries."""

from typing import Any

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import Tree, flash_attention
from mlx_anvil.reference import DTYPES
from support import assert_same_bits
from tests.flash_attention.cases import draw

pytestmark = pytest.mark.cpu_only

MOST = 16


def one_at_a_time(q: mx.array, k: Any, v: Any, **options: Any) -> list[mx.array]:
    """Output and lse of each query in a call of its own, without the keys after it."""
    count = q.shape[2]

    def until(x: Any, end: int) -> Any:
        return tuple(part[:, :, :end] for part in x) if isinstance(x, tuple) else x[:, :, :end]

    kv_len = (k[0] if isinstance(k, tuple) else k).shape[2]
    results = []
    for i in range(count):
        end = kv_len - count + i + 1
        own = flash_attention(q[:, :, i : i + 1], until(k, end), until(v, end), **options)
        results.append(own)
    return [mx.concatenate(x, axis=2) for x in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_bits", [None, 4, 6, 8])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "kv_len"), [((8, 2), 2052), ((2, 2), 300), ((24, 2), 1030)], ids=str)
def test_rows_have_the_bits_of_a_call_of_one(
    heads: tuple[int, int], kv_len: int, window: int | None, kv_bits: int | None, dtype: mx.Dtype
):
    case = draw(heads, (MOST, kv_len), (64, 64), dtype, "none")
    k, v = (tuple(mx.quantize(x, bits=kv_bits)) if kv_bits else x for x in (case.k, case.v))
    options = {"mask": "causal", "window_size": window, "return_lse": True, "row_invariant": True}
    options |= {"kv_bits": kv_bits} if kv_bits else {}
    expected = one_at_a_time(case.q, k, v, **options)
    for count in (1, 2, 3, 7, MOST):
        found = flash_attention(case.q[:, :, -count:], k, v, **options)
        for result, exact in zip(found, expected, strict=True):
            assert_same_bits(result, exact[:, :, -count:])


def test_results_are_those_of_attention():
    case = draw((8, 2), (5, 700), (64, 64), mx.float32, "none")
    arrays = case.q, case.k, case.v
    found = flash_attention(*arrays, mask="causal", row_invariant=True)
    assert mx.allclose(found, flash_attention(*arrays, mask="causal"), rtol=1e-5, atol=1e-6)


def test_a_tree_verifies_what_a_chain_would_get():
    """The path of a tree has the bits of the same tokens decoded one by one, if its keys are at the same places."""
    case = draw((8, 2), (4, 900), (64, 64), mx.float16, "none")
    tree = flash_attention(case.q, case.k, case.v, mask=Tree([-1, 0, 1, 2]), row_invariant=True, return_lse=True)
    chain = one_at_a_time(case.q, case.k, case.v, mask="causal", row_invariant=True, return_lse=True)
    for result, expected in zip(tree, chain, strict=True):
        assert_same_bits(result, expected)


def test_batches_pages_and_lengths_do_not_matter():
    lengths = (300, 37, 450)
    case = draw((8, 2), (3, 512), (64, 64), mx.float16, "none", batch=3)
    options = {"mask": "causal", "row_invariant": True}
    k, v = (x.reshape(3, 2, 16, 32, 64).swapaxes(1, 2).reshape(48, 2, 32, 64) for x in (case.k, case.v))
    table = mx.arange(48).reshape(3, 16)
    out = flash_attention(case.q, k, v, lengths=mx.array(lengths), block_table=table, **options)
    for b, n in enumerate(lengths):
        alone = slice(b, b + 1)
        assert_same_bits(
            out[alone], flash_attention(case.q[alone], case.k[alone, :, :n], case.v[alone, :, :n], **options)
        )


def test_where_there_is_none():
    q = mx.zeros((1, 2, 3, 1100))
    with pytest.raises(
        ValueError, match=r"^\[flash_attention\] row_invariant is True and the CPU has kernels for head"
    ):
        flash_attention(q, q, q, row_invariant=True)
    q = mx.zeros((1, 2, 3, 64))
    with (
        mlx_anvil.simulate(),
        pytest.raises(
            ValueError,
            match=r"^\[flash_attention\] row_invariant is True and the call is for a GPU; allowed with it: calls",
        ),
    ):
        flash_attention(q, q, q, row_invariant=True)
    with pytest.raises(TypeError, match=r"^\[flash_attention\] row_invariant is a int; allowed: "):
        flash_attention(q, q, q, row_invariant=1)
