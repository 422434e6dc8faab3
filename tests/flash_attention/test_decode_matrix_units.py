"""Decodes on GPUs with matrix units. The checked simulator runs their kernels."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from support import assert_same_bits, poison_memory, to_numpy
from tests.flash_attention.cases import FEATURES, OUTPUT_FACTOR, Case, assert_close, draw
from tests.flash_attention.formulas import ROUNDING

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.slow,
    pytest.mark.alike("dtype"),
    pytest.mark.usefixtures("matrix_units"),
]

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


def attend(case: Case, in_parts: bool = False) -> tuple[mx.array, mx.array]:
    """Output and lse, by the kernel for matrix units."""
    poison_memory(1 << 16)
    with mlx_anvil.trace() as trace:
        results = mlx_anvil.flash_attention(case.q, case.k, case.v, return_lse=True, **case.options)
        mx.eval(results)
    passes = [kernel.split("_float16")[0].split("_bfloat16")[0] for kernel in trace.kernels]
    assert passes == ["flash_attention_decode_matrix", *["flash_attention_decode_combine"] * in_parts]
    return results


def check(case: Case, in_parts: bool = False) -> None:
    out, lse = attend(case, in_parts)
    exact, composed = case.reference(), case.reference(round_to=ROUNDING[case.q.dtype])
    assert_close("out", out, exact.out, composed.out, OUTPUT_FACTOR)
    assert_close("lse", lse, exact.lse, None, 0)


@each_dtype
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 96), (8, 120), (65, 40), (3, 17), (127, 1)], ids=str)
def test_head_dims(dims, dtype):
    check(draw((2, 1), (3, 75), dims, dtype, "causal"))


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, dtype):
    for dim, q_len in ((64, 5), (128, 2)):
        check(draw((6, 3), (q_len, 131), (dim, dim), dtype, feature, batch=2))


@pytest.mark.parametrize("group", range(1, 9))
def test_rows(group):
    """Rows are a group's heads times queries: fewer than 8, and blocks of 8 with a partial last one."""
    for q_len in range(1, 9):
        check(draw((group, 1), (q_len, 40), (64, 64), mx.float16, "causal"))


@each_dtype
@pytest.mark.parametrize("feature", ["none", "window+causal", "softcap", "additive mask", "sinks"])
def test_parts(feature, dtype):
    for dim, q_len in ((128, 1), (64, 4)):
        check(draw((4, 2), (q_len, 777), (dim, dim), dtype, feature), in_parts=True)


def test_lengths():
    """Partial blocks of keys of every length, and fewer blocks than SIMD groups."""
    for kv_len, dim in product((1, 2, 7, 8, 9, 15, 17, 31, 33, 64, 65), (64, 128)):
        check(draw((1, 1), (1, kv_len), (dim, dim), mx.float16))


@each_dtype
def test_layouts_give_the_same_bits(dtype):
    """Rows that are not whole vectors, columns that are not adjacent, heads inside rows."""
    case = draw((4, 2), (2, 300), (72, 72), dtype, "causal")
    expected = attend(case, in_parts=True)
    wide = [mx.repeat(x, 2, axis=-1) for x in (case.q, case.k, case.v)]
    apart = [x[..., ::2] for x in wide]
    inside = [mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (case.q, case.k, case.v)]
    for q, k, v in (apart, inside, (case.q, apart[1], inside[2])):
        moved = Case(q, k, v, case.d_out, case.options)
        for result, want in zip(attend(moved, in_parts=True), expected, strict=True):
            assert_same_bits(result, want)


@each_dtype
def test_scores_that_rise_and_fall(dtype):
    """The maximum score grows in every block, in none after the first, or by less than the headroom of the weights."""
    for step in (40.0, -40.0, 1.0):
        case = draw((2, 1), (1, 300), (64, 64), dtype)
        case.q = mx.ones_like(case.q)
        rising = mx.linspace(0, step, 300)[:, None]
        case.k = (mx.broadcast_to(rising, (300, 64)) / 8).astype(dtype)[None, None]
        check(case, in_parts=True)


@each_dtype
def test_rows_that_see_nothing(dtype):
    case = draw((2, 1), (3, 50), (64, 64), dtype)
    seen = np.ones((3, 50), bool)
    seen[1] = False
    seen[2, :49] = False
    case.options["mask"] = mx.array(seen)
    out, lse = attend(case)
    assert not to_numpy(out)[:, :, 1].any()
    assert (to_numpy(lse)[:, :, 1] == -np.inf).all()
    # The one key of the last row has all its weight.
    assert_same_bits(out[:, :, 2], mx.broadcast_to(case.v[:, :, 49], (1, 2, 64)))


@each_dtype
def test_what_is_no_number_stays_in_its_row(dtype):
    """The padding beyond the last key and column is zero. It must not meet an infinity and give NaN."""
    case = draw((4, 2), (1, 77), (72, 72), dtype)
    case.v[0, 0, 76, 71] = mx.array(np.inf, dtype)
    out = to_numpy(attend(case)[0])
    assert (out[0, :2, 0, 71] == np.inf).all()
    out[0, :2, 0, 71] = 0
    assert np.isfinite(out).all()


def test_float32_and_wider_heads_keep_their_kernels():
    for dim, dtype in ((136, mx.float16), (64, mx.float32)):
        case = draw((1, 1), (1, 17), (dim, dim), dtype)
        with mlx_anvil.trace() as trace:
            mx.eval(mlx_anvil.flash_attention(case.q, case.k, case.v))
        assert not any("_matrix_" in kernel for kernel in trace.kernels)
