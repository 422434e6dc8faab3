"""What quantized_experts adds to the sum over experts: a residual, and a shared expert behind a gate."""

from collections.abc import Callable

import mlx.core as mx
import pytest

import mlx_anvil
from expert_calls import DIMS, matrices, tokens_of
from mlx_anvil import reference
from mlx_anvil.reference import DTYPES
from support import Arrays, assert_accurate, max_error, vjp_of

TERMS = (("residual",), ("shared",), ("shared", "shared_gate"), ("residual", "shared", "shared_gate"))

each_terms = pytest.mark.parametrize("names", TERMS, ids="+".join)


def terms_of(names: tuple[str, ...], *shape: int) -> Arrays:
    return [mx.random.normal((*shape, 1 if name == "shared_gate" else DIMS)) for name in names]


def of_floats(function: Callable[..., mx.array], names: tuple[str, ...], ids: mx.array, experts: list[tuple]):
    """As a function of x, weights and the terms."""

    def call(x: mx.array, weights: mx.array, *terms: mx.array) -> mx.array:
        return function(x, ids, weights, *experts, group_size=32, **dict(zip(names, terms, strict=True)))

    return call


@each_terms
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms(names, tokens, dtype):
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(tokens)
    experts = [(w, *(part.astype(dtype) for part in parts)) for w, *parts in experts]
    ours, theirs = (
        of_floats(f, names, ids, experts) for f in (mlx_anvil.quantized_experts, reference.quantized_experts)
    )
    arrays = [a.astype(dtype) for a in (x, weights, *terms_of(names, tokens))]
    assert_accurate(ours, theirs, arrays, float32_tolerance=2e-5)
    arrays.append(mx.random.normal((tokens, DIMS)).astype(dtype))
    count = len(names) + 2
    assert_accurate(vjp_of(ours, count), vjp_of(theirs, count), arrays, float32_tolerance=5e-5, factor=3)


@each_terms
def test_transformations(names):
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(2, 30)
    ours = of_floats(mlx_anvil.quantized_experts, names, ids[0], experts)
    arrays = [x, weights, *terms_of(names, 2, 30)]
    want = mx.stack([ours(*(a[i] for a in arrays)) for i in range(2)])
    assert max_error(mx.vmap(ours)(*arrays), want) <= 1e-5
    only_last = mx.vmap(ours, in_axes=(*[None] * (len(arrays) - 1), 0))(*(a[0] for a in arrays[:-1]), arrays[-1])
    assert max_error(only_last, mx.stack([ours(*(a[0] for a in arrays[:-1]), a) for a in arrays[-1]])) <= 1e-5
    first = [a[0] for a in arrays]
    tangents = [mx.random.normal(a.shape) for a in first]
    _, (forward,) = mx.jvp(ours, first, tangents)
    cotangent = mx.random.normal(forward.shape)
    _, backward = mx.vjp(ours, first, [cotangent])
    theirs = sum((a * b).sum() for a, b in zip(tangents, backward, strict=True))
    assert abs(((forward * cotangent).sum() - theirs).item()) <= 1e-4 * mx.abs(forward * cotangent).sum().item()


def test_shapeless_compile():
    experts, names = matrices(group_size=32), TERMS[-1]
    mx.eval(experts)

    def call(x, ids, weights, *terms):
        return of_floats(mlx_anvil.quantized_experts, names, ids, experts)(x, weights, *terms)

    compiled = mx.compile(call, shapeless=True)
    for tokens, k in ((3, 2), (50, 2), (1, 4)):
        arrays = [*tokens_of(tokens, k=k), *terms_of(names, tokens)]
        assert max_error(compiled(*arrays), call(*arrays)) <= 1e-6


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3)])
def test_no_pairs(shape):
    """No tokens, and no experts for each."""
    experts, names, (x, ids, weights) = matrices(group_size=32), TERMS[-1], tokens_of(*shape)
    terms = terms_of(names, *shape)
    ours = of_floats(mlx_anvil.quantized_experts, names, ids[..., :0], experts)(x, weights[..., :0], *terms)
    assert ours.shape == (*shape, DIMS)
    if ours.size:
        assert max_error(ours, terms[0] + mx.sigmoid(terms[2]) * terms[1]) <= 1e-6


def test_result_has_the_promoted_dtype():
    experts, (x, ids, weights) = matrices("mxfp4"), tokens_of(3)
    x, shared, gate = x.astype(mx.bfloat16), *terms_of(TERMS[2], 3)
    for dtype, of_gate in ((mx.float32, mx.float32), (mx.bfloat16, mx.float32), (mx.bfloat16, mx.float16)):
        more = {"shared": shared.astype(dtype), "shared_gate": gate.astype(of_gate)}
        assert mlx_anvil.quantized_experts(x, ids, weights, *experts, mode="mxfp4", **more).dtype == dtype


@pytest.mark.cpu_only
def test_errors():
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(4)
    shared, gate = terms_of(TERMS[2], 4)

    def refused(text: str, own: mx.array | None = weights, **terms: mx.array) -> None:
        with pytest.raises(ValueError, match=rf"^\[quantized_experts\] {text}"):
            mlx_anvil.quantized_experts(x, ids, own, *experts, group_size=32, **terms)

    refused(r"residual has shape \(4, 1\); allowed: \(4, 64\)", residual=gate)
    refused(r"shared has shape \(3, 64\); allowed: \(4, 64\)", shared=shared[1:])
    refused(r"shared_gate has shape \(4, 64\); allowed: \(4, 1\)", shared=shared, shared_gate=shared)
    refused("shared_gate is given without shared; allowed: both, or shared alone", shared_gate=gate)
    refused("shared has dtype int32", shared=shared.astype(mx.int32))
    refused("shared is given without weights; allowed: both", None, shared=shared)
    refused("residual is given without weights; allowed: both", None, residual=shared)
