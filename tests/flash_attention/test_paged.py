"""Keys and values in pages: the results are those of the same call on contiguous keys and values."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import flash_attention
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import flash_attention as definition
from support import assert_same_bits
from tests.flash_attention.cases import FEATURES, OUTPUT_FACTOR, Case, assert_close, draw
from tests.flash_attention.formulas import ROUNDING

LENGTHS = (40, 1, 0, 70, 33)
PAGE_SIZES = (1, 16, 17, 256)


def table_of(lengths: tuple[int, ...], page_size: int, spare: int = 3) -> tuple[np.ndarray, int]:
    """A table of pages in random order, -1 past those in use, and the number of pages of the cache."""
    counts = [-(-n // page_size) for n in lengths]
    pages = sum(counts) + spare
    order = np.array(mx.random.permutation(pages))
    table = np.full((len(lengths), max(counts) + 1), -1)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[row, :count] = order[end - count : end]
    return table, pages


def gathered(cache: mx.array, table: np.ndarray) -> mx.array:
    """Page after page, by loops: the contiguous keys or values of each sequence."""
    rows = [mx.concatenate([cache[max(int(page), 0)] for page in row], axis=1) for row in table]
    return mx.stack(rows)


def paged(dtype: mx.Dtype, feature: str, page_size: int, lengths=LENGTHS, q_len=5, dims=(64, 64)) -> tuple[Case, Case]:
    """A call on pages, and the same call on contiguous keys and values."""
    table, pages = table_of(lengths, page_size)
    case = draw((4, 2), (q_len, table.shape[1] * page_size), dims, dtype, feature, batch=len(lengths))
    k, v = (mx.random.normal((pages, 2, page_size, dim)).astype(dtype) for dim in dims)
    options = case.options | {"lengths": mx.array(lengths)}
    contiguous = replace(case, k=gathered(k, table), v=gathered(v, table), options=options)
    return replace(case, k=k, v=v, options=options | {"block_table": mx.array(table)}), contiguous


def results(case: Case) -> tuple[mx.array, mx.array]:
    return flash_attention(case.q, case.k, case.v, **case.options, return_lse=True)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_contiguous_call(page_size: int, feature: str):
    pages, contiguous = paged(mx.float16, feature, page_size)
    with mlx_anvil.strict():
        found = results(pages)
    for result, expected in zip(found, results(contiguous), strict=True):
        assert_same_bits(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 33])
def test_against_the_formula(q_len: int, dtype: mx.Dtype):
    pages, contiguous = paged(dtype, "causal", 16, q_len=q_len)
    out = flash_attention(pages.q, pages.k, pages.v, **pages.options)
    assert not out[LENGTHS.index(0)].any()
    for b, n in enumerate(LENGTHS):
        if n == 0:
            continue
        alone = slice(b, b + 1)
        k, v = (x[alone, :, :n] for x in (contiguous.k, contiguous.v))
        own = replace(contiguous, q=pages.q[alone], k=k, v=v, d_out=pages.d_out[alone], options={"mask": "causal"})
        exact, rounding = own.reference(), ROUNDING.get(dtype)
        composed = own.reference(round_to=rounding).out if rounding else None
        assert_close("out", out[alone], exact.out, composed, OUTPUT_FACTOR)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_quantized_pages(page_size: int, bits: int):
    pages, _ = paged(mx.float16, "causal", page_size, q_len=1)
    table = np.array(pages.options["block_table"])
    parts = [mx.quantize(x, group_size=32, bits=bits) for x in (pages.k, pages.v)]
    options = pages.options | {"kv_group_size": 32, "kv_bits": bits}
    out = flash_attention(pages.q, *map(tuple, parts), **options)
    contiguous = [tuple(gathered(part, table) for part in x) for x in parts]
    del options["block_table"]
    assert_same_bits(out, flash_attention(pages.q, *contiguous, **options))


# ---- what other requests left in the pages ---------------------------------------------------------------------------


def spoiled(x: mx.array, table: np.ndarray, value: float) -> mx.array:
    """The cache with ``value`` in every row that no sequence uses."""
    page_size = x.shape[2]
    used = np.zeros((x.shape[0], page_size), bool)
    for row, length in zip(table, LENGTHS, strict=True):
        for position in range(length):
            used[row[position // page_size], position % page_size] = True
    return mx.where(mx.array(used)[:, None, :, None], x, mx.array(value, x.dtype))


@pytest.mark.parametrize("q_len", [1, 5])
def test_rows_past_the_last_key_are_not_seen(q_len: int):
    pages, _ = paged(mx.float32, "causal", 16, q_len=q_len)
    table = np.array(pages.options["block_table"])
    pages.options["block_table"] = mx.array(np.where(table < 0, len(pages.k) - 1, table))

    def output_and_gradients(value: float) -> list[mx.array]:
        def attention(*qkv: mx.array) -> list[mx.array]:
            return [flash_attention(*qkv, **pages.options)]

        k, v = (spoiled(x, table, value) for x in (pages.k, pages.v))
        out, gradients = mx.vjp(attention, [pages.q, k, v], [pages.d_out])
        return [*out, *gradients]

    for found, expected in zip(output_and_gradients(mx.nan), output_and_gradients(0.0), strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("q_len", [1, 9])
def test_quantized_rows_past_the_last_key_are_not_seen(q_len: int):
    pages, _ = paged(mx.float16, "causal", 16, q_len=q_len)
    table = np.array(pages.options["block_table"])

    def output(value: float) -> mx.array:
        k, v = (mx.quantize(x, group_size=32, bits=4) for x in (pages.k, pages.v))
        k, v = ((w, *(spoiled(x, table, value) for x in factors)) for w, *factors in (k, v))
        return flash_attention(pages.q, k, v, **pages.options, kv_group_size=32, kv_bits=4)

    assert_same_bits(output(mx.nan), output(0.0))


# ---- shared pages and transformations --------------------------------------------------------------------------------

LENGTHS_SHARED = mx.array([11, 6, 9])
TABLE = mx.array([[3, 0, 1], [3, 2, -7], [3, 0, 4]])  # pages of 4; all share page 3, two share page 0


def shared() -> tuple[mx.array, mx.array, mx.array]:
    return mx.random.normal((3, 4, 2, 16)), mx.random.normal((6, 2, 4, 16)), mx.random.normal((6, 2, 4, 8))


def call(attention: Any, q: mx.array, k: mx.array, v: mx.array, lengths=LENGTHS_SHARED, table=TABLE) -> mx.array:
    return attention(q, k, v, mask="causal", lengths=lengths, block_table=table)


def loss(attention: Any) -> Any:
    return lambda *arrays: call(attention, *arrays).square().sum()


def test_gradients_of_shared_pages():
    arrays = shared()
    found, expected = (mx.grad(loss(f), argnums=(0, 1, 2))(*arrays) for f in (flash_attention, definition))
    for result, exact in zip(found, expected, strict=True):
        assert mx.allclose(result, exact, rtol=1e-4, atol=1e-5)
    assert found[1][3].any()
    assert not found[1][5].any()  # in no table


def test_forward_mode_and_second_derivatives():
    arrays = shared()
    tangents = [mx.random.normal(x.shape) for x in arrays]
    for transform in (lambda f: f, mx.grad):
        found, expected = (mx.jvp(transform(loss(f)), arrays, tangents)[1][0] for f in (flash_attention, definition))
        assert mx.allclose(found, expected, rtol=1e-3, atol=1e-3)


IN_AXES = (  # of q, k, v, lengths and the table
    *((axis, None, None, None, None) for axis in range(5)),
    *((None, axis, None, None, None) for axis in range(5)),
    *((None, None, axis, None, None) for axis in range(5)),
    *((None, None, None, axis, None) for axis in range(2)),
    *((None, None, None, None, axis) for axis in range(3)),
    (0, 0, 0, 0, 0),
    (2, 1, 3, 1, 2),
)


@pytest.mark.parametrize("axes", IN_AXES, ids=str)
def test_vmap(axes: tuple[int | None, ...]):
    arrays = (*shared(), LENGTHS_SHARED, TABLE)
    others = (*shared(), LENGTHS_SHARED - 2, mx.maximum(TABLE, 0)[::-1])
    given = [x if a is None else mx.stack([x, y], a) for x, y, a in zip(arrays, others, axes, strict=True)]

    def function(q: mx.array, k: mx.array, v: mx.array, lengths: mx.array, table: mx.array) -> list[mx.array]:
        def own_loss(*xs: mx.array) -> mx.array:
            return call(flash_attention, *xs, lengths, table).square().sum()

        out = call(flash_attention, q, k, v, lengths, table)
        return [out, *mx.grad(own_loss, argnums=(0, 1, 2))(q, k, v)]

    found = mx.vmap(function, in_axes=axes)(*given)
    for i in range(2):
        own = [x if a is None else mx.take(x, i, a) for x, a in zip(given, axes, strict=True)]
        for result, expected in zip(found, function(*own), strict=True):
            assert mx.allclose(result[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shapeless", [False, True])
def test_compiled(shapeless: bool):
    compiled = mx.compile(lambda *xs: call(flash_attention, *xs), shapeless=shapeless)
    for page_size in (4, 7):
        q, k, v = shared()
        k, v = (mx.random.normal((6, 2, page_size, x.shape[-1])) for x in (k, v))
        assert_same_bits(
            compiled(q, k, v, LENGTHS_SHARED, TABLE), call(flash_attention, q, k, v, LENGTHS_SHARED, TABLE)
        )


def test_exported(tmp_path):
    arrays = (*shared(), LENGTHS_SHARED, TABLE)
    with mlx_anvil.composed():
        mx.export_function(str(tmp_path / "paged.mlxfn"), lambda *xs: call(flash_attention, *xs), *arrays)
    (result,) = mx.import_function(str(tmp_path / "paged.mlxfn"))(*arrays)
    assert mx.allclose(result, call(flash_attention, *arrays), rtol=1e-5, atol=1e-6)


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.int64, mx.uint32, mx.uint8], ids=str)
def test_dtypes_of_tables(dtype: mx.Dtype):
    arrays, table = shared(), mx.maximum(TABLE, 0)
    assert_same_bits(
        call(flash_attention, *arrays, table=table.astype(dtype)), call(flash_attention, *arrays, table=table)
    )


def test_pages_that_are_not_known_at_the_call_are_clamped():
    arrays = shared()
    out = call(flash_attention, *arrays, table=mx.where(TABLE == 4, 2**31 - 1, TABLE))
    assert_same_bits(out, call(flash_attention, *arrays, table=mx.where(TABLE == 4, 5, TABLE)))


@pytest.mark.parametrize("shape", [(0, 2, 4, 16), (6, 2, 0, 16)], ids=str)
def test_empty_caches(shape: tuple[int, ...]):
    cache = mx.zeros(shape)
    assert not call(flash_attention, shared()[0], cache, cache, lengths=mx.zeros(3, mx.int32)).any()


def test_tables_without_pages():
    q, k, v = shared()
    out = call(flash_attention, q, k, v, mx.zeros(3, mx.int32), mx.zeros((3, 0), mx.int32))
    assert not out.any()


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": None}, r"block_table is given without lengths"),
        ({"lengths": mx.array([13, 1, 1])}, r"lengths has 13; allowed: 0 to 12"),
        ({"lengths": mx.array([-1, 1, 1])}, r"lengths has -1; allowed: 0 to 12"),
        ({"lengths": mx.array([11, 9, 9])}, r"block_table\[1, 2\] is -7 and k has 6 pages; allowed: 0 to 5"),
        ({"block_table": mx.array([[0], [6], [1]]), "lengths": mx.array([1, 1, 1])}, r"block_table\[1, 0\] is 6"),
        ({"block_table": TABLE.astype(mx.float32)}, r"block_table has dtype float32; allowed: integers"),
        ({"block_table": TABLE[:2]}, r"block_table has shape \(2, 3\); allowed: .*\(3, any\)"),
        ({"block_table": TABLE[0]}, r"block_table has shape \(3,\); allowed: "),
        ({"k": mx.zeros((6, 2, 16))}, r"k has shape \(6, 2, 16\); allowed with block_table: rank 4"),
        ({"v": mx.zeros((6, 2, 5, 8))}, r"k has shape .* and v has shape \(6, 2, 5, 8\); allowed with block_table"),
        ({"cu_seqlens_q": mx.array([0, 2])}, r"lengths and cu_seqlens are both given"),
    ],
)
def test_bad_tables(options: dict[str, Any], message: str):
    mx.eval([x for x in options.values() if x is not None], LENGTHS_SHARED, TABLE)
    arguments = dict(zip("qkv", shared(), strict=True)) | {"lengths": LENGTHS_SHARED, "block_table": TABLE} | options
    with pytest.raises(ValueError, match=r"^\[flash_attention\] " + message):
        flash_attention(**arguments)
