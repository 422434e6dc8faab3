"""Tests of kv_append beyond the contract: the bits of mx.quantize, places, pages, memory, derivatives, errors."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import reference
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, kernel_names, max_error

kv_append = mlx_anvil.kv_append

BATCH, HEADS, LENGTH, CAPACITY, DIM = 2, 3, 5, 17, 128
AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def draw(dtype: mx.Dtype, *shapes: tuple[int, ...]) -> list[mx.array]:
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    mx.eval(arrays)
    return arrays


def tokens_and_caches(dtype: mx.Dtype = mx.float32, length: int = LENGTH) -> list[mx.array]:
    return draw(dtype, *[(BATCH, HEADS, rows, DIM) for rows in (length, length, CAPACITY, CAPACITY)])


def assert_all_same(ours, expected) -> None:
    for side, wanted in zip(ours, expected, strict=True):
        pairs = [(side, wanted)] if isinstance(side, mx.array) else zip(side, wanted, strict=True)
        for a, b in pairs:
            assert_same_bits(a, b)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only  # MLX's GPU kernels round ties differently: test_quantizes_as_mlx_on_metal
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_has_the_bits_of_rope_quantize_and_slice_updates(mode, bits, group, dtype):
    k, v, *caches = tokens_and_caches(dtype)
    options = {"kv_mode": mode, "kv_bits": bits, "kv_group_size": group}
    for rope in (None, {"dims": 128}, {"dims": 64, "traditional": True, "base": 500.0}):
        keys = k if rope is None else mlx_anvil.rope(k, offset=7, **rope)
        expected = []
        for cache, x in zip(caches, (keys, v), strict=True):
            parts = mx.quantize(cache, group, bits, mode=mode)
            for part, new in zip(parts, mx.quantize(x, group, bits, mode=mode), strict=True):
                part[:, :, 7 : 7 + LENGTH] = new
            expected.append(parts)
        given = [mx.quantize(x, group, bits, mode=mode) for x in caches]
        assert_all_same(kv_append(*given, k, v, offset=7, rope=rope, **options), expected)
        slots = mx.broadcast_to(mx.arange(7, 7 + LENGTH), (BATCH, LENGTH))
        with_offset = rope and {**rope, "offset": 7}
        assert_all_same(kv_append(*given, k, v, slots=slots, rope=with_offset, **options), expected)


@pytest.mark.cpu_only
def test_quantizes_groups_of_one_value_and_of_extremes():
    """Scales at their least, ranges of one sign, infinite scales."""
    rows = [[0.0] * 64, [1.0] * 64, [-3.0] * 64, [-5.0 - i for i in range(64)], [1e-9 * i for i in range(64)]]
    rows += [[3e38 * (-1) ** i for i in range(64)]]
    for dtype in (mx.float32, mx.bfloat16):
        x = mx.array(rows).astype(dtype)[None, None]
        cache = mx.quantize(mx.zeros_like(x), 64, 4)
        expected = mx.quantize(x, 64, 4)
        for side in kv_append(cache, cache, x, x, offset=0, kv_bits=4):
            for a, b in zip(side, expected, strict=True):
                assert_same_bits(a[..., :5, :], b[..., :5, :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantizes_as_mlx_on_metal(bits, dtype):
    """In the simulator: affine_quantize of mlx/backend/metal/kernels/quantized.h, whose maximum starts at 0."""
    k, v, *caches = tokens_and_caches(dtype)
    given = [mx.quantize(x, 32, bits) for x in caches]
    mx.eval(given)
    with mx.stream(mx.cpu), mlx_anvil.simulate():
        ours = kv_append(*given, k, v, offset=2, kv_group_size=32, kv_bits=bits)
        mx.eval(ours)
    for side, x in zip(ours, (k, v), strict=True):
        codes, scales, biases = quantized_as_on_metal(np.array(x.astype(mx.float32)), bits)
        written = [part[:, :, 2 : 2 + LENGTH] for part in side]
        for number, want in zip(written[1:], (scales, biases), strict=True):
            assert_same_bits(number, mx.array(want).astype(dtype))
        bytes_ = np.array(mx.contiguous(written[0]).view(mx.uint8)).reshape(*codes.shape[:-1], -1)
        stream = np.unpackbits(bytes_, axis=-1, bitorder="little").reshape(*codes.shape, bits)
        assert ((stream * (1 << np.arange(bits))).sum(-1) == codes).all()


def quantized_as_on_metal(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def rounded(y):  # half away from zero
        return np.trunc(y) + np.where(np.abs(y - np.trunc(y)) >= 0.5, np.sign(y), 0).astype(np.float32)

    groups = x.reshape(*x.shape[:-1], -1, 32)
    low, high = groups.min(-1), np.maximum(groups.max(-1), np.float32(0))
    most = np.float32(2**bits - 1)
    scale = np.maximum((high - low) / most, np.float32(1e-7))
    is_low = np.abs(low) > np.abs(high)
    scale, edge = np.where(is_low, scale, -scale), np.where(is_low, low, high)
    code = rounded(edge / scale)
    bias = np.where(code == 0, np.float32(0), edge)
    scale = np.where(code == 0, scale, edge / np.where(code == 0, np.float32(1), code))
    codes = np.clip(rounded((groups - bias[..., None]) / scale[..., None]), 0, most).astype(np.int64)
    return codes.reshape(x.shape), scale, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
def test_plain_caches_are_those_of_rope_and_cache(traditional, dtype):
    k, v, *caches = tokens_and_caches(dtype)
    freqs = mx.random.uniform(1.0, 100.0, (32,))
    for given in ({"base": 500.0}, {"base": None, "freqs": freqs}):
        for offset in (4, mx.array(3), mx.array([1, 11], mx.int64), mx.array([12, 0], mx.uint8)):
            rope = {"dims": 64, "traditional": traditional, "scale": 0.5, **given}
            expected = mlx_anvil.rope_and_cache(k, k, v, *caches, offset=offset, **rope)[1:]
            assert_all_same(kv_append(*caches, k, v, offset=offset, rope=rope), expected)


def test_keys_and_values_of_unlike_formats_and_head_dims():
    k, v = draw(mx.float32, (1, 2, 3, 64), (1, 2, 3, 128))
    caches = [mx.quantize(mx.zeros((1, 2, 9, x.shape[-1])), 64, bits) for x, bits in ((k, 8), (v, 3))]
    ours = kv_append(*caches, k, v, offset=5, kv_bits=(8, 3))
    for side, x, bits in zip(ours, (k, v), (8, 3), strict=True):
        back = mx.dequantize(*[part[:, :, 5:8] for part in side], 64, bits)
        assert max_error(back, mx.dequantize(*mx.quantize(x, 64, bits), 64, bits)) <= 1e-6


@pytest.mark.parametrize("step", [1, 2])
def test_views_of_tokens(step):
    wide, v, *caches = tokens_and_caches(mx.float16, LENGTH)
    k = mx.repeat(wide, step, axis=3)[..., ::step].swapaxes(1, 2).swapaxes(1, 2)
    given = [mx.quantize(x) for x in caches]
    expected = kv_append(*given, mx.contiguous(k), v, offset=1, rope={"dims": 32}, kv_bits=4)
    assert_all_same(kv_append(*given, k, v, offset=1, rope={"dims": 32}, kv_bits=4), expected)
    assert_all_same(kv_append(*given, v, k, offset=1, kv_bits=4), kv_append(*given, v, wide, offset=1, kv_bits=4))


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True])
def test_pages(quantized):
    """Packed tokens of several sequences, each at its own position; pages in any order."""
    pages, page_size, tokens = 5, 4, 9
    k, v = draw(mx.float32, *[(1, HEADS, tokens, 64)] * 2)
    caches = draw(mx.float32, *[(pages, HEADS, page_size, 64)] * 2)
    slots = mx.array(np.random.default_rng(0).permutation(pages * page_size)[:tokens].astype("int32"))
    positions = mx.array(np.random.default_rng(1).integers(0, 10**6, tokens))
    options = {"slots": slots, "rope": {"dims": 64, "offset": positions}}
    if quantized:
        caches = [mx.quantize(x, 64, 4) for x in caches]
        options["kv_bits"] = 4
    expected = reference.kv_append(*caches, k, v, **options)
    ours = kv_append(*caches, k, v, **options)
    if quantized:
        sides = zip(ours, expected, strict=True)
        ours, expected = zip(*[(mx.dequantize(*a, 64, 4), mx.dequantize(*b, 64, 4)) for a, b in sides], strict=True)
        assert max(max_error(a, b) for a, b in zip(ours, expected, strict=True)) <= 0.5  # a code
    else:
        assert max(max_error(a, b) for a, b in zip(ours, expected, strict=True)) <= 1e-5


@pytest.mark.parametrize("way", ["kernel", "simulated", "composed"])
def test_the_last_token_of_a_row_is_written_and_rows_outside_are_not(way):
    """Also if the slots are not known at the call: never a write outside the cache."""
    k, v, *caches = tokens_and_caches()
    slots = mx.array([[3, 0, 3, -1, 3], [-(2**63), CAPACITY, 2**62, CAPACITY - 1, 5]], mx.int64)
    expected = reference.kv_append(*caches, k, v, slots=slots)
    with mx.stream(mx.cpu):
        unread = mx.where(mx.array(True), slots, slots)  # unevaluated
        if way == "kernel":
            ours = kv_append(*caches, k, v, slots=unread)
        else:
            with mlx_anvil.simulate() if way == "simulated" else mlx_anvil.composed():
                ours = kv_append(*caches, k, v, slots=unread)
                mx.eval(ours)
    assert_all_same(ours, expected)


@pytest.mark.parametrize("offset", [[-2, CAPACITY - 1], [-(2**63), 2**63 - 1]], ids=str)
def test_offsets_outside_the_cache_are_not_written(offset):
    k, v, *caches = tokens_and_caches()
    unread = mx.array(np.array(offset, "int64")) + mx.array(0, mx.int64)
    expected = reference.kv_append(*caches, k, v, offset=mx.array(np.array(offset, "int64")))
    assert_all_same(kv_append(*caches, k, v, offset=unread), expected)


# ---- memory ----------------------------------------------------------------------------------------------------------


def addresses(*arrays: mx.array) -> list[int]:
    mx.eval(arrays)
    return [np.array(x, copy=False).__array_interface__["data"][0] for x in arrays]


@pytest.mark.cpu_only  # NumPy sees the memory
@pytest.mark.parametrize("simulated", [False, True])
def test_caches_are_written_in_place(simulated):
    with mx.stream(mx.cpu):
        k, v, *plain = tokens_and_caches(mx.float32, 1)
        a, b = (tuple(x * 1 for x in mx.quantize(cache, 64, 4)) for cache in plain)
        before = addresses(*a, *b)
        for offset in range(3):
            if simulated:
                with mlx_anvil.simulate():
                    a, b = kv_append(a, b, k, v, offset=offset, kv_bits=4)
            else:
                a, b = kv_append(a, b, k, v, offset=offset, kv_bits=4)
            mx.eval(a, b)
        assert addresses(*a, *b) == before


def test_caches_that_others_need_are_copied():
    k, v, *caches = tokens_and_caches()
    kept = [x * 1 for x in caches]
    mx.eval(kept)
    mx.eval(kv_append(*caches, k, v, offset=3))
    assert_all_same(caches, kept)


# ---- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 3])
def test_derivatives_with_slots(pages):
    k, v, a, b = draw(mx.float32, (1, 2, 6, 8), (1, 2, 6, 8), (pages, 2, 5, 8), (pages, 2, 5, 8))
    slots = mx.array([[4, 0, 4, -1, 2, 5 * pages - 1]])
    options = {"slots": slots, "rope": {"dims": 6, "offset": 3}}
    results = []
    for op in (kv_append, reference.kv_append):
        outputs, gradients = mx.vjp(lambda *x, op=op: list(op(*x, **options)), [a, b, k, v], [b, a])
        tangents = mx.jvp(lambda *x, op=op: list(op(*x, **options)), [a, b, k, v], [b, a, v, k])[1]
        results.append([*outputs, *gradients, *tangents])
    for ours, expected in zip(*results, strict=True):
        assert max_error(ours, expected) <= 1e-5


def test_a_quantized_cache_has_no_derivative():
    k, v, *caches = tokens_and_caches()
    parts = [mx.quantize(x, 64, 4) for x in caches]

    def of_keys(k):
        return kv_append(*parts, k, v, offset=0, kv_bits=4)[0][1].sum()

    with pytest.raises(ValueError, match=r"^\[kv_append\] quantized caches have no derivative"):
        mx.eval(mx.grad(of_keys)(k))
    with pytest.raises(ValueError, match=r"^\[kv_append\] quantized caches have no derivative"):
        mx.eval(mx.jvp(of_keys, [k], [k]))


def test_vmap_and_shapeless_compile_of_a_quantized_cache():
    k, v, *caches = tokens_and_caches()
    parts = [mx.quantize(x, 64, 4) for x in caches]

    def scales(k, v, w, s, b):
        return kv_append((w, s, b), (w, s, b), k, v, offset=2, kv_bits=4)[0][1]

    arrays = (k, v, *parts[0])
    expected = scales(*arrays)
    assert_same_bits(mx.compile(scales, shapeless=True)(*arrays), expected)
    longer = [mx.concatenate([x, x], axis=0) for x in arrays]
    compiled = mx.compile(scales, shapeless=True)
    compiled(*arrays)
    assert_same_bits(compiled(*longer), scales(*longer))
    mapped = mx.vmap(scales)(*[x[:, None] for x in arrays])
    assert_same_bits(mapped[:, 0], expected)


def test_one_kernel():
    k, v, *caches = tokens_and_caches()
    parts = [mx.quantize(x, 64, 4) for x in caches]
    mx.eval(parts)
    with mlx_anvil.trace() as calls:
        mx.eval(kv_append(*parts, k, v, offset=0, rope={"dims": 64}, kv_bits=4))
    names = kernel_names(calls)
    assert [name for name in names if "copy" not in name] == ["kv_append_affine_float32"]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "offset and slots are None"),
        ({"offset": 0, "slots": mx.zeros((BATCH, LENGTH), mx.int32)}, "offset and slots are given"),
        ({"offset": -1}, "offset has -1"),
        ({"offset": CAPACITY - LENGTH + 1}, "offset has 13"),
        ({"offset": mx.array([0.5])}, "offset has dtype float32"),
        ({"offset": mx.array([1, 2, 3])}, r"offset has shape \(3,\)"),
        ({"slots": mx.zeros((LENGTH,), mx.int32)}, r"slots has shape \(5,\)"),
        ({"offset": 0, "rope": {"dims": 3}}, "dims is 3"),
        ({"offset": 0, "rope": {"dims": 256}}, "dims is 256"),
        ({"offset": 0, "rope": {}}, "rope has no 'dims'"),
        ({"offset": 0, "rope": {"dims": 2, "theta": 3}}, "rope has the key 'theta'"),
        ({"offset": 0, "kv_bits": 4}, "kv_bits is 4, but cache_k and cache_v are arrays"),
        ({"slots": mx.zeros((BATCH, LENGTH), mx.int32), "rope": {"dims": 4}}, "rope has no offset"),
    ],
)
def test_errors(options, text):
    k, v, *caches = tokens_and_caches()
    with pytest.raises(ValueError, match=rf"^\[kv_append\] {text}"):
        kv_append(*caches, k, v, **options)


@pytest.mark.cpu_only  # the host reads the array
def test_places_outside_the_cache_are_errors_if_they_are_known():
    k, v, *caches = tokens_and_caches()
    offsets, slots = mx.array([0, 13]), mx.full((BATCH, LENGTH), CAPACITY)
    mx.eval(offsets, slots)
    with pytest.raises(ValueError, match=r"^\[kv_append\] offset has 13"):
        kv_append(*caches, k, v, offset=offsets)
    with pytest.raises(ValueError, match=r"^\[kv_append\] slots has 17"):
        kv_append(*caches, k, v, slots=slots)


def test_errors_of_arrays():
    k, v, *caches = tokens_and_caches()
    parts = mx.quantize(caches[0], 64, 4)
    with pytest.raises(ValueError, match=r"^\[kv_append\] cache_v is quantized"):
        kv_append(caches[0], parts, k, v, offset=0)
    with pytest.raises(ValueError, match=r"^\[kv_append\] cache_k has dtype float32"):
        kv_append(*caches, k.astype(mx.float16), v.astype(mx.float16), offset=0)
    with pytest.raises(ValueError, match=r"^\[kv_append\] cache_k w has shape"):
        kv_append(parts, parts, k, v, offset=0, kv_bits=8)
    with pytest.raises(ValueError, match=r"^\[kv_append\] k has shape"):
        kv_append(*caches, k[:, :2], v[:, :2], offset=0)
    with pytest.raises(TypeError, match=r"^\[kv_append\] rope is a int"):
        kv_append(*caches, k, v, offset=0, rope=3)
