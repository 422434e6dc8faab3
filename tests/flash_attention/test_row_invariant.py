"""``row_invariant=True``: a row has the same bits in a call of 1 to 16 queries."""

from contextlib import AbstractContextManager, nullcontext
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
WHERE = pytest.mark.parametrize("where", ["cpu", "apple", "matrix units"])


def device(where: str) -> AbstractContextManager[Any]:
    """The CPU, or a simulated GPU."""
    return nullcontext() if where == "cpu" else mlx_anvil.simulate(matrix_units=where == "matrix units")


def results(*args: Any, **options: Any) -> list[mx.array]:
    found = flash_attention(*args, return_lse=True, row_invariant=True, **options)
    mx.eval(found)
    return list(found)


def one_at_a_time(q: mx.array, k: Any, v: Any, **options: Any) -> list[mx.array]:
    """Output and lse of each query in a call of its own, without the keys after it."""
    count = q.shape[2]

    def until(x: Any, end: int) -> Any:
        return tuple(part[:, :, :end] for part in x) if isinstance(x, tuple) else x[:, :, :end]

    kv_len = (k[0] if isinstance(k, tuple) else k).shape[2]
    calls = []
    for i in range(count):
        end = kv_len - count + i + 1
        calls.append(results(q[:, :, i : i + 1], until(k, end), until(v, end), **options))
    return [mx.concatenate(x, axis=2) for x in zip(*calls, strict=True)]


def assert_rows_are_those_of_one(case: Any, counts: tuple[int, ...], kv_bits: int | None, **options: Any):
    k, v = (tuple(mx.quantize(x, bits=kv_bits)) if kv_bits else x for x in (case.k, case.v))
    options |= {"kv_bits": kv_bits} if kv_bits else {}
    expected = one_at_a_time(case.q, k, v, **options)
    for count in counts:
        found = results(case.q[:, :, -count:], k, v, **options)
        for result, exact in zip(found, expected, strict=True):
            assert_same_bits(result, exact[:, :, -count:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_bits", [None, 4, 6, 8])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "kv_len"), [((8, 2), 2052), ((2, 2), 300), ((24, 2), 1030)], ids=str)
def test_rows_have_the_bits_of_a_call_of_one(
    heads: tuple[int, int], kv_len: int, window: int | None, kv_bits: int | None, dtype: mx.Dtype
):
    case = draw(heads, (MOST, kv_len), (64, 64), dtype, "none")
    assert_rows_are_those_of_one(case, (1, 2, 3, 7, MOST), kv_bits, mask="causal", window_size=window)


@pytest.mark.slow
@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units", [False, True], ids=["apple", "matrix units"])
@pytest.mark.parametrize("kv_bits", [None, 4, 6, 8])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "kv_len", "dim"), [((4, 2), 2052, 64), ((2, 2), 300, 128), ((12, 1), 150, 64)])
def test_rows_of_a_gpu(
    heads: tuple[int, int], kv_len: int, dim: int, window: int | None, kv_bits: int | None, units: bool, dtype: mx.Dtype
):
    """2052 keys are one part for some queries and two for others."""
    case = draw(heads, (MOST, kv_len), (dim, dim), dtype, "none")
    case.q = case.q[:, :, -6:] if kv_len > 2000 else case.q
    counts = (1, 2, 6) if kv_len > 2000 else (1, 3, 9, MOST)
    with mlx_anvil.simulate(matrix_units=units), mlx_anvil.trace() as trace:
        assert_rows_are_those_of_one(case, counts, kv_bits, mask="causal", window_size=window)
    assert {kernel.split("_" + str(dtype).split(".")[-1])[0] for kernel in trace.kernels} == {
        "flash_attention_quantized_decode" if kv_bits else "flash_attention_decode",
        "flash_attention_decode_combine",
    }


@WHERE
def test_results_are_those_of_attention(where: str):
    case = draw((8, 2), (5, 700), (64, 64), mx.float32, "none")
    arrays = case.q, case.k, case.v
    with device(where):
        out, lse = results(*arrays, mask="causal")
    expected = flash_attention(*arrays, mask="causal", return_lse=True)
    assert mx.allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    assert mx.allclose(lse, expected[1], rtol=1e-5, atol=1e-6)


@WHERE
def test_sinks_and_softcap(where: str):
    case = draw((4, 2), (5, 300), (64, 64), mx.float16, "none")
    options = {"sinks": mx.random.normal((4,), mx.float16), "softcap": 20.0}
    with device(where):
        assert_rows_are_those_of_one(case, (1, 2, 5), None, mask="causal", **options)


@WHERE
def test_a_tree_verifies_what_a_chain_would_get(where: str):
    """The path of a tree has the bits of the same tokens decoded one by one, if its keys are at the same places."""
    case = draw((8, 2), (4, 900), (64, 64), mx.float16, "none")
    with device(where):
        tree = results(case.q, case.k, case.v, mask=Tree([-1, 0, 1, 2]))
        chain = one_at_a_time(case.q, case.k, case.v, mask="causal")
    for result, expected in zip(tree, chain, strict=True):
        assert_same_bits(result, expected)


@WHERE
@pytest.mark.parametrize("queries", [3, 12])
def test_batches_pages_and_lengths_do_not_matter(where: str, queries: int):
    lengths = (300, 37, 450)
    case = draw((8, 2), (queries, 512), (64, 64), mx.float16, "none", batch=3)
    k, v = (x.reshape(3, 2, 16, 32, 64).swapaxes(1, 2).reshape(48, 2, 32, 64) for x in (case.k, case.v))
    table = mx.arange(48).reshape(3, 16)
    with device(where):
        pages = results(case.q, k, v, lengths=mx.array(lengths), block_table=table, mask="causal")
        for b, n in enumerate(lengths):
            alone = slice(b, b + 1)
            expected = results(case.q[alone], case.k[alone, :, :n], case.v[alone, :, :n], mask="causal")
            for found, exact in zip(pages, expected, strict=True):
                assert_same_bits(found[alone], exact)


def test_where_there_is_none():
    q = mx.zeros((1, 2, 3, 1100))
    with pytest.raises(
        ValueError, match=r"^\[flash_attention\] row_invariant is True and the CPU has kernels for head"
    ):
        flash_attention(q, q, q, row_invariant=True)
    q, ends = mx.zeros((1, 2, 3, 64)), mx.array([0, 1, 3])
    with (
        mlx_anvil.simulate(),
        pytest.raises(
            ValueError, match=r"^\[flash_attention\] row_invariant is True and the call is for a GPU and has"
        ),
    ):
        flash_attention(q, q, q, cu_seqlens_q=ends, row_invariant=True)
    with pytest.raises(TypeError, match=r"^\[flash_attention\] row_invariant is a int; allowed: "):
        flash_attention(q, q, q, row_invariant=1)
