"""The Metal kernels of flash_attention for quantized keys and values, in the simulator with every access checked."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from support import assert_same_bits
from tests.flash_attention.cases import FEATURES, draw
from tests.flash_attention.quantized_cases import FOUR_BITS, QuantizedCase, quantized
from tests.metal_launches.inputs import EVERY_FORMAT

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

each_dtype = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
DECODE, FORWARD = "flash_attention_quantized_decode", "flash_attention_quantized_forward"


def name_of(form: dict[str, Any]) -> str:
    return f"{form['mode']}{form['bits']}g{form['group_size']}"


def check(case: QuantizedCase, kernel: str, constants: str = "", **simulation: Any) -> list[str]:
    """Runs in two orders of threads, with every access checked. Returns the kernels."""
    results = []
    for seed in range(2):
        with mlx_anvil.simulate(checked=True, seed=seed, **simulation), mlx_anvil.trace() as trace:
            results.append(case.attend())
        assert not trace.fallbacks
        assert trace.kernels[0].startswith(kernel)  # and no copy of the keys in float before it
        assert constants in trace.kernels[0]
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)
    case.assert_right(*results[0])
    return trace.kernels


@pytest.mark.alike("dtype")
@each_dtype
@pytest.mark.parametrize("form", EVERY_FORMAT, ids=name_of)
def test_formats(form: dict[str, Any], dtype: mx.Dtype):
    check(quantized(draw((4, 2), (2, 45), (128, 128), dtype, "causal"), form), DECODE)
    check(quantized(draw((2, 1), (19, 37), (128, 128), dtype, "causal"), form), FORWARD)


@pytest.mark.parametrize("bits", [(8, 4), (4, 8), (3, 6), (8, 2)], ids=str)
@pytest.mark.parametrize(("q_len", "kernel"), [(1, DECODE), (11, FORWARD)])
def test_widths_of_keys_and_values_may_differ(q_len: int, kernel: str, bits: tuple[int, int]):
    form = {**FOUR_BITS, "bits": bits[0], "group_size": 32}
    check(quantized(draw((3, 1), (q_len, 53), (96, 64), mx.float16), form, v_bits=bits[1]), kernel)


@pytest.mark.alike("dtype")
@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("q_len", "kernel"), [(1, DECODE), (5, DECODE), (45, FORWARD)])
def test_features(q_len: int, kernel: str, feature: str, dtype: mx.Dtype):
    check(quantized(draw((4, 2), (q_len, 71), (64, 64), dtype, feature, batch=2)), kernel)


@pytest.mark.slow
@pytest.mark.alike("dtype")
@each_dtype
@pytest.mark.parametrize("dims", [(64, 64), (32, 96), (128, 64), (160, 128), (256, 256), (192, 224)], ids=str)
def test_head_dims(dims: tuple[int, int], dtype: mx.Dtype):
    form = {**FOUR_BITS, "group_size": 32}
    for group, q_len, kernel in ((1, 1, DECODE), (5, 1, DECODE), (8, 1, DECODE), (2, 4, DECODE), (1, 33, FORWARD)):
        filled = dims in ((64, 64), (256, 256))
        check(quantized(draw((group, 1), (q_len, 43), dims, dtype), form), kernel, f"_c10{'t' if filled else 'f'}")


def test_heads_of_512_in_a_decode():
    check(quantized(draw((3, 1), (1, 41), (512, 512), mx.float16)), DECODE)
    check(quantized(draw((1, 1), (2, 41), (384, 512), mx.float16)), DECODE)


@pytest.mark.parametrize("q_len", [1, 8, 9])
@pytest.mark.parametrize("kv_len", [0, 1, 2])
def test_few_keys(kv_len: int, q_len: int):
    case = draw((2, 1), (q_len, max(kv_len, 1)), (64, 64), mx.float16)
    codes = quantized(case)
    if kv_len == 0:
        codes.k, codes.v = (tuple(x[:, :, :0] for x in parts) for parts in (codes.k, codes.v))
        with mlx_anvil.simulate(checked=True):
            out, lse = codes.attend()
        assert (out == 0).all()
        assert (lse == -mx.inf).all()
        return
    check(codes, DECODE if q_len <= 8 else FORWARD)


@pytest.mark.parametrize("feature", ["none", "window", "bool mask", "sinks"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_keys_in_parts(q_len: int, feature: str):
    case = quantized(draw((2, 1), (q_len, 4133), (64, 64), mx.float16, feature))
    kernels = check(case, DECODE, "_c16t")
    assert kernels[1].startswith("flash_attention_decode_combine")


@pytest.mark.alike("bits")
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("q_len", "kernel"), [(2, DECODE), (21, FORWARD)])
def test_slices_of_caches(q_len: int, kernel: str, bits: int):
    """Of a longer buffer, of [batch, length, heads, ...] seen as [batch, heads, length, ...], and of shifted words."""
    case = quantized(draw((4, 2), (q_len, 45), (64, 64), mx.float16, "causal", batch=2), {**FOUR_BITS, "bits": bits})
    with mlx_anvil.simulate():
        plain = case.attend()

    def longer(x: mx.array) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 0), (3, 40), (0, 0)], constant_values=mx.array(7, x.dtype))[:, :, 3:48]

    def transposed(x: mx.array) -> mx.array:
        return mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)

    def shifted(x: mx.array) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 0), (0, 0), (1, 0)], constant_values=mx.array(7, x.dtype))[..., 1:]

    def repeated(x: mx.array) -> mx.array:
        return mx.broadcast_to(x[:1], x.shape)

    for layout in (longer, transposed, shifted):
        k, v = (tuple(map(layout, parts)) for parts in (case.k, case.v))
        mx.eval(k, v)
        with mlx_anvil.simulate(checked=True), mlx_anvil.trace() as trace:
            results = case.attend(k, v)
        assert [kernel.split("_float16")[0] for kernel in trace.kernels] == [kernel]
        assert ("_c5f" in trace.kernels[0]) == (layout is shifted and bits != 3)
        for one, other in zip(results, plain, strict=True):
            assert_same_bits(one, other)
    k, v = (tuple(map(repeated, parts)) for parts in (case.k, case.v))
    with mlx_anvil.simulate(checked=True):
        results = case.attend(k, v)
    case.plain.k, case.plain.v = (mx.broadcast_to(x[:1], x.shape) for x in (case.plain.k, case.plain.v))
    case.assert_right(*results)


@pytest.mark.parametrize(("q_len", "kernel"), [(1, DECODE), (11, FORWARD)])
def test_biases_with_other_strides_than_scales(q_len: int, kernel: str):
    case = quantized(draw((2, 1), (q_len, 45), (128, 128), mx.float16))
    wide = mx.pad(case.k[2], [(0, 0), (0, 0), (0, 0), (0, 6)], constant_values=mx.array(3, mx.float16))
    mx.eval(wide)
    case.k = (*case.k[:2], wide[..., :2])
    check(case, kernel, "_c5f")


@pytest.mark.parametrize("q_len", [1, 11])
def test_nan_codes(q_len: int):
    """A NaN in a key makes the rows that see it NaN; one in a value, its column."""
    form = {"mode": "mxfp8", "bits": 8, "group_size": 32}
    case = quantized(draw((1, 1), (q_len, 45), (64, 64), mx.float32), form)
    words = np.array(case.v[0])
    words.view(np.uint8)[0, 0, 7, 37] = 0xFF
    with mlx_anvil.simulate(checked=True):
        out, _ = case.attend(v=(mx.array(words), case.v[1]))
        nan = np.isnan(np.array(out))
        assert nan[..., 37].all()
        assert nan.sum() == q_len
        words = np.array(case.k[0])
        words.view(np.uint8)[0, 0, 40, 3] = 0x7F
        out, _ = case.attend(k=(mx.array(words), case.k[1]))
        assert np.isnan(np.array(out)).all()


@pytest.mark.parametrize("form", [FOUR_BITS, {"mode": "mxfp4", "bits": 4, "group_size": 32}], ids=name_of)
def test_scales_of_any_size(form: dict[str, Any]):
    """No product with a power of two in the kernels overflows where the values do not."""
    case = draw((2, 1), (1, 45), (64, 64), mx.float32)
    case.v = case.v * 2.0**120
    codes = quantized(case, form)
    with mlx_anvil.simulate():
        out, _ = codes.attend()
    exact = case.reference().out
    assert np.abs(np.array(out) - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.alike("dtype", "feature")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ["none", "causal", "additive mask", "sinks"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 32)], ids=str)
def test_tiles_for_matrix_units(dims: tuple[int, int], feature: str, dtype: mx.Dtype):
    form = {**FOUR_BITS, "group_size": 32}
    case = quantized(draw((2, 1), (70, 133), dims, dtype, feature), form)
    check(case, FORWARD + "_matrix", matrix_units=True)
    check(quantized(draw((2, 1), (1, 700), dims, dtype, feature), form), DECODE, "_c16t", matrix_units=True)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_decode_reads_every_code_once(bits: int):
    """Four heads of a group share what one read of the cache brings."""
    form = {**FOUR_BITS, "bits": bits}
    case = quantized(draw((4, 1), (1, 512), (128, 128), mx.float16), form)
    with mlx_anvil.simulate(profiled=True) as profiles:
        case.attend()
    read = {b.name: b.bytes_read for b in profiles[0].buffers}
    for name, parts in (("k", case.k), ("v", case.v)):
        for suffix, x in zip(("", "_scales", "_biases"), parts, strict=True):
            assert read[name + suffix] == x.nbytes
    if bits == 2:  # lanes with parts of the same words
        return
    sites = [site for site in profiles[0].sites if site.memory == "device" and site.kind == "read"]
    codes = sum(x.nbytes for x in (case.k[0], case.v[0]))
    assert sum(site.bytes for site in sites if site.buffer in "kv") == codes
