"""Tests of mla_decode beyond the contract: sizes, features, layouts, lengths, routes."""

import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import flash_attention, mla_decode
from mlx_anvil.reference import DTYPES
from support import OTHER_KERNEL, assert_same_bits, kernel_names, layouts, max_error, poison_memory, to_numpy
from tests.mla_decode.cases import ARRAYS, FEATURES, check_gradients, check_output, draw

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Around vectors and tiles of columns, and the sizes of models.
DIMS = ((1, 1), (5, 3), (8, 2), (31, 33), (64, 64), (72, 8), (129, 17), (256, 32), (511, 63), (512, 64))


@each_dtype
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_size(dims, dtype):
    check_output(draw(3, (2, 67), dims, dtype, "causal"))


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, dtype):
    case = draw(5, (3, 131), (72, 8), dtype, feature, batch=2)
    check_output(case)
    check_gradients(case)


@pytest.mark.parametrize(
    "rows", [(1, 1), (1, 7), (7, 1), (8, 2), (16, 1), (17, 1), (20, 3), (130, 1), (3, 40)], ids=str
)
def test_rows(rows):
    """Blocks of rows, which are heads times queries, with partial last ones."""
    heads, q_len = rows
    check_output(draw(heads, (q_len, 45), (40, 16), mx.float16, "causal"))


@each_dtype
@pytest.mark.parametrize("keys", [1, 2, 7, 8, 15, 16, 17, 63, 65, 300, 777])
def test_keys(keys, dtype):
    """Partial blocks of keys, and keys in parts."""
    check_output(draw(4, (1, keys), (64, 16), dtype, "sinks"))


@each_dtype
def test_layouts_give_the_same_bits(dtype):
    case = draw(4, (2, 300), (72, 24), dtype, "causal")
    expected = case.attend()
    for i in range(4):
        for name, moved in layouts(case.arrays[i]):
            arrays = [*case.arrays[:i], moved, *case.arrays[i + 1 :]]
            poison_memory(1 << 16)
            same = mla_decode(*arrays, **case.options)
            assert mx.array_equal(same, expected), (ARRAYS[i], name)


def test_slices_of_a_cache_are_not_copied():
    """As a model calls it: the cache is longer than its keys, and heads are inside the rows of the queries."""
    case = draw(4, (1, 200), (64, 16), mx.float16)
    cache = [mx.concatenate([x, mx.full(x.shape, math.nan, x.dtype)], axis=2)[:, :, :200] for x in case.arrays[2:]]
    inside = [mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in case.arrays[:2]]
    assert_same_bits(mla_decode(*inside, *cache, **case.options), case.attend())


@each_dtype
def test_scores_that_rise_and_fall(dtype):
    for step in (40.0, -40.0, 1.0):
        case = draw(3, (1, 300), (64, 16), dtype)
        case.q_rope = mx.ones_like(case.q_rope)
        rising = mx.linspace(0, step, 300)[:, None]
        case.k_rope = (mx.broadcast_to(rising, (300, 16)) / 2).astype(dtype)[None, None]
        check_output(case)


@each_dtype
def test_rows_that_see_nothing(dtype):
    case = draw(2, (3, 50), (64, 16), dtype)
    seen = np.ones((3, 50), bool)
    seen[1] = False
    seen[2, :49] = False
    case.options["mask"] = mx.array(seen)
    out, lse = case.attend(return_lse=True)
    assert not to_numpy(out)[:, :, 1].any()
    assert (to_numpy(lse)[:, :, 1] == -np.inf).all()
    only = mx.broadcast_to(case.latent[:, :, 49], (1, 2, 64))
    if support.backend == "cuda" and dtype == mx.float32:  # a product there is the sum of three
        assert max_error(out[:, :, 2], only) <= OTHER_KERNEL
    else:
        assert_same_bits(out[:, :, 2], only)
    gradients = mx.grad(lambda *x: mla_decode(*x, **case.options).sum(), argnums=(0, 1, 2, 3))(*case.arrays)
    assert not to_numpy(gradients[0])[:, :, 1].any()


@pytest.mark.parametrize("part", ARRAYS)
def test_what_is_no_number_stays_in_its_row(part):
    case = draw(2, (2, 77), (64, 16), mx.float32)
    x = getattr(case, part)
    for value in (math.nan, math.inf):
        spoilt = mx.array(x)
        spoilt[0, 0, 1, 3] = value
        out = to_numpy(mla_decode(*(spoilt if name == part else getattr(case, name) for name in ARRAYS), scale=0.1))
        if part.startswith("q"):
            assert not np.isfinite(out[0, 0, 1]).any()
            out = np.delete(out.reshape(4, 64), 1, axis=0)  # row 1 of head 0
        elif part == "latent":
            assert not np.isfinite(out).all()
            continue
        if part != "k_rope":
            assert np.isfinite(out).all()


@each_dtype
def test_lengths(dtype):
    """Each batch has the results of a call of its own, and padding none, even of NaN on the CPU."""
    lengths = [40, 1, 70, 0]
    case = draw(3, (2, 70), (64, 16), dtype, batch=4)
    out, lse = case.attend(mask="causal", lengths=mx.array(lengths), return_lse=True)
    for b, length in enumerate(lengths):
        own = [x[b : b + 1] for x in case.arrays[:2]] + [x[b : b + 1, :, :length] for x in case.arrays[2:]]
        expected, expected_lse = mla_decode(*own, scale=case.options["scale"], mask="causal", return_lse=True)
        assert max_error(out[b : b + 1], expected) < (1e-5 if dtype == mx.float32 else 2e-2)
        np.testing.assert_allclose(to_numpy(lse[b : b + 1]), to_numpy(expected_lse), atol=1e-4)
    mapped = mx.vmap(lambda *x: mla_decode(*x[:4], scale=case.options["scale"], mask="causal", lengths=x[4]))(
        *(x[:, None] for x in case.arrays), mx.array(lengths)[:, None]
    )
    assert max_error(mapped[:, 0], out) < (1e-5 if dtype == mx.float32 else 2e-2)


def test_equals_flash_attention_of_joined_keys():
    case = draw(4, (2, 90), (100, 28), mx.float32, "causal")
    q, k = (mx.concatenate(parts, axis=-1) for parts in (case.arrays[:2], case.arrays[2:]))
    expected = flash_attention(q, k, case.latent, **case.options)
    assert max_error(case.attend(), expected) < 1e-5


def test_same_bits_on_two_runs():
    case = draw(20, (2, 1500), (512, 64), mx.bfloat16, "causal")
    assert_same_bits(case.attend(), case.attend())


def test_routes():
    case = draw(2, (1, 9), (64, 16), mx.float32)
    with mlx_anvil.trace() as trace:
        mx.eval(case.attend())
    assert all(name.startswith(("mla_decode_", "flash_attention_decode_combine_")) for name in kernel_names(trace))
    assert not trace.fallbacks
    for dims in ((513, 16), (64, 65)):
        case = draw(2, (1, 9), dims, mx.float32)
        with mlx_anvil.trace() as trace:
            check_output(case)
        assert "ranks up to 512 and rope dims up to 64" in str(trace.fallbacks[0])


def test_as_a_model_calls_it():
    """DeepSeek-V3 in mlx-lm: scores of the rope parts are a mask, which holds a bool mask too."""
    dims, heads, keys = (64, 16), 4, 50
    case = draw(heads, (1, keys), dims, mx.float32)
    scale = 0.09
    seen = mx.random.bernoulli(0.7, (1, 1, 1, keys))
    rope_scores = (case.q_rope * scale) @ case.k_rope.swapaxes(-1, -2)
    rope_scores = mx.where(seen, rope_scores, mx.finfo(mx.float32).min)
    theirs = mx.fast.scaled_dot_product_attention(case.q_nope, case.latent, case.latent, scale=scale, mask=rope_scores)
    assert max_error(mla_decode(*case.arrays, scale=scale, mask=seen), theirs) < 1e-5


def test_heads_do_not_mix():
    case = draw(37, (1, 300), (64, 16), mx.float32)
    out = case.attend()
    for head in (0, 15, 16, 36):
        alone = mla_decode(*(x[:, head : head + 1] for x in case.arrays[:2]), *case.arrays[2:], **case.options)
        assert max_error(out[:, head : head + 1], alone) < 1e-5
