"""Decodes over quantized keys and values on GPUs with matrix units. The checked simulator runs their kernels."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from support import assert_same_bits
from tests.flash_attention.cases import FEATURES, draw
from tests.flash_attention.quantized_cases import QuantizedCase, form_of, quantized

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.slow,
    pytest.mark.alike("dtype"),
    pytest.mark.usefixtures("matrix_units"),
]

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
KERNEL, OTHER = "flash_attention_quantized_decode_matrix", "flash_attention_quantized_decode"


def attend(case: QuantizedCase, in_parts: bool = False, kernel: str = KERNEL) -> tuple[mx.array, mx.array]:
    with mlx_anvil.trace() as trace:
        results = case.attend()
    assert not trace.fallbacks
    passes = [name.split("_float")[0].split("_bfloat16")[0] for name in trace.kernels]
    q = case.plain.q
    wide = q.dtype == mx.bfloat16 and q.shape[-1] == 128 and case.formats["kv_bits"] not in (4, (4, 4))
    first = f"{kernel}_wide" if wide and kernel == KERNEL else kernel
    assert passes == [first, *["flash_attention_decode_combine"] * in_parts]
    return results


def check(case: QuantizedCase, in_parts: bool = False) -> None:
    case.assert_right(*attend(case, in_parts))


@each_dtype
@pytest.mark.parametrize("bits", list(product((4, 8), (4, 8))), ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (128, 64), (128, 128)], ids=str)
def test_formats(dim: int, group: int, bits: tuple[int, int], dtype: mx.Dtype):
    case = draw((4, 2), (2, 75), (dim, dim), dtype, "causal")
    check(quantized(case, form_of(bits[0], group), v_bits=bits[1]))


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, dtype: mx.Dtype):
    for dim, q_len in ((64, 5), (128, 2)):
        check(quantized(draw((6, 3), (q_len, 131), (dim, dim), dtype, feature, batch=2)))


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_rows(group: int):
    """Rows are a group's heads times queries: fewer than 8, and blocks of 8 with a partial last one."""
    for q_len in (1, 3, 8):
        check(quantized(draw((group, 1), (q_len, 40), (64, 64), mx.float16, "causal")))


@each_dtype
@pytest.mark.parametrize("feature", ["none", "window+causal", "softcap", "additive mask", "sinks"])
def test_parts(feature: str, dtype: mx.Dtype):
    for dim, q_len in ((128, 1), (64, 4)):
        check(quantized(draw((4, 2), (q_len, 1601), (dim, dim), dtype, feature)), in_parts=True)


def test_lengths():
    """Partial blocks of keys of every length, and fewer blocks than SIMD groups."""
    for kv_len, dim in product((1, 2, 7, 8, 9, 15, 17, 31, 33, 64, 65), (64, 128)):
        check(quantized(draw((1, 1), (1, kv_len), (dim, dim), mx.float16)))


def test_no_keys():
    case = quantized(draw((2, 1), (1, 1), (64, 64), mx.float16))
    case.k, case.v = (tuple(x[:, :, :0] for x in parts) for parts in (case.k, case.v))
    out, lse = case.attend()
    assert (out == 0).all()
    assert (lse == -mx.inf).all()


@each_dtype
def test_slices_of_caches(dtype: mx.Dtype):
    """Of a longer buffer, and of [batch, length, heads, ...] seen as [batch, heads, length, ...]."""
    case = quantized(draw((4, 2), (2, 45), (128, 128), dtype, "causal", batch=2))
    expected = attend(case)

    def longer(x: mx.array) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 0), (3, 40), (0, 0)], constant_values=mx.array(7, x.dtype))[:, :, 3:48]

    def transposed(x: mx.array) -> mx.array:
        return mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)

    k, v = case.k, case.v
    for layout in (longer, transposed):
        case.k, case.v = (tuple(map(layout, parts)) for parts in (k, v))
        mx.eval(case.k, case.v)
        for one, other in zip(attend(case), expected, strict=True):
            assert_same_bits(one, other)


@each_dtype
def test_scales_that_grow_and_shrink(dtype: mx.Dtype):
    """Values whose magnitude changes by 2^15 along the keys, and from one group to the other."""
    for powers in ((-8, 5), (5, -8), (0, 0)):
        case = draw((4, 1), (1, 600), (128, 128), dtype)
        along = mx.power(2.0, mx.linspace(*powers, 600))[:, None]
        across = mx.array([1.0] * 64 + [2.0**-6] * 64)
        case.v = (case.v.astype(mx.float32) * along * across).astype(dtype)
        check(quantized(case), in_parts=True)


def test_many_small_weights_count():
    """One key has weight 1 and the others 2^-14 each, which in all is as much. Values are small."""
    case = draw((1, 1), (1, 16385), (64, 64), mx.float16)
    case.q = mx.ones_like(case.q)
    case.options["scale"] = 1.0
    keys = np.zeros((1, 1, 16385, 64), np.float16)
    keys[0, 0, 0, 0] = 14 * np.log(2)
    case.k = mx.array(keys)
    case.v = (case.v.astype(mx.float32) * 2.0**-8 + 2.0**-8).astype(mx.float16)
    codes = quantized(case)
    out, _ = attend(codes, in_parts=True)
    exact = codes.plain.reference().out
    assert np.abs(np.array(out) - exact).max() <= 2.0**-9 * np.abs(exact).max()


@each_dtype
def test_rows_that_see_nothing(dtype: mx.Dtype):
    case = draw((2, 1), (3, 50), (64, 64), dtype)
    seen = np.ones((3, 50), bool)
    seen[1] = False
    case.options["mask"] = mx.array(seen)
    out, lse = attend(quantized(case))
    assert (out[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == -mx.inf).all()


@each_dtype
def test_what_is_no_number_stays_in_its_group(dtype: mx.Dtype):
    """Keys past the last read the last. Their weight of zero must not meet an infinity and give NaN."""
    case = quantized(draw((4, 2), (1, 77), (128, 128), dtype))
    biases = case.v[2]
    biases[0, 0, 76, 1] = mx.array(np.inf, dtype)
    out = np.array(attend(case)[0].astype(mx.float32))
    assert (out[0, :2, 0, 64:] == np.inf).all()
    out[0, :2, 0, 64:] = 0
    assert np.isfinite(out).all()


@each_dtype
def test_what_keeps_the_other_kernel(dtype: mx.Dtype):
    def other(case: QuantizedCase) -> None:
        case.assert_right(*attend(case, kernel=OTHER))

    for form in (form_of(6), form_of(4, 32), {"mode": "mxfp8", "bits": 8, "group_size": 32}):
        other(quantized(draw((2, 1), (1, 17), (128, 128), dtype), form))
    for dims in ((64, 128), (256, 256)):
        other(quantized(draw((2, 1), (1, 17), dims, dtype)))
    other(quantized(draw((2, 1), (1, 17), (64, 64), mx.float32)))
    case = quantized(draw((2, 1), (1, 45), (128, 128), dtype))
    wide = mx.pad(case.k[2], [(0, 0), (0, 0), (0, 0), (0, 6)], constant_values=mx.array(3, dtype))
    mx.eval(wide)
    case.k = (*case.k[:2], wide[..., :2])  # biases with other strides than scales
    other(case)
