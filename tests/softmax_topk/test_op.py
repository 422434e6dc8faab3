"""Tests of softmax_topk beyond the contract: indices, ties, non-finite logits, MLX's models, errors, routes."""

import math
from functools import partial
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import reference, softmax_topk
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
WAYS = [{"norm": norm, "scoring": scoring} for norm, scoring in product((True, False), ("softmax", "sigmoid"))]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['scoring']} {'normed' * way['norm']}".strip())

# Around vectors, what a lane holds, and the bounds between ways to choose.
SIZES = ((1, 1), (2, 1), (7, 7), (8, 2), (31, 5), (33, 32), (64, 8), (129, 33), (257, 10), (511, 64), (600, 9))


def best_of(logits: mx.array, k: int) -> np.ndarray:
    """Indices of the k largest logits of each row: NaN first, equal ones by index."""
    values = to_numpy(logits)
    keys = np.where(np.isnan(values), math.inf, values)
    order = np.lexsort((-keys, ~np.isnan(values)))
    return order[..., :k]


# ---- the choice ------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize(("experts", "k"), SIZES)
def test_every_size(experts, k, dtype):
    logits = normal(5, experts, dtype=dtype)
    weights, indices = softmax_topk(logits, k)
    assert (weights.dtype, indices.dtype) == (dtype, mx.uint32)
    np.testing.assert_array_equal(np.array(indices), best_of(logits, k))
    of_chosen = mx.softmax(mx.take_along_axis(logits.astype(mx.float32), indices, axis=-1), axis=-1)
    assert max_error(weights, of_chosen) <= {mx.float32: OTHER_KERNEL, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]


@pytest.mark.parametrize(("experts", "k"), SIZES)
def test_ties_go_to_the_lowest_index(experts, k):
    """Rows of three different numbers, of zeros of both signs, and of equal numbers."""
    few = mx.random.randint(-1, 2, (4, experts)).astype(mx.float32)
    zeros = mx.where(mx.random.bernoulli(0.5, (2, experts)), 0.0, -0.0)
    logits = mx.concatenate([few, zeros, mx.full((1, experts), -3.5)])
    weights, indices = softmax_topk(logits, k)
    np.testing.assert_array_equal(np.array(indices), best_of(logits, k))
    assert_same_bits(weights[4], weights[6])


@pytest.mark.parametrize("order", ["ascending", "descending", "strided"])
def test_rows_in_order(order):
    """All chosen experts may lie in one of the groups whose maxima give the bound."""
    values = np.arange(512, dtype=np.float32)
    logits = {"ascending": values, "descending": values[::-1], "strided": values.reshape(8, 64).T.reshape(-1)}[order]
    _, indices = softmax_topk(mx.array(logits[None].copy()), 12)
    np.testing.assert_array_equal(np.array(indices), best_of(mx.array(logits[None].copy()), 12))


@each_way
def test_order_of_indices(way):
    """The same experts and weights in another order, which the gradients follow."""
    logits = normal(6, 100)
    weights, indices = softmax_topk(logits, 40, **way)
    other_weights, other_indices = softmax_topk(logits, 40, sorted=False, **way)
    order = mx.argsort(indices, axis=-1)
    assert mx.array_equal(other_indices, mx.take_along_axis(indices, order, axis=-1))
    assert max_error(other_weights, mx.take_along_axis(weights, order, axis=-1)) <= OTHER_KERNEL
    cotangent = normal(6, 40)
    routers = [partial(softmax_topk, k=40, sorted=in_order, **way) for in_order in (True, False)]
    sorted_gradient, other_gradient = (
        vjp_of(lambda x, r=router: r(x)[0], 1)(logits, g)[0]
        for router, g in zip(routers, (cotangent, mx.take_along_axis(cotangent, order, axis=-1)), strict=True)
    )
    assert max_error(other_gradient, sorted_gradient) <= OTHER_KERNEL


# ---- weights and gradients -------------------------------------------------------------------------------------------


@each_dtype
@each_way
def test_of_normal_logits(way, dtype):
    """Weights of all magnitudes; the contract's logits are far apart."""
    for experts, k in ((8, 2), (130, 6), (600, 40)):
        logits, cotangent = normal(9, experts, dtype=dtype), normal(9, k, dtype=dtype)
        ours, definition = (lambda x, f=f, k=k: f(x, k, **way)[0] for f in (softmax_topk, reference.softmax_topk))
        assert_accurate(ours, definition, [logits])
        gradients = [vjp_of(f, 1) for f in (ours, definition)]
        assert_accurate(*gradients, [logits, cotangent], factor=GRADIENT_FACTOR)


def test_routers_of_models():
    """The routers of mlx-lm's models, whose argpartition leaves a row in any order."""
    logits = normal(50, 64)
    k = 6
    chosen = mx.sort(mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k], axis=-1)

    def of_chosen(x):
        return mx.take_along_axis(x, chosen, axis=-1)

    probabilities, sigmoids = of_chosen(mx.softmax(logits, axis=-1)), of_chosen(mx.sigmoid(logits))
    routers = {
        "softmax of the chosen": ({}, mx.softmax(of_chosen(logits), axis=-1)),
        "renormalised": ({}, probabilities / probabilities.sum(axis=-1, keepdims=True)),
        "softmax of all": ({"norm": False}, probabilities),
        "sigmoids": ({"scoring": "sigmoid"}, sigmoids / sigmoids.sum(axis=-1, keepdims=True)),
    }
    for options, expected in routers.values():
        weights, indices = softmax_topk(logits, k, sorted=False, **options)
        assert mx.array_equal(indices, chosen)
        assert max_error(weights, expected) <= OTHER_KERNEL


def test_logits_far_below_zero():
    """Sigmoids near zero keep their ratios."""
    logits = mx.array([[-95.0, -120.0, -94.0], [-1.0, -300.0, -200.0]])
    weights, indices = softmax_topk(logits, 2, scoring="sigmoid")
    assert np.array(indices).tolist() == [[2, 0], [0, 2]]
    ratio = math.exp(-1)
    np.testing.assert_allclose(np.array(weights), [[1 / (1 + ratio), ratio / (1 + ratio)], [1, 0]], rtol=1e-5)


@each_way
def test_not_finite(way):
    inf, nan = math.inf, math.nan
    rows = [[1, nan, inf, 0, -inf], [inf, 1, inf, 2, 3], [-inf] * 5, [nan, 0, nan, -inf, inf], [0, -inf, -inf, 1, 2]]
    logits = mx.array(rows)
    weights, indices = softmax_topk(logits, 3, **way)
    np.testing.assert_array_equal(np.array(indices), best_of(logits, 3))
    exact = to_numpy(reference.softmax_topk(logits, 3, **way)[0])
    np.testing.assert_allclose(to_numpy(weights), exact, rtol=1e-6)
    # The last row has no weight where it has no score, and a gradient all the same.
    gradient = mx.grad(lambda x: (softmax_topk(x, 3, **way)[0] * mx.array([1.0, 2.0, 3.0])).sum())(logits[4:])
    assert np.isfinite(np.array(gradient)).all()


@each_way
def test_jvp_and_vjp_agree(way):
    logits, tangent, cotangent = normal(20, 40), normal(20, 40), normal(20, 7)

    def weights(x):
        return softmax_topk(x, 7, **way)[0]

    forward = (mx.jvp(weights, [logits], [tangent])[1][0] * cotangent).sum()
    backward = (mx.vjp(weights, [logits], [cotangent])[1][0] * tangent).sum()
    scale = float(mx.abs(mx.vjp(weights, [logits], [cotangent])[1][0] * tangent).sum())
    assert abs(float(forward) - float(backward)) <= 1e-5 * scale


def test_gradient_where_sigmoids_saturate():
    """1 - s is computed without cancellation."""
    logits, cotangent = 12 + 6 * mx.random.uniform(shape=(8, 30)), normal(8, 5)
    ours, definition = (
        vjp_of(lambda x, f=f: f(x, 5, scoring="sigmoid", norm=False)[0], 1)
        for f in (softmax_topk, reference.softmax_topk)
    )
    assert_accurate(ours, definition, [logits, cotangent])


# ---- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 56), (130, 8)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_gradient_where_one_weight_is_almost_one(scoring, experts, k):
    """Cotangents less their mean nearly cancel there, in its gradient and in that of the others times their weights."""
    logits = normal(9, experts) - (12.0 if scoring == "sigmoid" else 0.0)
    logits[:, 3] = 9.0 + mx.random.uniform(shape=(9,))
    d_weights = 5.0 + normal(9, k)
    (ours,) = vjp_of(lambda x: softmax_topk(x, k, scoring=scoring)[0], 1)(logits, d_weights)
    with mx.stream(mx.cpu):
        definition = vjp_of(lambda x: reference.softmax_topk(x, k, scoring=scoring)[0], 1)
        (exact,) = definition(logits.astype(mx.float64), d_weights.astype(mx.float64))
    for row, wanted in zip(to_numpy(ours), to_numpy(exact), strict=True):
        assert 0 < np.abs(wanted).max() < 0.1
        assert np.abs(row - wanted).max() <= 5e-6 * np.abs(wanted).max()


def test_one_kernel_each_way():
    logits = normal(4, 3, 16)
    router = mlx_anvil.softmax_topk
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        mx.eval(mx.vjp(lambda x: router(x, 2)[0], [logits], [normal(4, 3, 2)]))
    names = kernel_names(trace)
    assert [name.split("_float32")[0] for name in names] == ["softmax_topk_forward", "softmax_topk_backward"]


def test_vmap_is_one_kernel():
    logits = normal(5, 12, 7)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        weights, indices = mx.vmap(lambda x: softmax_topk(x, 3), in_axes=2)(logits)
        mx.eval(weights, indices)
    assert len(trace.kernels) == 1
    expected = softmax_topk(logits.transpose(2, 0, 1), 3)
    assert_same_bits(weights, expected[0])
    assert mx.array_equal(indices, expected[1])


@pytest.mark.parametrize("experts", [8, 4097])
def test_vmap_of_gradients_without_rows(experts):
    gradient = mx.grad(lambda x: softmax_topk(x, 3)[0].sum())
    assert mx.vmap(gradient)(mx.zeros((2, 0, experts))).shape == (2, 0, experts)
    assert mx.vmap(mx.vmap(gradient))(mx.zeros((5, 2, 0, experts))).shape == (5, 2, 0, experts)


@each_way
@pytest.mark.parametrize(("experts", "k"), [(80, 65), (4097, 3)])
def test_more_than_kernels_take(experts, k, way):
    logits = normal(3, experts)
    with mlx_anvil.trace() as trace:
        weights, indices = softmax_topk(logits, k, **way)
        mx.eval(weights, indices)
    assert trace.kernels == []
    assert "at most 64 of at most 4096" in trace.fallbacks[0].reason
    np.testing.assert_array_equal(np.array(indices), best_of(logits, k))
    assert max_error(weights, reference.softmax_topk(logits, k, **way)[0]) <= OTHER_KERNEL
    ours, definition = (vjp_of(lambda x, f=f: f(x, k, **way)[0], 1) for f in (softmax_topk, reference.softmax_topk))
    assert_accurate(ours, definition, [logits, normal(3, k)])


def test_graph_chooses_as_the_kernel():
    """The graph for calls without a kernel makes the same choice: ties, zeros of both signs, non-finite logits."""
    special = mx.array([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
    logits = special[mx.random.randint(0, 7, (20, 90))]
    for in_order in (True, False):
        _, by_graph = softmax_topk(logits, 70, sorted=in_order)
        best = best_of(logits, 70)
        np.testing.assert_array_equal(np.array(by_graph), best if in_order else np.sort(best, axis=-1))
        _, by_kernel = softmax_topk(logits, 60, sorted=in_order)
        np.testing.assert_array_equal(np.array(by_kernel), best[:, :60] if in_order else np.sort(best[:, :60], axis=-1))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, 9, 2**40])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=rf"^\[softmax_topk\] k is {k} and logits has shape \(3, 8\); allowed: from 1"):
        softmax_topk(mx.zeros((3, 8)), k)


def test_no_experts():
    with pytest.raises(ValueError, match=r"^\[softmax_topk\] k is 1 and logits has shape \(3, 0\)"):
        softmax_topk(mx.zeros((3, 0)), 1)


def test_scalar():
    with pytest.raises(ValueError, match=r"^\[softmax_topk\] logits has shape \(\); allowed: one axis"):
        softmax_topk(mx.array(1.0), 1)


def test_unknown_scoring():
    with pytest.raises(ValueError, match=r"^\[softmax_topk\] scoring is 'relu'; allowed: 'softmax', 'sigmoid' or"):
        softmax_topk(mx.zeros((3, 8)), 2, scoring="relu")


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("k", 2.0, "an int"),
        ("k", True, "an int"),
        ("k", None, "an int"),
        ("norm", 1, "a bool"),
        ("sorted", None, "a bool"),
        ("scoring", 3, "'softmax', 'sigmoid' or 'sqrtsoftplus'"),
    ],
)
def test_wrong_type(argument, value, allowed):
    options = {"k": 2} | {argument: value}
    with pytest.raises(TypeError, match=rf"^\[softmax_topk\] {argument} is .*; allowed: {allowed}"):
        softmax_topk(mx.zeros((3, 8)), **options)


def test_compiled_for_fewer_experts():
    """A graph compiled with shapeless=True may get rows that are too short."""
    compiled = mx.compile(lambda x: softmax_topk(x * 2, 4)[0], shapeless=True)
    mx.eval(compiled(normal(3, 8)))
    with pytest.raises(ValueError, match=r"^\[softmax_topk\] k is 4 and logits has shape \(3, 3\)"):
        mx.eval(compiled(normal(3, 3)))
