"""flash_attention over quantized keys and values, against the definition over dequantized ones in float64."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import flash_attention, reference
from mlx_anvil.reference import DTYPES
from quantized_numpy import FLOAT_FORMATS, FORMATS, Format
from support import GRADIENT_FACTOR, Arrays, assert_accurate, assert_same_bits, max_error, to_numpy, vjp_of
from tests.flash_attention.cases import FLOAT32_TOLERANCE

AFFINE4 = Format("affine", 64, 4)
ONE_OF_EACH = (*(Format("affine", 32, bits) for bits in (2, 3, 4, 5, 6, 8)), *FLOAT_FORMATS)


@dataclass
class Cache:
    """Quantized keys and values of a call, and its options. Affine scales and biases are arguments of functions."""

    k: Arrays
    v: Arrays
    options: dict[str, Any]

    @property
    def numbers(self) -> Arrays:
        """Scales and biases, if they are floating-point numbers."""
        return [*self.k[1:], *self.v[1:]] if len(self.k) == 3 else []

    def bind(self, attention: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        """Attention as a function of ``q`` and of the numbers that are given."""

        def function(q: mx.array, *numbers: mx.array) -> Any:
            given = [*numbers] or [*self.k[1:], *self.v[1:]]
            half = len(given) // 2
            return attention(q, (self.k[0], *given[:half]), (self.v[0], *given[half:]), **self.options, **more)

        return function


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def cache_of(
    shape: tuple[int, ...], dtype: mx.Dtype, of_k: Format, of_v: Format | None = None, v_dim: int | None = None
) -> Cache:
    """Random keys and values ``[batch, heads, length, dim]`` in a format."""
    of_v = of_v or of_k
    parts = []
    for format, dim in ((of_k, shape[-1]), (of_v, v_dim or shape[-1])):
        x = normal(*shape[:-1], dim)
        quantized = mx.quantize(x, group_size=format.group_size, bits=format.bits, mode=format.mode)
        parts.append([a if mx.issubdtype(a.dtype, mx.integer) else a.astype(dtype) for a in quantized])
    bits = of_k.bits if of_k == of_v else (of_k.bits, of_v.bits)
    options = {"kv_group_size": of_k.group_size, "kv_bits": bits, "kv_mode": of_k.mode}
    return Cache(parts[0], parts[1], options)


def check(q: mx.array, cache: Cache, **options: Any) -> None:
    arrays = [q, *cache.numbers]
    attention, exact = cache.bind(flash_attention, **options), cache.bind(reference.flash_attention, **options)

    def ours(*arrays: mx.array) -> Any:
        result = attention(*arrays)
        return result if isinstance(result, mx.array) else (result[0], result[1].astype(result[0].dtype))

    assert_accurate(ours, exact, arrays, float32_tolerance=FLOAT32_TOLERANCE)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formats(format: Format, dtype: mx.Dtype):
    for q_len, kv_len, groups in ((1, 131, 1), (5, 67, 2), (37, 70, 1)):
        dim = groups * format.group_size
        check(normal(2, 4, q_len, dim).astype(dtype), cache_of((2, 2, kv_len, dim), dtype, format), mask="causal")


@pytest.mark.parametrize("bits", [(8, 4), (4, 8), (2, 6), (5, 4), (8, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_in_different_bits(bits: tuple[int, int], dtype: mx.Dtype):
    of_k, of_v = (Format("affine", 32, b) for b in bits)
    for q_len in (1, 33):
        q = normal(1, 4, q_len, 96).astype(dtype)
        check(q, cache_of((1, 2, 77, 96), dtype, of_k, of_v, v_dim=64), return_lse=True)


@pytest.mark.parametrize("feature", ["window", "softcap", "bool mask", "additive mask", "sinks", "lse", "scale"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features(feature: str, dtype: mx.Dtype):
    for (q_len, kv_len), format in itertools.product(((1, 90), (3, 90), (40, 53)), (AFFINE4, FLOAT_FORMATS[0])):
        options: dict[str, Any] = {
            "window": {"mask": "causal", "window_size": (9, 0)},
            "softcap": {"softcap": 2.0},
            "bool mask": {"mask": mx.random.bernoulli(0.5, (2, 1, q_len, kv_len))},
            "additive mask": {"mask": normal(4, q_len, kv_len).astype(dtype)},
            "sinks": {"sinks": normal(4).astype(dtype)},
            "lse": {"return_lse": True},
            "scale": {"scale": 0.3},
        }[feature]
        if isinstance(mask := options.get("mask"), mx.array) and mask.dtype != mx.bool_:
            options["mask"] = mask.astype(mx.float32)  # in float64 the definition promotes it
            q = normal(2, 4, q_len, 64)
            check(q, cache_of((2, 2, kv_len, 64), mx.float32, format), **options)
            continue
        check(normal(2, 4, q_len, 64).astype(dtype), cache_of((2, 2, kv_len, 64), dtype, format), **options)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256, 512])
def test_few_rows(group: int, dim: int):
    """Kernels for 1, 2, 4 and 8 rows that share keys; more than 8 are packed. Head dim 512 is for decoding only."""
    for q_len, dtype in ((1, mx.float16), (2, mx.bfloat16)):
        for format in (Format("affine", 32, 4), Format("affine", 32, 8), FLOAT_FORMATS[2]):
            check(normal(1, 2 * group, q_len, dim).astype(dtype), cache_of((1, 2, 70, dim), dtype, format))


@pytest.mark.cpu_only
@pytest.mark.parametrize("format", ONE_OF_EACH, ids=str)
def test_long_cache(format: Format):
    """A decode splits long caches, and combines the parts."""
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        check(normal(1, 8, 1, 64).astype(dtype), cache_of((1, 2, 5003, 64), dtype, format), return_lse=True)


@pytest.mark.cpu_only
def test_small_weights_beside_a_large_one():
    """Integers hold the weights of a decode: one that is much larger than the others must not round them to 0 in sum."""
    q = mx.full((1, 1, 1, 64), 1.0)
    k = mx.zeros((1, 1, 4096, 64))
    k[..., 77, :] = 8 * np.log(4096.0) / 64  # its weight is the sum of all others
    v = normal(1, 1, 4096, 64) + 3
    for bits, dtype in itertools.product((4, 8), (mx.float16, mx.bfloat16)):
        parts = [list(mx.quantize(x.astype(dtype), bits=bits)) for x in (k, v)]
        cache = Cache(*parts, {"kv_bits": bits})
        check(q.astype(dtype), cache)


def test_lengths_of_zero_and_one():
    for kv_len, q_len in itertools.product((0, 1), (0, 1, 2)):
        cache = cache_of((1, 2, max(1, kv_len), 64), mx.float32, AFFINE4)
        cache.k, cache.v = ([x[:, :, :kv_len] for x in parts] for parts in (cache.k, cache.v))
        q, sinks = normal(1, 4, q_len, 64), normal(4)
        out, lse = flash_attention(q, cache.k, cache.v, sinks=sinks, return_lse=True, **cache.options)
        assert out.shape == (1, 4, q_len, 64)
        if kv_len == 0:
            assert not mx.any(out).item()
            assert max_error(lse, mx.broadcast_to(sinks[:, None], (1, 4, q_len))) <= 1e-6
        elif q_len:
            check(q, cache)


def check_not_finite(value: float, dtype: mx.Dtype, what: Callable[[np.ndarray], np.ndarray] = np.isnan) -> None:
    for position, index in itertools.product(range(5), (1, 9)):
        cache = cache_of((1, 1, 20, 64), dtype, AFFINE4)
        arrays = [normal(1, 2, 1, 64).astype(dtype), *cache.numbers]
        changed = to_numpy(arrays[position])
        changed.reshape(-1)[index] = value
        arrays[position] = mx.array(changed).astype(dtype)
        ours = to_numpy(cache.bind(flash_attention)(*arrays))
        plain = to_numpy(cache.bind(reference.flash_attention)(*(x.astype(mx.float32) for x in arrays)))
        np.testing.assert_array_equal(what(ours), what(plain))


not_finite = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])


@not_finite
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite(value: float, dtype: mx.Dtype):
    check_not_finite(value, dtype, np.isfinite if support.backend == "cuda" else np.isnan)


@not_finite
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.usefixtures("gpu_with_matrix_units")
def test_values_that_are_not_finite_on_matrix_units(value: float, dtype: mx.Dtype):
    """Infinite factors may give NaN there instead of infinity."""
    check_not_finite(value, dtype, np.isfinite)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 20])
def test_slices_of_a_longer_cache(q_len: int):
    """A cache grows in steps, and calls read its first rows without a copy."""
    for dtype, format in (
        (mx.float16, AFFINE4),
        (mx.float32, Format("affine", 32, 3)),
        (mx.bfloat16, FLOAT_FORMATS[2]),
    ):
        whole = cache_of((2, 2, 96, 64), dtype, format)
        part = Cache([x[:, :, :77] for x in whole.k], [x[:, :, :77] for x in whole.v], whole.options)
        dense = Cache([mx.contiguous(x) for x in part.k], [mx.contiguous(x) for x in part.v], whole.options)
        q = normal(2, 4, q_len, 64).astype(dtype)
        with mlx_anvil.trace() as trace:
            out = part.bind(flash_attention)(q)
            mx.eval(out)
        assert_same_bits(out, dense.bind(flash_attention)(q))
        assert not trace.fallbacks or support.backend != "cpu"


@pytest.mark.parametrize("format", [AFFINE4, FLOAT_FORMATS[1]], ids=str)
def test_heads_in_rows(format: Format):
    """Views of ``[batch, length, heads, dim]``, and of a transposed cache, whose last stride is not 1."""
    q, cache = normal(1, 33, 4, 64), cache_of((1, 33, 2, 64), mx.float32, format)

    def swapped(x: mx.array) -> mx.array:
        return x.swapaxes(1, 2)

    views = Cache([swapped(x) for x in cache.k], [swapped(x) for x in cache.v], cache.options)
    expected = views.bind(flash_attention)(mx.contiguous(swapped(q)))
    assert_same_bits(views.bind(flash_attention)(swapped(q)), expected)
    for view in support.layouts(views.k[0]):
        moved = Cache([view[1], *views.k[1:]], views.v, views.options)
        assert_same_bits(moved.bind(flash_attention)(swapped(q)), expected)


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_instruction_sets(dtype: mx.Dtype, instruction_set: str):
    for format, q_len in itertools.product(ONE_OF_EACH, (1, 5, 20)):
        q = normal(1, 4, q_len, 96).astype(dtype)
        check(q, cache_of((1, 2, 75, 96), dtype, format, v_dim=64), mask="causal")


@pytest.mark.cpu_only
def test_peak_memory_is_below_that_of_a_16_bit_cache():
    for q_len, kv_len in ((1, 4096), (512, 4096)):
        q = normal(1, 8, q_len, 128).astype(mx.bfloat16)
        cache = cache_of((1, 2, kv_len, 128), mx.bfloat16, AFFINE4)
        plain = [normal(1, 2, kv_len, 128).astype(mx.bfloat16) for _ in range(2)]
        mx.eval(q, cache.k, cache.v, plain)
        peaks = []
        for call in (lambda: flash_attention(q, *plain), lambda: cache.bind(flash_attention)(q)):  # noqa: B023
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            mx.eval(call())
            peaks.append(mx.get_peak_memory() - before)
        assert peaks[1] <= peaks[0]


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [AFFINE4, Format("affine", 32, 8), *FLOAT_FORMATS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(format: Format, dtype: mx.Dtype):
    for q_len, kv_len in ((1, 33), (21, 40)):
        q, cache = normal(2, 4, q_len, 64).astype(dtype), cache_of((2, 2, kv_len, 64), dtype, format)
        arrays = [q, *cache.numbers]
        ours = vjp_of(cache.bind(flash_attention, mask="causal"), len(arrays))
        exact = vjp_of(cache.bind(reference.flash_attention, mask="causal"), len(arrays))
        cotangent = normal(*q.shape).astype(dtype)
        assert_accurate(ours, exact, [*arrays, cotangent], factor=GRADIENT_FACTOR, float32_tolerance=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("format", [AFFINE4, *FLOAT_FORMATS], ids=str)
def test_gradients_through_lse_mask_and_sinks(format: Format):
    cache = cache_of((1, 2, 19, 64), mx.float32, format)
    arrays = [normal(1, 4, 7, 64), normal(1, 1, 7, 19), normal(4)]

    def loss(attention: Callable[..., Any]) -> Callable[..., mx.array]:
        def function(q: mx.array, mask: mx.array, sinks: mx.array) -> mx.array:
            out, lse = cache.bind(attention, mask=mask, sinks=sinks, return_lse=True)(q)
            return (out**2).sum() + (lse**2).sum()

        return function

    ours, wanted = (mx.grad(loss(f), argnums=(0, 1, 2))(*arrays) for f in (flash_attention, reference.flash_attention))
    for a, b in zip(ours, wanted, strict=True):
        assert max_error(a, b) <= 1e-5


def test_gradient_of_a_head_dim_without_backward_kernel():
    cache = cache_of((1, 1, 9, 512), mx.float32, AFFINE4)
    q = normal(1, 2, 1, 512)
    ours, wanted = (
        mx.grad(lambda x, f=f: (cache.bind(f)(x) ** 2).sum())(q) for f in (flash_attention, reference.flash_attention)
    )
    assert max_error(ours, wanted) <= 1e-5


@pytest.mark.parametrize("format", [AFFINE4, *FLOAT_FORMATS], ids=str)
def test_vmap_over_every_array(format: Format):
    """Each array alone, at its first and last axis; and all together."""
    single = cache_of((1, 2, 13, 64), mx.float32, format)
    arrays = [normal(1, 4, 3, 64), *single.k, *single.v]
    count = len(single.k)

    def function(q: mx.array, *parts: mx.array) -> mx.array:
        return flash_attention(q, parts[:count], parts[count:], mask="causal", **single.options)

    for axis in (0, -1):
        for mapped in (*([i] for i in range(len(arrays))), list(range(len(arrays)))):
            axes = [axis if i in mapped else None for i in range(len(arrays))]
            batched = [
                x if a is None else mx.stack([x, mx.flip(x, -2)], axis=a) for x, a in zip(arrays, axes, strict=True)
            ]
            result = mx.vmap(function, in_axes=tuple(axes))(*batched)
            for i in range(2):
                element = [x if a is None else mx.take(x, i, axis=a) for x, a in zip(batched, axes, strict=True)]
                assert max_error(result[i], function(*element)) <= 1e-6


def test_no_gradient_in_codes():
    for format, index, text in (
        (AFFINE4, 0, "no gradient in the codes of k"),
        (FLOAT_FORMATS[0], 1, "no gradient in scales of k in mode 'mxfp4'"),
    ):
        cache = cache_of((1, 1, 5, 64), mx.float32, format)
        q = normal(1, 1, 2, 64)

        def function(x: mx.array, cache=cache, index=index, q=q) -> mx.array:
            parts = [*cache.k]
            parts[index] = x
            return flash_attention(q, parts, cache.v, **cache.options)

        with pytest.raises(ValueError, match=rf"^\[flash_attention\] {text}"):
            mx.vjp(function, [cache.k[index]], [normal(1, 1, 2, 64)])


# ---- errors ----------------------------------------------------------------------------------------------------------

Q = mx.zeros((1, 2, 3, 64))
KV = tuple(mx.quantize(mx.zeros((1, 2, 5, 64))))


@pytest.mark.parametrize(
    ("k", "v", "options", "error", "message"),
    [
        (KV, Q, {}, ValueError, "k is quantized and v is an array; allowed: both, or neither"),
        (Q, KV, {}, ValueError, "v is quantized and k is an array; allowed: both, or neither"),
        (KV, None, {}, TypeError, "v is a NoneType; allowed: mlx.core.array"),
        (Q, Q, {"kv_bits": 4}, ValueError, "kv_bits is 4, but k and v are arrays; allowed: "),
        (Q, Q, {"kv_group_size": 64}, ValueError, "kv_group_size is 64, but k and v are arrays"),
        (Q, Q, {"kv_mode": "mxfp4"}, ValueError, "kv_mode is 'mxfp4', but k and v are arrays"),
        (KV, KV, {"kv_bits": 7}, ValueError, "kv_bits is 7; allowed in mode 'affine': 2, 3, 4, 5, 6, 8"),
        (KV, KV, {"kv_bits": (4, 9)}, ValueError, "kv_bits is 9; allowed in mode 'affine'"),
        (KV, KV, {"kv_bits": (4, 4, 4)}, ValueError, "kv_bits has 3 entries; allowed: None, an int, or a pair"),
        (KV, KV, {"kv_bits": (4, "x")}, TypeError, "kv_bits is a str; allowed: "),
        (KV, KV, {"kv_group_size": 16}, ValueError, "kv_group_size is 16; allowed in mode 'affine': 32, 64, 128"),
        (KV, KV, {"kv_mode": "int4"}, ValueError, "kv_mode is 'int4'; allowed: 'affine', 'mxfp4', 'mxfp8', 'nvfp4'"),
        (KV, KV, {"kv_bits": 8}, ValueError, "k w has shape .* and k scales has shape .*allowed with bits 8"),
        (KV, KV[:2], {}, ValueError, "v biases is None; mode 'affine' needs an array"),
        (KV, KV, {"kv_mode": "mxfp4"}, ValueError, "k biases is an array; mode 'mxfp4' allows None only"),
        (KV[:1], KV, {}, ValueError, r"k has 1 entries; allowed: \(w, scales\) or \(w, scales, biases\)"),
        (
            tuple(mx.quantize(mx.zeros((1, 2, 5, 128)))),
            KV,
            {},
            ValueError,
            "q has shape .* and k has shape .*one head_dim",
        ),
        (
            KV,
            tuple(mx.quantize(mx.zeros((1, 2, 6, 64)))),
            {},
            ValueError,
            "k has shape .* and v has shape .*same length",
        ),
        (tuple(mx.quantize(mx.zeros((2, 5, 64)))), KV, {}, ValueError, r"k has shape \(2, 5, 64\); allowed: rank 4"),
        ((KV[0].astype(mx.int32), *KV[1:]), KV, {}, ValueError, "k w has dtype int32; allowed: uint32"),
        ((KV[0], KV[1].astype(mx.int32), KV[2]), KV, {}, ValueError, "k scales has dtype int32; allowed: float32"),
    ],
    ids=str,
)
@pytest.mark.cpu_only
def test_bad_arguments(k: Any, v: Any, options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=rf"^\[flash_attention\] {message}"):
        flash_attention(Q, k, v, **options)


@pytest.mark.cpu_only
def test_dtype_of_the_result():
    for q, numbers, expected in (
        (mx.float16, mx.float16, mx.float16),
        (mx.bfloat16, mx.float32, mx.float32),
        (mx.float32, mx.bfloat16, mx.float32),
    ):
        cache = cache_of((1, 2, 5, 64), numbers, AFFINE4)
        assert flash_attention(Q.astype(q), cache.k, cache.v).dtype == expected
        check(normal(1, 2, 3, 64).astype(q).astype(expected), cache)
    cache = cache_of((1, 2, 5, 64), mx.float32, FLOAT_FORMATS[0])
    assert flash_attention(Q.astype(mx.float16), cache.k, cache.v, kv_mode="mxfp4").dtype == mx.float16
