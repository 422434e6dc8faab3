"""Selection biases, groups of experts, scaling and sqrtsoftplus of softmax_topk, beyond the contract."""

import math
from collections.abc import Callable
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

BIAS = "e_score_correction_bias"
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
WAYS = [{"norm": norm, "scoring": scoring} for norm, scoring in product((True, False), SCORINGS)]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['scoring']} {'normed' * way['norm']}".strip())
# Experts, k, groups, kept groups: a group within a vector, of several, of odd sizes; rows longer than a lane holds.
GROUPS = ((8, 2, 4, 1), (12, 3, 4, 2), (64, 8, 8, 4), (130, 6, 10, 3), (256, 8, 8, 4), (264, 9, 8, 3), (620, 12, 31, 9))
each_size = pytest.mark.parametrize(("experts", "k", "groups", "kept"), GROUPS)


def scores_of(logits: mx.array, scoring: str) -> np.ndarray:
    """In float64."""
    x = to_numpy(logits).astype(np.float64)
    if scoring == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return 1 / (1 + np.exp(-x)) if scoring == "sigmoid" else np.sqrt(np.logaddexp(x, 0))


def best(values: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def choice(values: np.ndarray, k: int, groups: int, kept: int, by_max: bool, masked: float) -> np.ndarray:
    """The k best within the best groups."""
    grouped = values.reshape(*values.shape[:-1], groups, -1)
    of_groups = np.sort(grouped, axis=-1)[..., -1:] if by_max else np.sort(grouped, axis=-1)[..., -2:]
    left_out = np.ones(grouped.shape[:-1], bool)
    np.put_along_axis(left_out, best(of_groups.sum(-1), kept), False, axis=-1)
    return best(np.where(left_out[..., None], masked, grouped).reshape(values.shape), k)


# ---- the choice ------------------------------------------------------------------------------------------------------


@each_size
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_and_groups(experts, k, groups, kept, scoring, dtype):
    """The choice that float64 makes. Random sums are farther apart than float32 rounds, or the seed is unlucky."""
    logits, bias = normal(9, experts, dtype=dtype), 0.5 * normal(experts)
    values = scores_of(logits, scoring) + to_numpy(bias)
    for by_max, masked in product((False, True), (None, 0.0)):
        options = {"n_group": groups, "topk_group": kept, "group_scoring": "max" if by_max else "top2"}
        options |= {BIAS: bias, "scoring": scoring, "masked_score": masked}
        weights, indices = softmax_topk(logits, k, **options)
        expected = choice(values, k, groups, kept, by_max, -math.inf if masked is None else masked)
        np.testing.assert_array_equal(np.array(indices), expected)
        chosen = np.take_along_axis(scores_of(logits, scoring), expected, -1)
        rounding = {mx.float32: 1e-6, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
        np.testing.assert_allclose(to_numpy(weights), chosen / chosen.sum(-1, keepdims=True), rtol=2 * rounding)


@each_size
@pytest.mark.parametrize("scoring", SCORINGS)
def test_groups_without_a_bias(experts, k, groups, kept, scoring):
    logits = normal(9, experts)
    values = scores_of(logits, scoring)
    for by_max in (False, True):
        options = {"n_group": groups, "topk_group": kept, "group_scoring": "max" if by_max else "top2"}
        _, indices = softmax_topk(logits, k, scoring=scoring, **options)
        np.testing.assert_array_equal(np.array(indices), choice(values, k, groups, kept, by_max, -math.inf))


def test_masked_scores_of_zero_beat_negative_sums():
    """As in mlx-lm, where an expert of a group that was left out is chosen before one whose sum is negative."""
    logits = mx.zeros((1, 8))
    bias = mx.array([2.0, 2.0, -1.0, -2.0, 1.0, 1.0, 1.0, 1.0])
    options = {BIAS: bias, "scoring": "sigmoid", "n_group": 2, "topk_group": 1}
    assert softmax_topk(logits, 4, **options)[1].tolist() == [[0, 1, 2, 3]]
    assert softmax_topk(logits, 4, masked_score=0.0, **options)[1].tolist() == [[0, 1, 4, 5]]
    assert softmax_topk(logits, 4, masked_score=-math.inf, **options)[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("experts", [16, 256, 600])
def test_ties_go_to_the_lowest_group_and_index(experts):
    for bias in (mx.zeros(experts), mx.full((experts,), -3.0)):
        options = {BIAS: bias, "scoring": "sigmoid", "n_group": 4, "topk_group": 2}
        _, indices = softmax_topk(mx.ones((3, experts)), 6, **options)
        assert indices.tolist() == [list(range(6))] * 3
    _, indices = softmax_topk(mx.ones((3, experts)), 6, n_group=4, topk_group=2)
    assert indices.tolist() == [list(range(6))] * 3


def test_a_bias_of_infinity_keeps_an_expert_in_or_out():
    logits = normal(50, 40)
    bias = mx.where(mx.arange(40) == 7, math.inf, mx.where(mx.arange(40) < 5, -math.inf, 0.0))
    weights, indices = softmax_topk(logits, 8, scoring="sigmoid", e_score_correction_bias=bias)
    assert (np.array(indices)[:, 0] == 7).all()
    assert np.array(indices).min() >= 5
    assert np.isfinite(np.array(weights)).all()


@each_way
def test_not_finite(way):
    inf, nan = math.inf, math.nan
    rows = [[1, nan, inf, 0, -inf, 2], [inf, 1, inf, 2, 3, 0], [-inf] * 6, [0, -inf, -inf, 1, 2, 3]]
    logits, bias = mx.array(rows), mx.array([0.0, 0.125, -0.25, 0.5, nan, -0.5])
    for b, groups in product((bias, [*bias[:4].tolist(), 0.75, -0.5]), (1, 3)):
        options = way | {BIAS: mx.array(b), "n_group": groups, "topk_group": max(1, groups - 1)}
        weights, indices = softmax_topk(logits, 3, **options)
        expected, chosen = reference.softmax_topk(logits, 3, **options)
        assert mx.array_equal(indices, chosen)
        np.testing.assert_allclose(to_numpy(weights), to_numpy(expected), rtol=2e-6, equal_nan=True)


def test_order_of_indices():
    """The same experts and weights in another order, which the gradients follow."""
    options = {BIAS: normal(100), "scoring": "sigmoid", "n_group": 5, "topk_group": 3, "routed_scaling_factor": 2.5}
    logits, cotangent = normal(6, 100), normal(6, 40)
    weights, indices = softmax_topk(logits, 40, **options)
    other, ascending = softmax_topk(logits, 40, sorted=False, **options)
    order = mx.argsort(indices, axis=-1)
    assert mx.array_equal(ascending, mx.take_along_axis(indices, order, axis=-1))
    assert max_error(other, mx.take_along_axis(weights, order, axis=-1)) <= OTHER_KERNEL
    (a,) = vjp_of(lambda x: softmax_topk(x, 40, **options)[0], 1)(logits, cotangent)
    by_index = partial(softmax_topk, k=40, sorted=False, **options)
    (b,) = vjp_of(lambda x: by_index(x)[0], 1)(logits, mx.take_along_axis(cotangent, order, axis=-1))
    assert max_error(b, a) <= OTHER_KERNEL


# ---- weights and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_way
def test_gradients(way, dtype):
    """Of choices that leave the largest logits out, in float64 for the same choice."""
    for experts, k, groups, kept in ((8, 2, 4, 1), (130, 6, 10, 3), (600, 40, 6, 2)):
        logits, bias, cotangent = normal(9, experts, dtype=dtype), 3 * normal(experts), normal(9, k, dtype=dtype)
        options = way | {BIAS: bias, "n_group": groups, "topk_group": kept, "routed_scaling_factor": 2.5}
        ours, definition = (
            lambda x, f=f, k=k, o=options: f(x, k, **o)[0] for f in (softmax_topk, reference.softmax_topk)
        )
        assert_accurate(ours, definition, [logits])
        gradients = [vjp_of(f, 1) for f in (ours, definition)]
        assert_accurate(*gradients, [logits, cotangent], factor=GRADIENT_FACTOR)


@each_way
def test_jvp_and_vjp_agree(way):
    logits, tangent, cotangent, bias = normal(20, 40), normal(20, 40), normal(20, 7), normal(40)

    def weights(x):
        options = {BIAS: bias, "n_group": 4, "topk_group": 2, "routed_scaling_factor": -1.5}
        return softmax_topk(x, 7, **way, **options)[0]

    products = mx.vjp(weights, [logits], [cotangent])[1][0] * tangent
    forward = (mx.jvp(weights, [logits], [tangent])[1][0] * cotangent).sum()
    assert abs(float(forward) - float(products.sum())) <= 1e-5 * float(mx.abs(products).sum())


def test_the_bias_has_no_gradient():
    """It only ranks. Its gradient and its tangent are zeros; those of the logits do not change beside it."""
    logits, bias, cotangent = normal(5, 32), normal(32), normal(5, 4)

    def weights(x, b):
        return softmax_topk(x, 4, scoring="sigmoid", e_score_correction_bias=b)[0]

    d_logits, d_bias = mx.vjp(weights, [logits, bias], [cotangent])[1]
    assert_same_bits(d_bias, mx.zeros(32))
    assert_same_bits(d_logits, mx.vjp(lambda x: weights(x, bias), [logits], [cotangent])[1][0])
    assert_same_bits(mx.grad(lambda b: weights(logits, b).sum())(bias), mx.zeros(32))
    (tangent,) = mx.jvp(weights, [logits, bias], [mx.zeros_like(logits), mx.ones(32)])[1]
    assert_same_bits(tangent, mx.zeros((5, 4)))


def test_sqrtsoftplus_far_from_zero():
    """Scores that underflow keep their ratios; large logits are their own softplus."""
    logits = mx.array([[-190.0, -240.0, -188.0], [400.0, 100.0, -300.0]])
    weights, indices = softmax_topk(logits, 2, scoring="sqrtsoftplus")
    assert indices.tolist() == [[2, 0], [0, 1]]
    ratio = math.exp(-1)
    expected = [[1 / (1 + ratio), ratio / (1 + ratio)], [2 / 3, 1 / 3]]
    np.testing.assert_allclose(np.array(weights), expected, rtol=1e-5)
    logits = mx.linspace(-95, 95, 4097 - 1).reshape(-1, 8)
    ours = softmax_topk(logits, 8, scoring="sqrtsoftplus", norm=False, sorted=False)[0]
    exact = np.sqrt(np.logaddexp(np.array(logits, np.float64), 0))
    normal_numbers = exact > 1e-36
    np.testing.assert_allclose(np.array(ours)[normal_numbers], exact[normal_numbers], rtol=1e-6)


def test_scaling_multiplies_weights_and_gradients():
    logits, cotangent = normal(7, 64), normal(7, 6)
    for way in WAYS:
        plain, scaled = (
            lambda x, s=s, way=way: softmax_topk(x, 6, routed_scaling_factor=s, **way)[0] for s in (1.0, 4.0)
        )
        assert_same_bits(scaled(logits), 4 * plain(logits))
        gradients = [mx.vjp(f, [logits], [cotangent])[1][0] for f in (plain, scaled)]
        assert max_error(gradients[1], 4 * gradients[0]) <= OTHER_KERNEL


# ---- routes ----------------------------------------------------------------------------------------------------------


def test_one_kernel_each_way():
    logits, bias = normal(4, 3, 64), normal(64, dtype=mx.bfloat16)
    options = {BIAS: bias, "scoring": "sigmoid", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        mx.eval(mx.vjp(lambda x: softmax_topk(x, 6, **options)[0], [logits], [normal(4, 3, 6)]))
    names = kernel_names(trace)
    assert [name.split("_float32")[0] for name in names] == ["softmax_topk_forward", "softmax_topk_backward"]


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0), (1, 1)], ids=str)
def test_vmap_is_one_kernel(axes):
    """Over the logits, the biases or both."""
    logits = normal(5, 5, 24) if axes[0] is not None else normal(5, 24)
    bias = normal(24) if axes[1] is None else normal(5, 24) if axes[1] == 0 else normal(24, 5)
    options = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2}

    def router(x, b):
        return softmax_topk(x, 3, e_score_correction_bias=b, **options)

    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        weights, indices = mx.vmap(router, in_axes=axes)(logits, bias)
        mx.eval(weights, indices)
    assert len(trace.kernels) == 1
    for n in range(5):
        own = [x if axis is None else mx.take(x, n, axis=axis) for x, axis in zip((logits, bias), axes, strict=True)]
        expected = router(*own)
        assert_same_bits(weights[n], expected[0])
        assert mx.array_equal(indices[n], expected[1])


def test_vmap_of_vmap_and_of_gradients():
    logits, bias = normal(2, 3, 4, 24), normal(3, 24)

    def gradient(x, b):
        return mx.grad(lambda y: (softmax_topk(y, 3, e_score_correction_bias=b)[0] ** 2).sum())(x)

    nested = mx.vmap(mx.vmap(gradient, in_axes=(0, 0)), in_axes=(0, None))(logits, bias)
    for i, j in product(range(2), range(3)):
        assert_same_bits(nested[i, j], gradient(logits[i, j], bias[j]))


@each_way
@pytest.mark.parametrize(("experts", "k", "groups"), [(80, 65, 2), (4100, 3, 4), (99, 3, 33)])
def test_more_than_kernels_take(experts, k, groups, way):
    logits, bias = normal(3, experts), normal(experts)
    kept = max(1, groups - 1) if groups > 2 else 2
    options = way | {BIAS: bias, "n_group": groups, "topk_group": kept, "routed_scaling_factor": 2.5}
    with mlx_anvil.trace() as trace:
        weights, indices = softmax_topk(logits, k, **options)
        mx.eval(weights, indices)
    assert trace.kernels == []
    assert "at most" in trace.fallbacks[0].reason
    values = scores_of(logits, way["scoring"]) + to_numpy(bias)
    np.testing.assert_array_equal(np.array(indices), choice(values, k, groups, kept, False, -math.inf))
    ours, definition = (vjp_of(lambda x, f=f: f(x, k, **options)[0], 1) for f in (softmax_topk, reference.softmax_topk))
    assert_accurate(ours, definition, [logits, normal(3, k)])


def test_graph_chooses_as_the_kernel():
    """Ties, zeros of both signs and infinite biases, within groups, masked with either score."""
    special = mx.array([math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
    logits, bias = special[mx.random.randint(2, 6, (20, 96))], special[mx.random.randint(1, 6, (96,))]
    for masked, scoring in product((None, 0.0), ("sigmoid", "softmax")):
        options = {"n_group": 6, "topk_group": 5, BIAS: bias, "masked_score": masked, "scoring": scoring}
        _, by_graph = softmax_topk(logits, 70, **options)
        _, by_kernel = softmax_topk(logits, 60, **options)
        np.testing.assert_array_equal(np.array(by_graph)[:, :60], np.array(by_kernel))


# ---- bad input -------------------------------------------------------------------------------------------------------

LOGITS = mx.zeros((3, 8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_group": 3}, r"n_group is 3 and logits has shape \(3, 8\); allowed: a divisor of the last axis\."),
        ({"n_group": 0}, r"n_group is 0 and logits has shape \(3, 8\); allowed: a divisor"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5 and n_group is 4; allowed: from 1 to n_group"),
        ({"n_group": 4, "topk_group": 0}, "topk_group is 0 and n_group is 4; allowed: from 1 to n_group"),
        ({"topk_group": 2}, "topk_group is 2 and n_group is 1; allowed: from 1 to n_group"),
        ({"k": 5, "n_group": 4, "topk_group": 2}, "k is 5 and topk_group is 2, with 2 experts in a group; allowed: k"),
        ({"n_group": 8, "topk_group": 4}, "group_scoring is 'top2', with 1 expert in a group; allowed: 2 experts"),
        ({"group_scoring": "sum"}, "group_scoring is 'sum'; allowed: 'top2' or 'max'"),
        ({"scoring": "relu"}, "scoring is 'relu'; allowed: 'softmax', 'sigmoid' or 'sqrtsoftplus'"),
        ({"masked_score": 1.0}, "masked_score is 1.0*; allowed: None, -inf or 0"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor is nan; allowed: a finite number"),
        ({BIAS: mx.zeros(7)}, rf"{BIAS} has shape \(7,\) and logits has shape \(3, 8\); allowed: shape \(8,\)"),
        ({BIAS: mx.zeros((3, 8))}, rf"{BIAS} has shape \(3, 8\) and logits"),
        ({BIAS: mx.zeros(8, mx.int32)}, rf"{BIAS} has dtype int32"),
    ],
    ids=str,
)
def test_bad_values(options: dict[str, object], text: str):
    router: Callable[..., object] = softmax_topk
    with pytest.raises(ValueError, match=rf"^\[softmax_topk\] {text}"):
        router(LOGITS, **({"k": 2} | options))


def test_compiled_for_experts_that_no_longer_fit_the_groups():
    compiled = mx.compile(lambda x: softmax_topk(x * 2, 2, n_group=4, topk_group=2)[0], shapeless=True)
    mx.eval(compiled(normal(3, 8)))
    with pytest.raises(ValueError, match=r"^\[softmax_topk\] n_group is 4 and logits has shape \(3, 10\)"):
        mx.eval(compiled(normal(3, 10)))
