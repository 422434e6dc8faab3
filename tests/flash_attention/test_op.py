"""Tests of flash_attention beyond the contract: head dims, features, head layouts and dtypes against NumPy in
float64."""

import itertools
import zlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import flash_attention
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, to_numpy
from tests.flash_attention.cases import (
    FEATURES,
    FLOAT32_TOLERANCE,
    OUTPUT_FACTOR,
    assert_close,
    check,
    draw,
    error_of,
    gradients_of,
)
from tests.flash_attention.formulas import ROUNDING, attention

HEAD_DIMS = (32, 40, 64, 72, 80, 96, 111, 128, 192, 256)
HEADS = ((4, 4), (4, 2), (3, 1))  # multi-head, grouped-query, multi-query
LENGTHS = (1, 2, 5, 33, 47, 97, 113, 128, 203, 777, 1031)
SIMULATED_LENGTHS = LENGTHS[:6]


def pick(choices: tuple[Any, ...], *key: object) -> Any:
    """One of ``choices``, fixed for a test, so that over all tests each is used."""
    return choices[zlib.crc32(repr(key).encode()) % len(choices)]


def lengths_for(*key: object) -> tuple[int, int]:
    lengths = SIMULATED_LENGTHS if support.backend == "simulator" else LENGTHS
    return pick(lengths, "q", *key), pick(lengths, "kv", *key)


# ---- values ----------------------------------------------------------------------------------------------------------

MATRIX = list(itertools.product(HEAD_DIMS, FEATURES, DTYPES))


@pytest.mark.parametrize(("dim", "feature", "dtype"), MATRIX, ids=str)
def test_matrix(dim: int, feature: str, dtype: mx.Dtype):
    """Forward and all gradients, with alternating heads and lengths."""
    key = (dim, feature, str(dtype))
    if support.backend == "simulator" and dim != 64 and feature != pick(FEATURES, dim, str(dtype)):
        pytest.skip("the simulator has every feature at head_dim 64, and one feature at every other")
    check(draw(pick(HEADS, *key), lengths_for(*key), (dim, dim), dtype, feature))


@pytest.mark.cpu_only
@pytest.mark.parametrize("lengths", list(itertools.product(LENGTHS, LENGTHS)), ids=str)
def test_lengths(lengths: tuple[int, int]):
    """Every pair of lengths, with varying features and dtypes."""
    feature, dtype, heads = pick(FEATURES, "f", lengths), pick(DTYPES, "d", lengths), pick(HEADS, "h", lengths)
    check(draw(heads, lengths, (64, 64), dtype, feature))


@pytest.mark.parametrize("dims", [(192, 128), (128, 192), (64, 96), (1, 1), (3, 17), (255, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_v_of_another_dim(dims: tuple[int, int], dtype: mx.Dtype):
    check(draw((4, 2), (37, 70), dims, dtype, "causal", batch=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [257, 400, 512])
@pytest.mark.parametrize("q_len", [1, 8])
def test_decode_of_large_heads(q_len: int, dim: int, dtype: mx.Dtype):
    case = draw((4, 2), (q_len, 97), (dim, dim), dtype, "causal")
    with mlx_anvil.strict():
        out = flash_attention(case.q, case.k, case.v, mask="causal")
        mx.eval(out)
    rounding = ROUNDING.get(dtype)
    composed = case.reference(round_to=rounding).out if rounding else None
    assert_close("out", out, case.reference().out, composed, OUTPUT_FACTOR)


@pytest.mark.alike("dtype")
@pytest.mark.parametrize("q_len", [1, 3, 8])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(q_len: int, heads: tuple[int, int], dtype: mx.Dtype):
    """Few queries, many keys: the keys are split among threads and threadgroups."""
    kv_len = 1500 if support.backend == "simulator" else 5003
    for feature in ("causal", "window+causal", "sinks"):
        check(draw(heads, (q_len, kv_len), (128, 128), dtype, feature))


@pytest.mark.cpu_only
def test_long_rows():
    case = draw((1, 1), (1, 65536), (64, 64), mx.float32)
    check(case)
    check(draw((1, 1), (9, 65536), (64, 64), mx.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(dtype: mx.Dtype):
    """Scores up to 1e4, where exp overflows unless the row's maximum is subtracted."""
    case = draw((2, 2), (33, 97), (64, 64), dtype)
    factor = float(np.sqrt(1e4 / np.abs(to_numpy(case.q) @ to_numpy(case.k).swapaxes(-1, -2) / 8).max()))
    case.q, case.k = (case.q * factor).astype(dtype), (case.k * factor).astype(dtype)
    exact = case.reference()
    out, lse = flash_attention(case.q, case.k, case.v, return_lse=True)
    # Near 1e4 a float32 is right to about 1e-3, and exp makes that relative.
    assert error_of(lse, exact.lse) <= 1e-2
    assert error_of(out, exact.out) <= (5e-3 if dtype == mx.float32 else 2e-2)
    for name, gradient in gradients_of(case)[1].items():
        assert np.isfinite(to_numpy(gradient)).all(), name


@pytest.mark.parametrize("feature", ["none", "causal", "softcap", "additive mask", "sinks"])
def test_lse(feature: str):
    case = draw((4, 2), (33, 97), (64, 64), mx.float32, feature)
    d_lse = mx.random.normal((1, 4, 33))
    out, lse = flash_attention(case.q, case.k, case.v, return_lse=True, **case.options)
    exact = attention(case.q, case.k, case.v, case.d_out, d_lse, **case.options)
    assert lse.dtype == mx.float32
    assert_close("out", out, exact.out, None, 1)
    assert_close("lse", lse, exact.lse, None, 1)

    arrays = case.differentiable

    def of_arrays(*values: mx.array) -> list[mx.array]:
        given = {**case.options, **dict(zip(arrays, values, strict=True))}
        return list(flash_attention(given.pop("q"), given.pop("k"), given.pop("v"), return_lse=True, **given))

    _, gradients = mx.vjp(of_arrays, list(arrays.values()), [case.d_out, d_lse])
    for name, gradient in zip(arrays, gradients, strict=True):
        assert_close(f"gradient of {name}", gradient, exact.gradients[name], None, 1)


def test_lse_of_16_bit_inputs_is_float32():
    q = mx.random.normal((1, 1, 5, 8)).astype(mx.float16)
    assert flash_attention(q, q, q, return_lse=True)[1].dtype == mx.float32


@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_scale(scale: float):
    case = draw((2, 2), (13, 21), (16, 16), mx.float32)
    out = flash_attention(case.q, case.k, case.v, scale=scale)
    expected = mlx_anvil.reference.flash_attention(case.q, case.k, case.v, scale=scale)
    assert support.max_error(out, expected) <= FLOAT32_TOLERANCE


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(97,), (1, 97), (33, 1), (4, 1, 1), (2, 1, 1, 97), (1, 4, 33, 97), (2, 4, 33, 97), ()], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast(shape: tuple[int, ...], kind: str):
    case = draw((4, 2), (33, 97), (32, 32), mx.float32, batch=2)
    case.options["mask"] = mx.random.bernoulli(0.5, shape) if kind == "bool" else mx.random.normal(shape)
    check(case)


def test_features_combine():
    case = draw((4, 2), (33, 97), (32, 32), mx.float32, "additive mask", batch=2)
    case.options |= {"window_size": (20, 7), "softcap": 2.0, "sinks": mx.random.normal((4,)), "scale": 0.4}
    check(case)


def test_window_sizes():
    """An int counts the keys that a causal query sees, its own included, as mlx-lm's window_size does."""
    q = mx.random.normal((1, 2, 33, 16))
    k, v = mx.random.normal((1, 2, 40, 16)), mx.random.normal((1, 2, 40, 16))

    def attend(**options: Any) -> mx.array:
        return flash_attention(q, k, v, **options)

    assert_same_bits(attend(window_size=5), attend(window_size=(4, 4)))
    assert_same_bits(attend(window_size=5, mask="causal"), attend(window_size=(4, 0)))
    assert_same_bits(attend(window_size=-1), attend())
    assert_same_bits(attend(window_size=(-1, 0)), attend(mask="causal"))
    assert_same_bits(attend(window_size=10**12), attend())
    position = mx.arange(7, 40)[:, None]
    mask = (mx.arange(40) <= position) & (mx.arange(40) > position - 5)
    assert support.max_error(attend(window_size=5, mask="causal"), attend(mask=mask)) <= 1e-6


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive", "causal", "window", "no keys"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(kind: str, with_sinks: bool, dtype: mx.Dtype):
    lengths = {"causal": (40, 21), "window": (40, 9), "no keys": (40, 0)}.get(kind, (40, 70))
    case = draw((4, 2), lengths, (64, 64), dtype, "sinks" if with_sinks else "none")
    visible = np.ones(lengths, bool)
    if kind in ("bool", "additive"):
        visible[3] = visible[17:35] = False
        mask = mx.array(visible)
        case.options["mask"] = mask if kind == "bool" else mx.where(mask, 0.0, -mx.inf).astype(dtype)
    if kind == "causal":
        case.options["mask"] = "causal"
        visible[:19] = False
    if kind == "window":
        case.options["window_size"] = (2, 2)
        visible[:29] = False
    if kind == "no keys":
        visible = np.zeros((40, 1), bool)
    empty = ~visible.any(axis=1)
    assert empty.any()
    out, gradients = gradients_of(case)
    _, lse = flash_attention(case.q, case.k, case.v, return_lse=True, **case.options)
    assert (to_numpy(out)[:, :, empty] == 0).all()
    assert (to_numpy(gradients["q"])[:, :, empty] == 0).all()
    expected = to_numpy(case.options["sinks"])[:, None] if with_sinks else -np.inf
    np.testing.assert_allclose(to_numpy(lse)[0][:, empty], np.broadcast_to(expected, (4, empty.sum())), rtol=1e-6)
    check(case)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_drop_in_for_mlx(mask: str, with_sinks: bool):
    case = draw((4, 2), (33, 97), (64, 64), mx.float32, "sinks" if with_sinks else "none", batch=2)
    options = dict(case.options)
    if mask == "causal":
        options["mask"] = "causal"
    if mask == "bool":
        options["mask"] = mx.random.bernoulli(0.5, (33, 97))
    if mask == "additive":
        options["mask"] = mx.random.normal((4, 33, 97))
    ours = flash_attention(case.q, case.k, case.v, scale=0.2, **options)
    theirs = mx.fast.scaled_dot_product_attention(case.q, case.k, case.v, scale=0.2, **options)
    assert support.max_error(ours, theirs) <= FLOAT32_TOLERANCE


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_views_of_a_model():
    """Heads inside rows, as a projection produces them. The result and the gradients have the same layout."""
    batch, length, dim = 2, 37, 64
    states = [mx.random.normal((batch, length, heads, dim)) for heads in (4, 2, 2)]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in states)
    d_out = mx.random.normal((batch, 4, length, dim))
    dense = [mx.contiguous(x) for x in (q, k, v)]
    out, gradients = mx.vjp(flash_attention, [q, k, v], [d_out])
    expected, expected_gradients = mx.vjp(flash_attention, dense, [d_out])
    for ours, want in zip([*out, *gradients], [*expected, *expected_gradients], strict=True):
        assert_same_bits(ours, want)
    with mlx_anvil.trace():
        mx.eval(out, gradients)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(flash_attention(q, k, v).transpose(0, 2, 1, 3).reshape(batch, length, -1))
    # One output and no copy of it.
    assert mx.get_peak_memory() - before < 1.5 * out[0].nbytes


def test_slices_of_a_cache():
    cache_k, cache_v = (mx.random.normal((2, 2, 256, 64)) for _ in range(2))
    q = mx.random.normal((2, 4, 1, 64))
    k, v = cache_k[:, :, 16:113], cache_v[:, :, 16:113]
    assert_same_bits(flash_attention(q, k, v), flash_attention(q, mx.contiguous(k), mx.contiguous(v)))


@pytest.mark.parametrize("q_len", [1, 2, 5, 33])
@pytest.mark.parametrize("dim", [64, 128])
def test_specialisations_give_the_same_bits(dim: int, q_len: int):
    """With and without the log-sum-exp that a gradient needs, and with columns that are not adjacent. Uses float32,
    where a different rounding would show."""
    case = draw((4, 2), (q_len, 97), (dim, dim), mx.float32, batch=4)
    plain = flash_attention(case.q, case.k, case.v)
    assert_same_bits(gradients_of(case)[0], plain)
    apart = (mx.repeat(x, 2, axis=-1)[..., ::2] for x in (case.q, case.k, case.v))
    assert_same_bits(flash_attention(*apart), plain)


@pytest.mark.cpu_only
def test_memory_grows_with_the_length_only():
    """Beyond the output and all gradients, a call takes less than 8 bytes for each query of each head."""
    heads, length, dim = 4, 2048, 64
    q, k, v = (mx.random.normal((1, heads, length, dim)) for _ in range(3))
    mask = mx.random.normal((length, length))
    mx.eval(q, k, v, mask)
    gradient = mx.grad(lambda *xs: flash_attention(*xs, mask=mask).square().sum(), argnums=(0, 1, 2))
    mx.eval(gradient(q, k, v))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    results = gradient(q, k, v)
    mx.eval(results)
    beyond = mx.get_peak_memory() - before - sum(x.nbytes for x in results)
    beyond -= 2 * q.nbytes  # the output and its gradient
    assert beyond < 8 * heads * length + 65536


# ---- routes ----------------------------------------------------------------------------------------------------------


def test_training_runs_each_kernel_once():
    case = draw((4, 2), (33, 97), (64, 64), mx.float32, "causal")
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        out, gradients = gradients_of(case)
        mx.eval(out, gradients)
    kernels = support.kernel_names(trace)
    # One kernel makes both gradients from stored weights, with another function constant.
    assert all("_sums_" in name for name in kernels if kernels.count(name) > 1)
    assert len({event.kernel for event in trace.events}) == len(kernels)
    assert sum("forward" in name for name in kernels) == 1
    assert any("backward" in name for name in kernels)


LARGE_DIMS = ((257, 257), (512, 512), (576, 512), (1024, 999))


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 9, 40])
@pytest.mark.parametrize("dims", LARGE_DIMS, ids=str)
def test_large_heads(dims: tuple[int, int], q_len: int, dtype: mx.Dtype):
    case = draw((4, 2), (q_len, 70), dims, dtype, "causal")
    with mlx_anvil.strict():
        check(case)


@pytest.mark.parametrize(("dim", "q_len"), [(1025, 9), (1200, 1)])
def test_larger_heads_fall_back_with_a_reason(dim: int, q_len: int):
    case = draw((2, 1), (q_len, 21), (dim, dim), mx.float32, "causal")
    with mlx_anvil.trace() as trace:
        check(case)
    assert "kernels for head dims up to " in str(trace)
    with mlx_anvil.strict(), pytest.raises(RuntimeError, match="kernels for head dims up to "):
        flash_attention(case.q, case.k, case.v)


def test_mixed_dtypes_promote():
    q, k, v = (mx.random.normal((1, 2, 9, 8)).astype(d) for d in (mx.float16, mx.float32, mx.bfloat16))
    assert flash_attention(q, k, v).dtype == mx.float32
    half = flash_attention(q, q, q, mask=mx.zeros((9, 9), mx.float16), sinks=mx.zeros((2,), mx.float16))
    assert half.dtype == mx.float16


def test_gradient_reaches_a_mask_through_a_threshold():
    """A bool mask that depends on a differentiated array passes no gradient."""
    q, k, v = (mx.random.normal((1, 1, 9, 8)) for _ in range(3))
    gradient = mx.grad(lambda t: flash_attention(q, k, v, mask=(mx.arange(9) < t)).sum())
    assert gradient(mx.array(5.0)).item() == 0
