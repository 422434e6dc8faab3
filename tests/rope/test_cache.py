"""Tests of rope_and_cache beyond the contract: its definition in rope_qk and slice updates, memory, positions,
derivatives, errors."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _ext, reference
from mlx_anvil.reference import DTYPES
from support import assert_accurate, assert_same_bits, kernel_names, max_error, to_numpy, vjp_of

rope_and_cache, rope_qk = mlx_anvil.rope_and_cache, mlx_anvil.rope_qk

BATCH, Q_HEADS, KV_HEADS, CAPACITY = 2, 5, 2, 11


def draw(length: int, dim: int, dtype: mx.Dtype = mx.float32, q_heads: int = Q_HEADS) -> list[mx.array]:
    heads = ((q_heads, length), (KV_HEADS, length), (KV_HEADS, length), (KV_HEADS, CAPACITY), (KV_HEADS, CAPACITY))
    arrays = [mx.random.normal((BATCH, count, rows, dim)).astype(dtype) for count, rows in heads]
    mx.eval(arrays)
    return arrays


def in_steps(q, k, v, k_cache, v_cache, dims, *, offset=0, **options) -> list[mx.array]:
    """rope_qk, then a slice update of each batch row."""
    q, k = rope_qk(q, k, dims, offset=offset, **options)
    offsets = np.broadcast_to(np.array(offset), q.shape[:1])
    caches = []
    for cache, rows in ((k_cache, k), (v_cache, v)):
        result = mx.array(cache)
        for b, first in enumerate(offsets.tolist()):
            for i in range(q.shape[2]):
                if 0 <= first + i < cache.shape[2]:
                    result[b, :, first + i] = rows[b, :, i]
        caches.append(result)
    return [q, *caches]


def packed(q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, None, None]:
    return mx.concatenate([q, k, v], axis=1), None, None


def assert_all_same(ours, expected) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert_same_bits(a, b)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("dims", "dim"), [(64, 64), (32, 64), (10, 13), (2, 2), (66, 70)])
def test_is_rope_qk_and_slice_updates(dims, dim, traditional, dtype):
    """The same bits, for every way to give positions and frequencies."""
    freqs = mx.random.uniform(1.0, 100.0, (dims // 2,))
    for length, given in itertools.product((1, 3), (None, freqs)):
        for offset in (0, 4, CAPACITY - length, mx.array(2), mx.array([1, 6], mx.int64)):
            arrays = draw(length, dim, dtype)
            options = {"dims": dims, "traditional": traditional, "offset": offset, "freqs": given, "scale": 0.5}
            expected = in_steps(*arrays, **options)
            assert_all_same(rope_and_cache(*arrays, **options), expected)
            assert_all_same(rope_and_cache(*packed(*arrays[:3]), *arrays[3:], **options), expected)


@pytest.mark.parametrize(
    "offset", [[-2, CAPACITY - 1], [-3, CAPACITY], [-(2**31), 2**31 - 1], [-(2**63), 2**63 - 1]], ids=str
)
def test_positions_outside_the_cache_are_not_written(offset):
    arrays = draw(3, 16)
    offset = mx.array(np.array(offset, "int64"))
    for ours in (rope_and_cache(*arrays, 16, offset=offset), composed(*arrays, 16, offset=offset)):
        for result, expected in zip(ours[1:], in_steps(*arrays, 16, offset=offset)[1:], strict=True):
            assert max_error(result, expected) <= 1e-6
    assert_all_same(rope_and_cache(*arrays, 16, offset=offset), in_steps(*arrays, 16, offset=offset))


def composed(*arrays, **options):
    with mlx_anvil.composed():
        return rope_and_cache(*arrays, **options)


@pytest.mark.parametrize("length", [0, CAPACITY])
def test_no_token_and_a_full_cache(length):
    arrays = draw(length, 16)
    assert_all_same(rope_and_cache(*arrays, 16), in_steps(*arrays, 16))


def test_packed_heads_of_one_product_are_read_in_place():
    """A projection's result, seen as heads; the capacity is larger than a thread copies at once."""
    length, dim, heads = 3, 64, Q_HEADS + 2 * KV_HEADS
    rows = mx.random.normal((BATCH, length, heads * dim)).astype(mx.float16)
    qkv = rows.reshape(BATCH, length, heads, dim).swapaxes(1, 2)
    caches = [mx.random.normal((BATCH, KV_HEADS, 700, dim)).astype(mx.float16) for _ in range(2)]
    q, k, v = mx.split(qkv, [Q_HEADS, Q_HEADS + KV_HEADS], axis=1)
    results = rope_and_cache(qkv, None, None, *caches, dim, offset=600)
    assert_all_same(results, in_steps(q, k, v, *caches, dim, offset=600))


@pytest.mark.parametrize("step", [1, 2])
def test_caches_that_are_views(step):
    arrays = draw(2, 16)
    views = [mx.repeat(x, step, axis=2)[:, :, ::step] if step > 1 else x.swapaxes(1, 2).swapaxes(1, 2) for x in arrays]
    wide = mx.random.normal((BATCH, KV_HEADS, CAPACITY, 40))
    views[3] = wide[..., 3:19]
    arrays[3] = mx.contiguous(views[3])
    assert_all_same(rope_and_cache(*views, 16, offset=5), in_steps(*arrays, 16, offset=5))
    assert_same_bits(wide[..., 3:19], arrays[3])


# ---- memory ----------------------------------------------------------------------------------------------------------


def addresses(*arrays: mx.array) -> list[int]:
    mx.eval(arrays)
    return [np.array(x, copy=False).__array_interface__["data"][0] for x in arrays]


@pytest.mark.cpu_only  # NumPy sees the memory
@pytest.mark.parametrize("simulated", [False, True])
def test_caches_are_written_in_place(simulated):
    """If nothing else refers to them, token after token."""
    with mx.stream(mx.cpu):
        q, k, v, k_cache, v_cache = draw(1, 16)
        before, expected = addresses(k_cache, v_cache), [k_cache * 1, v_cache * 1]
        mx.eval(expected)
        for offset in range(4):
            rows = [x * (offset + 1) for x in (q, k, v)]
            if simulated:
                with mlx_anvil.simulate():
                    q_out, k_cache, v_cache = rope_and_cache(*rows, k_cache, v_cache, 16, offset=offset)
            else:
                q_out, k_cache, v_cache = rope_and_cache(*rows, k_cache, v_cache, 16, offset=offset)
            expected = in_steps(*rows, *expected, 16, offset=offset)[1:]
            mx.eval(q_out)
        assert addresses(k_cache, v_cache) == before
        for ours, want in zip((k_cache, v_cache), expected, strict=True):
            assert max_error(ours, want) <= 1e-6


@pytest.mark.parametrize("of", ["argument", "slice", "both caches"])
def test_caches_that_others_need_are_copied(of):
    arrays = draw(2, 16)
    kept = arrays[3] * 1
    mx.eval(kept)
    expected = in_steps(*arrays[:4], arrays[3] if of == "both caches" else arrays[4], 16, offset=3)
    mx.eval(expected)
    if of == "argument":
        other = arrays[3]
    elif of == "slice":
        other = arrays[3][:, :, :CAPACITY]
        mx.eval(other)
    else:
        arrays[4] = other = arrays[3]
    results = rope_and_cache(*arrays, 16, offset=3)
    assert_all_same(results, expected)
    assert_same_bits(other, kept)


def test_one_kernel():
    arrays = draw(3, 16)
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(rope_and_cache(*arrays, 16))
    assert kernel_names(trace) == ["rope_and_cache_float32"]


def by_definition(q, k, v, k_cache, v_cache, dims, offset) -> mx.array:
    """All results in a row, by the float64 definition of rope and concatenations of rows, batch row by batch row."""
    results = []
    for b, first in enumerate(np.broadcast_to(np.array(offset), q.shape[:1]).tolist()):
        begin, end = max(first, 0), min(first + q.shape[2], CAPACITY)
        q_b, k_b, v_b, *caches = (x[b : b + 1] for x in (q, k, v, k_cache, v_cache))
        results.append([reference.rope(q_b, dims, offset=first)])
        for rows, cache in zip((reference.rope(k_b, dims, offset=first), v_b), caches, strict=True):
            written = rows[:, :, begin - first : end - first]
            results[-1].append(mx.concatenate([cache[:, :, :begin], written, cache[:, :, end:]], axis=2))
    return mx.concatenate([mx.concatenate(x).flatten() for x in zip(*results, strict=True)])


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [2, mx.array([-1, 9])], ids=["inside", "partly outside"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients(is_packed, offset):
    q, k, v, *caches = draw(3, 14)
    arrays = [packed(q, k, v)[0], *caches] if is_packed else [q, k, v, *caches]

    def ours(*arrays):
        given = (arrays[0], None, None, *arrays[1:]) if is_packed else arrays
        return mx.concatenate([x.flatten() for x in rope_and_cache(*given, 10, offset=offset)])

    def exact(*arrays):
        heads = mx.split(arrays[0], [Q_HEADS, Q_HEADS + KV_HEADS], axis=1) if is_packed else arrays[:3]
        given = [*heads, *arrays[-2:]]
        return by_definition(*given, 10, offset=offset)

    cotangent = mx.random.normal(ours(*arrays).shape)
    assert_accurate(vjp_of(ours, len(arrays)), vjp_of(exact, len(arrays)), [*arrays, cotangent])


def test_gradients_launch_one_kernel():
    arrays = draw(3, 16)
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mx.grad(lambda *x: sum((y**2).sum() for y in rope_and_cache(*x, 16)), argnums=(0, 1, 2, 3, 4))(*arrays))
    assert kernel_names(trace) == ["rope_and_cache_float32", "rope_qk_float32"]


def test_gradient_in_freqs():
    arrays, freqs = draw(2, 12), mx.random.uniform(1.0, 9.0, (6,))

    def loss(function):
        def of(freqs):
            q, k_cache, _ = function(*arrays, 12, base=None, freqs=freqs, offset=4)
            return (q**3).sum() + (k_cache**3).sum()

        return mx.grad(of)(freqs)

    def by_definition(q, k, v, k_cache, v_cache, dims, offset, **options):
        q, k = rope_qk(q, k, dims, offset=offset, **options)
        return q, mx.concatenate([k_cache[:, :, :offset], k, k_cache[:, :, offset + 2 :]], axis=2), v_cache

    assert max_error(loss(rope_and_cache), loss(by_definition)) <= 1e-4


def test_decoding_step_compiled_once():
    step = mx.compile(lambda q, k, v, kc, vc, offset: rope_and_cache(q, k, v, kc, vc, 16, offset=offset))
    for position in range(3):
        arrays = draw(1, 16)
        assert_all_same(step(*arrays, mx.array(position)), in_steps(*arrays, 16, offset=position))


def test_vmap():
    arrays = [mx.stack(x) for x in zip(draw(2, 16), draw(2, 16), strict=True)]
    offset = mx.array([1, 7])
    results = mx.vmap(lambda o, *x: rope_and_cache(*x, 16, offset=o))(offset, *arrays)
    for i in range(2):
        expected = in_steps(*(x[i] for x in arrays), 16, offset=offset[i])
        for ours, want in zip(results, expected, strict=True):
            assert max_error(ours[i], want) <= 1e-6


def test_shapeless_graph_for_another_capacity():
    compiled = mx.compile(lambda q, k, v, kc, vc: rope_and_cache(q, k, v, kc, vc, 16, offset=3), shapeless=True)
    q, k, v, k_cache, v_cache = draw(2, 16)
    for caches in ([k_cache, v_cache], [x[:, :, :7] for x in (k_cache, v_cache)]):
        assert_all_same(compiled(q, k, v, *caches), in_steps(q, k, v, *caches, 16, offset=3))
    with pytest.raises(ValueError, match=r"^\[rope_and_cache\] offset is 3, q has shape .*; allowed: positions that"):
        mx.eval(compiled(q, k, v, k_cache[:, :, :4], v_cache[:, :, :4]))


# ---- bad input -------------------------------------------------------------------------------------------------------


def zeros(*shape: int) -> mx.array:
    return mx.zeros(shape)


Q, K, CACHE = zeros(2, 4, 3, 8), zeros(2, 2, 3, 8), zeros(2, 2, 9, 8)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"q": zeros(4, 3, 8)}, r"q has shape \(4, 3, 8\); allowed: rank 4, \[batch, heads, length, head_dim\]\."),
        ({"k": zeros(2, 3, 3, 8)}, r"q has shape .*, k has shape \(2, 3, 3, 8\); allowed: k and v with the batch"),
        ({"v": zeros(2, 2, 4, 8)}, r"q has shape .*, v has shape \(2, 2, 4, 8\); allowed: k and v with the batch"),
        (
            {"k": None, "v": None, "q": zeros(2, 3, 3, 8)},
            r"q has shape .*, k_cache .*; allowed: without k and v, q has",
        ),
        ({"k_cache": zeros(2, 2, 8)}, r"k_cache has shape \(2, 2, 8\); allowed: rank 4, \[batch, kv_heads, capacity"),
        (
            {"k_cache": zeros(1, 2, 9, 8)},
            r"q has shape .*, k_cache has .*; allowed: caches with the batch and head_dim",
        ),
        ({"v_cache": zeros(2, 2, 8, 8)}, r"k_cache has shape .*, v_cache has shape .*; allowed: one shape\."),
        (
            {"v_cache": mx.zeros((2, 2, 9, 8), mx.float16)},
            r"q has dtype float32, v_cache has dtype float16; allowed: one",
        ),
        ({"q": mx.zeros((2, 4, 3, 8), mx.int32)}, r"q has dtype int32; allowed: float32, float16, bfloat16\."),
        ({"dims": 10}, r"dims is 10 and q has shape \(2, 4, 3, 8\); allowed: dims up to the last axis\."),
        ({"dims": 3}, r"dims is 3; allowed: positive even numbers\."),
        (
            {"offset": -1},
            r"offset is -1, q has shape .*, k_cache has shape .*; allowed: positions that the caches have\.",
        ),
        (
            {"offset": 7},
            r"offset is 7, q has shape .*, k_cache has shape .*; allowed: positions that the caches have\.",
        ),
        ({"offset": mx.array([1, 2, 3])}, r"offset has shape \(3,\); allowed: a scalar, or shape \(2,\)"),
        ({"base": None}, r"base and freqs are None; allowed: one of them\."),
    ],
)
def test_bad_values(changed, text):
    arguments = {"q": Q, "k": K, "v": K, "k_cache": CACHE, "v_cache": CACHE, "dims": 8} | changed
    with pytest.raises(ValueError, match=r"^\[rope_and_cache\] " + text):
        rope_and_cache(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache"])
def test_bad_types(name):
    arguments = {"q": Q, "k": K, "v": K, "k_cache": CACHE, "v_cache": CACHE, "dims": 8} | {name: to_numpy(Q).tolist()}
    with pytest.raises(TypeError, match=rf"^\[rope_and_cache\] {name} is a list; allowed: mlx\.core\.array"):
        rope_and_cache(**arguments)


@pytest.mark.parametrize("name", ["k", "v"])
def test_one_of_k_and_v(name):
    arguments = {"q": Q, "k": K, "v": K, "k_cache": CACHE, "v_cache": CACHE, "dims": 8} | {name: None}
    text = rf"^\[rope_and_cache\] {name} is a NoneType; allowed: mlx\.core\.array, or None for both k and v\."
    with pytest.raises(TypeError, match=text):
        rope_and_cache(**arguments)


def test_no_gradient_in_offset():
    with pytest.raises(ValueError, match=r"^\[rope_and_cache\] offset has no gradient, because it counts positions\."):
        mx.vjp(lambda o: rope_and_cache(Q, K, K, CACHE, CACHE, 8, offset=o), [mx.array(1)], [Q, CACHE, CACHE])


# ---- one token of a patched model ------------------------------------------------------------------------------------


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["base", "freqs"])
def test_a_token(given, dtype):
    """q, k and v in the shapes of projections, and views of the caches."""
    rope = {"freqs": mx.random.uniform(1.0, 100.0, (8,)), "base": None} if given else {"traditional": True}
    for batch, offset in itertools.product((1, 2), (0, 4, CAPACITY - 1)):
        q, k, v, *caches = (x[:batch] for x in draw(1, 16, dtype))
        expected = rope_and_cache(q, k, v, *caches, 16, offset=offset, **rope)
        shapes = ((batch, 1, -1), (batch, 1, KV_HEADS, 16), (batch, KV_HEADS, 1, 16))
        arrays = [x.reshape(shape) for x, shape in zip((q, k, v), shapes, strict=True)]
        for heads in (arrays, [x.swapaxes(0, -1).swapaxes(0, -1) for x in arrays]):
            result = _ext._rope_and_cache_of_token(*heads, *caches, Q_HEADS, 16, offset=offset, **rope)
            rows = [cache[..., : offset + 1, :] for cache in expected[1:]]
            assert_all_same(result, [*expected, *rows])
            assert_all_same([2 * x for x in result[3:]], [2 * x for x in rows])


@pytest.mark.cpu_only
def test_a_token_reuses_the_memory_of_the_caches():
    caches = [mx.zeros((1, KV_HEADS, CAPACITY, 16)) for _ in range(2)]
    mx.eval(caches)
    addresses = [address_of(cache) for cache in caches]
    for offset in range(3):
        heads = [mx.random.normal((1, 1, count * 16)) for count in (Q_HEADS, KV_HEADS, KV_HEADS)]
        q, *caches, k, v = _ext._rope_and_cache_of_token(*heads, *caches, Q_HEADS, 16, offset=offset)
        mx.eval(q.sum() + k.sum() + v.sum())
        del k, v
        assert [address_of(cache) for cache in caches] == addresses


def address_of(x: mx.array) -> int:
    return np.asarray(memoryview(x)).__array_interface__["data"][0]


@pytest.mark.cpu_only
def test_a_token_that_is_left_to_the_op():
    q, k, v, *caches = draw(1, 16)

    def token(*arrays, heads=Q_HEADS, **options):
        return _ext._rope_and_cache_of_token(*arrays, heads, 16, **options)

    arrays = (q, k, v, *caches)
    assert token(*arrays) is not None
    assert token(*arrays, heads=Q_HEADS + 1) is None
    assert token(*arrays, offset=CAPACITY) is None
    assert token(*arrays, offset=mx.array(1)) is None
    assert token(q.astype(mx.float16), *arrays[1:]) is None
    assert token(q, k, v[:1], *caches) is None
    assert token(*draw(3, 16)) is None
    with mlx_anvil.composed():
        assert token(*arrays) is None
    traced = []
    mx.grad(lambda q: traced.append(token(q, *arrays[1:])) or q.sum())(q)
    assert traced == [None]
