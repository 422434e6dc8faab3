"""Tests of moe_permute and moe_combine beyond the contract: integers, ids out of range, dtypes, routes, errors."""

import math
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import moe_combine, moe_permute, reference
from mlx_anvil.reference import DTYPES
from support import (
    GRADIENT_FACTOR,
    OTHER_KERNEL,
    assert_accurate,
    assert_same_bits,
    kernel_names,
    max_error,
    normal,
    to_numpy,
    vjp_of,
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INTEGERS = (mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64)

# Tokens, experts of each, experts: around the bounds of kernels, and empty.
SIZES = ((1, 1, 1), (1, 8, 64), (5, 3, 7), (64, 4, 8), (37, 8, 300), (700, 2, 3), (130, 9, 128), (0, 2, 4), (3, 0, 5))
each_size = pytest.mark.parametrize(("tokens", "k", "experts"), SIZES)


def lazy(x: mx.array) -> mx.array:
    """The same values, which are not known yet."""
    return x + mx.zeros_like(x)


def random_ids(tokens: int, k: int, experts: int) -> mx.array:
    return mx.random.randint(-experts, experts, (tokens, k))


def assert_permuted(x: mx.array, ids: mx.array, experts: int) -> None:
    """By NumPy's stable sort; ids are clamped."""
    rows, offsets, order, inverse = moe_permute(x, ids, experts)
    flat = np.array(ids).reshape(-1).astype(object)
    expert = np.clip([i + experts if i < 0 else i for i in flat], 0, experts - 1).astype(np.int64).reshape(-1)
    wanted = np.argsort(expert, kind="stable")
    np.testing.assert_array_equal(np.array(order), wanted)
    np.testing.assert_array_equal(np.array(inverse).reshape(-1)[wanted], np.arange(flat.size))
    np.testing.assert_array_equal(np.array(offsets), np.searchsorted(expert[wanted], np.arange(experts + 1)))
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    assert rows.shape == (flat.size, x.shape[-1])
    if flat.size:
        assert_same_bits(rows, tokens[mx.array(wanted // ids.shape[-1])])
    assert (offsets.dtype, order.dtype, inverse.dtype) == (mx.int32,) * 3
    assert inverse.shape == ids.shape


# ---- moe_permute -----------------------------------------------------------------------------------------------------


@each_size
@each_dtype
def test_sort(tokens, k, experts, dtype):
    for columns in (1, 33, 64):
        assert_permuted(normal(tokens, columns, dtype=dtype), random_ids(tokens, k, experts), experts)


def test_all_pairs_of_one_expert():
    assert_permuted(normal(300, 5), mx.full((300, 4), 2), 9)


def test_axes_of_tokens():
    x, ids = normal(2, 3, 4, 5), random_ids(24, 2, 6).reshape(2, 3, 4, 2)
    assert_permuted(x, ids, 6)
    assert_permuted(x[0, 0, 0], ids[0, 0, 0], 6)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_dtypes_of_ids(dtype):
    ids = mx.random.randint(0, 9, (20, 3))
    if mx.issubdtype(dtype, mx.signedinteger):
        ids = ids - 4
    assert_permuted(normal(20, 4), ids.astype(dtype), 9)


@pytest.mark.parametrize("dtype", INTEGERS[2:4] + INTEGERS[6:], ids=str)
def test_ids_out_of_range_clamp_or_raise(dtype):
    """Far ones too, whose low halves are ids."""
    info = np.iinfo(str(dtype).split(".")[-1])
    bad = [info.min, info.max, info.max - 1, 9, 2**31, 2**32 + 1, -(2**32) + 1, -10]
    x = normal(len(bad), 4)
    given = mx.array(np.array([[i if info.min <= i <= info.max else 0] for i in bad], info.dtype))
    # A clamped uint32 is not one that counts from the end.
    assert_permuted(x, lazy(given), 9)
    if mx.default_device() == mx.cpu:
        with pytest.raises(ValueError, match=r"^\[moe_permute\] ids has .* and num_experts is 9; allowed: -9 to 8\."):
            moe_permute(x, given, 9)


def test_more_experts_than_kernels_take():
    x, ids = normal(9, 3), random_ids(9, 2, 5000)
    with mlx_anvil.trace() as trace:
        mx.eval(moe_permute(x, ids, 5000))
    assert "at most 4096 experts" in trace.fallbacks[0].reason
    assert_permuted(x, ids, 5000)


def test_more_experts_than_pairs():
    assert_permuted(normal(3, 3), random_ids(3, 2, 4096), 4096)


# ---- moe_combine -----------------------------------------------------------------------------------------------------

TERMS = ("residual", "shared", "shared_gate")
SUBSETS = [(), ("residual",), ("shared",), ("shared", "shared_gate"), TERMS]


def combine_arrays(tokens: int, k: int, columns: int, terms, dtype=mx.float32, factors=None) -> dict[str, mx.array]:
    factors = factors or dtype
    shapes = {"residual": (tokens, columns), "shared": (tokens, columns), "shared_gate": (tokens, 1)}
    arrays = {"y": normal(tokens * k, columns, dtype=dtype), "weights": normal(tokens, k, dtype=factors)}
    of = {"shared_gate": factors}
    return arrays | {name: normal(*shapes[name], dtype=of.get(name, dtype)) for name in terms}


def permutation(*shape: int) -> mx.array:
    return mx.random.permutation(math.prod(shape)).astype(mx.int32).reshape(shape)


@pytest.mark.parametrize("terms", SUBSETS, ids="+".join)
@pytest.mark.parametrize(("tokens", "k", "columns"), [(1, 1, 1), (3, 2, 33), (9, 8, 128), (2, 17, 1100), (4, 0, 6)])
@pytest.mark.parametrize("weighted", [True, False])
@each_dtype
def test_sums_and_gradients(tokens, k, columns, terms, weighted, dtype):
    arrays = combine_arrays(tokens, k, columns, terms, dtype)
    if not weighted:
        arrays.pop("weights")
    inverse, names = permutation(tokens, k), list(arrays)

    def of(function):
        return lambda *xs: function(**({"weights": None} | dict(zip(names, xs, strict=True))), inverse=inverse)

    ours, definition = of(moe_combine), of(reference.moe_combine)
    values = list(arrays.values())
    assert_accurate(ours, definition, values)
    gradients = [vjp_of(f, len(values)) for f in (ours, definition)]
    assert_accurate(*gradients, [*values, normal(tokens, columns, dtype=dtype)], factor=GRADIENT_FACTOR)


@pytest.mark.parametrize(("dtype", "factors"), [*product(DTYPES[1:], DTYPES[:1]), *product(DTYPES[:1], DTYPES[1:])])
def test_factors_of_another_dtype(dtype, factors):
    """They do not change the dtype of the result, and have gradients of their own."""
    arrays = combine_arrays(7, 3, 40, TERMS, dtype, factors)
    inverse = permutation(7, 3)
    out = moe_combine(**arrays, inverse=inverse)
    assert out.dtype == dtype
    with mx.stream(mx.cpu):
        exact = reference.moe_combine(**{n: x.astype(mx.float64) for n, x in arrays.items()}, inverse=inverse)
    unit = {mx.float32: OTHER_KERNEL, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
    assert max_error(out, exact) <= unit[dtype]
    gradient = mx.grad(lambda w: moe_combine(**(arrays | {"weights": w}), inverse=inverse).astype(mx.float32).sum())
    assert gradient(arrays["weights"]).dtype == factors


def test_promotes_rows_only():
    arrays = combine_arrays(3, 2, 5, ("residual",), mx.bfloat16)
    arrays["residual"] = arrays["residual"].astype(mx.float32)
    assert moe_combine(**arrays, inverse=permutation(3, 2)).dtype == mx.float32


def test_axes_of_pairs():
    arrays = combine_arrays(24, 2, 5, TERMS)
    inverse = permutation(24, 2)
    wide = {name: x if name == "y" else x.reshape(2, 3, 4, -1) for name, x in arrays.items()}
    expected = moe_combine(**arrays, inverse=inverse)
    for places in (inverse.reshape(2, 3, 4, 2), inverse.flatten(), inverse.astype(mx.uint64).reshape(2, 3, 4, 2)):
        assert_same_bits(moe_combine(**wide, inverse=places), expected.reshape(2, 3, 4, 5))
    one = moe_combine(arrays["y"][:2], arrays["weights"][0], mx.array([1, 0]))
    assert one.shape == (5,)


def test_permute_and_combine_are_inverse():
    x, ids = normal(40, 16), random_ids(40, 4, 11)
    rows, _, _, inverse = moe_permute(x, ids, 11)
    assert max_error(moe_combine(rows, mx.full(ids.shape, 0.25), inverse), x) <= OTHER_KERNEL
    gradient = mx.grad(lambda x: (moe_permute(x, ids, 11)[0] ** 2).sum())(x)
    assert max_error(gradient, 8 * x) <= OTHER_KERNEL


def test_gate_far_from_zero():
    """The gradient has 1 - sigmoid without cancellation, and NaN stays."""
    gates = [20.0, -20.0, 95.0, -95.0, math.inf, -math.inf, math.nan]
    y, inverse = mx.zeros((7, 3)), mx.arange(7)[:, None]
    shared, gate = mx.ones((7, 3)), mx.array(gates)[:, None]
    out = to_numpy(moe_combine(y, None, inverse, shared=shared, shared_gate=gate))
    exact = [1 / (1 + math.exp(-g)) if g > -700 else 0.0 for g in gates[:-1]]
    np.testing.assert_allclose(out[:-1], np.repeat(exact, 3).reshape(-1, 3), rtol=1e-6, atol=1e-38)
    assert np.isnan(out[-1]).all()
    gradient = mx.grad(lambda g: moe_combine(y, None, inverse, shared=shared, shared_gate=g).sum())(gate)
    slopes = [3 * math.exp(-abs(g)) for g in gates[:2]]
    np.testing.assert_allclose(to_numpy(gradient)[:2, 0], slopes, rtol=1e-5)


# ---- routes ----------------------------------------------------------------------------------------------------------


def test_kernels_of_a_block():
    """A block of experts and its gradients fall back nowhere."""
    x, ids, weights = normal(6, 8), random_ids(6, 2, 4), normal(6, 2)

    def block(x, weights, residual):
        rows, _, _, inverse = moe_permute(x, ids, 4)
        return moe_combine(rows, weights, inverse, residual=residual)

    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        mx.eval(mx.vjp(block, [x, weights, x], [normal(6, 8)]))
    names = [name.split("_float32")[0] for name in kernel_names(trace)]
    # The sum over the pairs of a token is also the gradient of moe_permute.
    assert names.count("moe_combine") == 2
    assert names.count("moe_backward") == 1


def test_routes_through_ids():
    """Gradients reach the router's logits through the weights, and stop at its indices."""
    x, logits = normal(6, 8), normal(6, 5)

    def block(x, logits):
        weights, ids = mlx_anvil.softmax_topk(logits, 2)
        rows, _, _, inverse = moe_permute(x, ids, 5)
        return moe_combine(rows, weights, inverse)

    cotangent = normal(6, 8)
    _, (dx, d_logits) = mx.vjp(block, [x, logits], [cotangent])
    assert max_error(dx, cotangent) <= OTHER_KERNEL
    assert float(mx.abs(d_logits).max()) <= 1e-5  # the rows of a token are equal, so no expert is better
    _, (tangent,) = mx.jvp(block, [x, logits], [cotangent, logits])
    assert max_error(tangent, cotangent) <= OTHER_KERNEL


def test_vmap_is_one_kernel():
    x, ids = normal(3, 6, 8), mx.random.randint(0, 5, (3, 6, 2))
    permute = mx.vmap(lambda x, i: moe_permute(x, i, 5))
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        results = permute(x, ids)
        mx.eval(results)
    with mlx_anvil.trace() as of_one:
        singles = [moe_permute(x[i], ids[i], 5) for i in range(3)]
        mx.eval(singles)
    assert 3 * len(trace.kernels) == len(of_one.kernels)
    for number, result in enumerate(results):
        assert mx.array_equal(result, mx.stack([single[number] for single in singles]))


def test_nested_vmap():
    x, ids, weights = normal(2, 3, 6, 8), mx.random.randint(0, 5, (3, 6, 2)), normal(6, 2, 2)

    def block(x, ids, weights):
        rows, _, _, inverse = moe_permute(x, ids, 5)
        return moe_combine(rows, weights, inverse, residual=x)

    mapped = mx.vmap(mx.vmap(block, in_axes=(0, 0, None)), in_axes=(0, None, 2))(x, ids, weights)
    by_loop = [[block(x[i, j], ids[j], weights[..., i]) for j in range(3)] for i in range(2)]
    assert max_error(mapped, mx.stack([mx.stack(row) for row in by_loop])) <= OTHER_KERNEL


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "ids", "text"),
    [
        ((3, 4), (2, 2), r" and ids has shape \(2, 2\); allowed: \[\.\.\., columns\]"),
        ((3, 4), (3,), "allowed"),
        ((), (2,), "one axis or more"),
        ((4,), (), "one axis or more"),
    ],
)
def test_shapes_of_permute(x, ids, text):
    with pytest.raises(ValueError, match=rf"^\[moe_permute\] x has shape.*{text}"):
        moe_permute(mx.zeros(x), mx.zeros(ids, mx.int32), 4)


@pytest.mark.parametrize("experts", [0, -1, 2**31])
def test_number_of_experts(experts):
    with pytest.raises(ValueError, match=rf"^\[moe_permute\] num_experts is {experts}; allowed: from 1"):
        moe_permute(mx.zeros((3, 4)), mx.zeros((3, 1), mx.int32), experts)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bool_], ids=str)
def test_ids_are_integers(dtype):
    ids = mx.zeros((3, 1), dtype)
    with pytest.raises(TypeError, match=r"^\[moe_permute\] ids has dtype .*; allowed: an integer dtype\."):
        moe_permute(mx.zeros((3, 4)), ids, 2)
    with pytest.raises(TypeError, match=r"^\[moe_combine\] inverse has dtype .*; allowed: an integer dtype\."):
        moe_combine(mx.zeros((3, 4)), mx.zeros((3, 1)), ids)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"y": (6, 5, 1)}, r"y has shape \(6, 5, 1\); allowed: rank 2"),
        ({"y": (7, 5)}, r"y has shape \(7, 5\) and weights has shape \(3, 2\); allowed: as many rows of y"),
        ({"inverse": (2, 3)}, r"inverse has shape \(2, 3\) and weights has shape \(3, 2\); allowed: the shape of w"),
        ({"residual": (5,)}, r"residual has shape \(5,\); allowed: \(3, 5\)"),
        ({"shared": (3, 1)}, r"shared has shape \(3, 1\); allowed: \(3, 5\)"),
        ({"shared_gate": (3,)}, r"shared_gate has shape \(3,\); allowed: \(3, 1\)"),
        ({"shared": None}, r"shared_gate is given without shared"),
    ],
)
def test_shapes_of_combine(changed, text):
    shapes = {"y": (6, 5), "weights": (3, 2), "inverse": (3, 2), "residual": (3, 5), "shared": (3, 5)}
    shapes |= {"shared_gate": (3, 1)} | changed
    arrays = {
        n: None if s is None else mx.zeros(s, mx.int32 if n == "inverse" else mx.float32) for n, s in shapes.items()
    }
    arrays["inverse"] = lazy(arrays["inverse"])
    with pytest.raises(ValueError, match=rf"^\[moe_combine\] {text}"):
        moe_combine(**arrays)


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="the host does not read places on a GPU")
@pytest.mark.parametrize(("places", "text"), [([0, 1, 1], "1 twice"), ([0, 3, 1], "3"), ([0, -1, 1], "-1")])
def test_inverse_that_is_no_permutation(places, text):
    y, weights = normal(3, 4), normal(3, 1)
    allowed = r"; allowed: each number from 0 to 2 once\."
    with pytest.raises(ValueError, match=rf"^\[moe_combine\] inverse has {text}{allowed}"):
        moe_combine(y, weights, mx.array(places))
    clamped = mx.clip(mx.array(places), 0, 2)
    out = moe_combine(y, weights, lazy(mx.array(places)))
    assert max_error(out, y[clamped] * weights) <= OTHER_KERNEL


@pytest.mark.parametrize("name", ["weights", *TERMS])
def test_dtypes_of_terms(name):
    arrays = combine_arrays(3, 2, 5, TERMS)
    arrays[name] = arrays[name].astype(mx.int32)
    with pytest.raises(ValueError, match=rf"^\[moe_combine\] {name} has dtype int32; allowed: float32"):
        moe_combine(**arrays, inverse=permutation(3, 2))
