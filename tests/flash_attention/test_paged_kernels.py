"""Pages that the Metal kernels for few queries read in place: nothing is copied, no id leads out of the cache, and rows
of no sequence are not read. The checked simulator runs them."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import flash_attention
from tests.flash_attention.test_paged import LENGTHS, paged, spoiled
from tests.flash_attention.test_ragged_kernels import TOLERANCES, assert_like

pytestmark = pytest.mark.cpu_only

UNITS = pytest.mark.parametrize("units", [False, True], ids=["apple", "matrix units"])


def results(q: mx.array, k: Any, v: Any, **options: Any) -> list[mx.array]:
    found = flash_attention(q, k, v, return_lse=True, **options)
    mx.eval(found)
    return list(found)


def in_place(q: mx.array, k: Any, v: Any, units: bool, **options: Any) -> list[mx.array]:
    """The results of kernels that read pages."""
    with (
        mlx_anvil.simulate(checked=True, matrix_units=units),
        mlx_anvil.strict(),
        mlx_anvil.trace() as trace,
    ):
        found = results(q, k, v, **options)
    assert trace.kernels
    assert all("combine" in kernel or "_c13t" in kernel for kernel in trace.kernels), trace.kernels
    return found


@pytest.mark.slow
@UNITS
@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("feature", ["none", "window+causal", "additive mask", "sinks"])
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("dims", [(64, 64), (72, 40)], ids=str)
def test_results(dims, page_size, feature, dtype, units):
    pages, _ = paged(dtype, feature, page_size, q_len=3, dims=dims)
    expected = results(pages.q, pages.k, pages.v, **pages.options)
    assert_like(in_place(pages.q, pages.k, pages.v, units, **pages.options), expected)


@UNITS
def test_rows_of_no_sequence(units):
    pages, _ = paged(mx.float16, "causal", 16, q_len=2)
    expected = results(pages.q, pages.k, pages.v, **pages.options)
    k, v = (spoiled(x, np.array(pages.options["block_table"]), mx.nan) for x in (pages.k, pages.v))
    assert_like(in_place(pages.q, k, v, units, **pages.options), expected)


@pytest.mark.slow
@UNITS
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_codes(page_size, bits, units):
    pages, _ = paged(mx.float16, "causal", page_size, q_len=1)
    table = np.array(pages.options["block_table"])
    k, v = (mx.quantize(x, group_size=64, bits=bits) for x in (pages.k, pages.v))
    options = pages.options | {"kv_bits": bits}
    expected = results(pages.q, tuple(k), tuple(v), **options)
    k, v = ((w, *(spoiled(x, table, mx.nan) for x in factors)) for w, *factors in (k, v))
    assert_like(in_place(pages.q, k, v, units, **options), expected)


@UNITS
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_codes_that_are_floats(mode, units):
    pages, _ = paged(mx.float16, "none", 16, q_len=1)
    k, v = (tuple(mx.quantize(x, mode=mode)) for x in (pages.k, pages.v))
    expected = results(pages.q, k, v, **pages.options, kv_mode=mode)
    assert_like(in_place(pages.q, k, v, units, **pages.options, kv_mode=mode), expected)


@UNITS
@pytest.mark.parametrize("dtype", [mx.int32, mx.int64], ids=str)
def test_ids_out_of_range_are_clamped(dtype, units):
    pages, _ = paged(mx.float16, "none", 16, q_len=1)
    table = mx.maximum(pages.options.pop("block_table"), 0).astype(dtype)
    last = len(pages.k) - 1
    wrong = mx.where(mx.random.bernoulli(0.3, table.shape), table, mx.where(table % 2 == 0, -5, 2**31 - 1))
    expected = results(pages.q, pages.k, pages.v, **pages.options, block_table=mx.clip(wrong, 0, last))
    found = in_place(pages.q, pages.k, pages.v, units, **pages.options, block_table=wrong.astype(dtype) * 1)
    assert_like(found, expected)


@UNITS
def test_strided_caches(units):
    """Rows of one array that has keys beside values, and rows that are no vectors."""
    pages, _ = paged(mx.float16, "none", 16, q_len=1)
    expected = results(pages.q, pages.k, pages.v, **pages.options)
    for padding in (0, 1):
        both = mx.concatenate([pages.k, pages.v, pages.v[..., :padding]], axis=-1)
        k, v = both[..., :64], both[..., 64:128]
        assert_like(in_place(pages.q, k, v, units, **pages.options), expected)


def test_pages_of_another_size_are_copied():
    pages, _ = paged(mx.float16, "none", 17, q_len=1)
    expected = results(pages.q, pages.k, pages.v, **pages.options)
    with mlx_anvil.simulate(checked=True), mlx_anvil.trace() as trace:
        assert_like(results(pages.q, pages.k, pages.v, **pages.options), expected)
    assert all("_c13f" in kernel for kernel in trace.kernels)


def test_bytes_read_are_those_of_pages_in_use():
    pages, _ = paged(mx.float32, "none", 16, q_len=1)
    with mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(flash_attention(pages.q, pages.k, pages.v, **pages.options))
    read = {use.name: use.bytes_read for launch in profiles for use in launch.buffers if use.name in ("k", "v")}
    in_use = 2 * sum(LENGTHS) * 64 * 4  # of two heads
    assert read == {"k": in_use, "v": in_use}
