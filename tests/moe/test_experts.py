"""quantized_experts beyond the contract: formats, biases, ids, shapes, transformations and errors."""

import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from expert_calls import DIMS, EXPERTS, HIDDEN, MODES, explicit, matrices, quantized, tokens_of
from mlx_anvil import reference
from mlx_anvil.reference import DTYPES
from support import assert_accurate, assert_same_bits, max_error, vjp_of

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 5, 37])
@each_dtype
def test_formats(mode, tokens, dtype):
    """One token, fewer pairs than are sorted, and more."""
    experts = matrices(mode, **MODES[mode])
    x, ids, weights = tokens_of(tokens)

    def call(function, **options):
        return lambda x, weights: function(x, ids, weights, *experts, **options)

    ours = call(mlx_anvil.quantized_experts, mode=mode, **MODES[mode])
    theirs = call(reference.quantized_experts, **explicit(mode, MODES[mode]))
    assert_accurate(ours, theirs, [x.astype(dtype), weights.astype(dtype)], float32_tolerance=2e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("tokens", [2, 40])
def test_activations_and_biases(activation, limit, tokens):
    """GPT-OSS has biases, a clamp, and mxfp4."""
    experts = matrices("mxfp4")
    x, ids, weights = tokens_of(tokens)
    biases = [mx.random.normal((EXPERTS, size)) for size in (HIDDEN, HIDDEN, DIMS)]
    options = {"activation": activation, "limit": limit}

    def call(function, **more):
        def of_arrays(x, weights, *biases):
            names = dict(zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True))
            return function(x, ids, weights, *experts, **names, **options, **more)

        return of_arrays

    ours = call(mlx_anvil.quantized_experts, mode="mxfp4")
    theirs = call(reference.quantized_experts, **explicit("mxfp4", {}))
    arrays = [x, weights, *biases]
    assert_accurate(ours, theirs, arrays, float32_tolerance=2e-5)
    cotangent = mx.random.normal((tokens, DIMS))
    assert_accurate(vjp_of(ours, 5), vjp_of(theirs, 5), [*arrays, cotangent], float32_tolerance=5e-5)


def test_one_bias_alone():
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(7)
    for name, size in (("gate_bias", HIDDEN), ("up_bias", HIDDEN), ("down_bias", DIMS)):
        bias = {name: mx.random.normal((EXPERTS, size))}
        ours = mlx_anvil.quantized_experts(x, ids, weights, *experts, group_size=32, **bias)
        theirs = reference.quantized_experts(x, ids, weights, *experts, group_size=32, **bias)
        assert max_error(ours, theirs) <= 2e-5


@pytest.mark.parametrize("tokens", [3, 50])
def test_format_of_down(tokens):
    """mlx-lm's mixed recipes give it more bits."""
    gate, up, _ = matrices("mxfp4")
    x, ids, weights = tokens_of(tokens)
    for options in ({"group_size": 32, "bits": 8}, {"group_size": 32, "bits": 3}):
        down = quantized(DIMS, HIDDEN, **options)
        own = {f"down_{name}": value for name, value in (options | {"mode": "affine"}).items()}
        ours = mlx_anvil.quantized_experts(x, ids, weights, gate, up, down, mode="mxfp4", **own)
        theirs = reference.quantized_experts(x, ids, weights, gate, up, down, **explicit("mxfp4", {}), **own)
        assert max_error(ours, theirs) <= 2e-5
    down = quantized(DIMS, HIDDEN, "mxfp8")  # with the defaults of the other mode
    ours = mlx_anvil.quantized_experts(x, ids, weights, gate, up, down, mode="mxfp4", down_mode="mxfp8")
    own = {"down_group_size": 32, "down_bits": 8, "down_mode": "mxfp8"}
    theirs = reference.quantized_experts(x, ids, weights, gate, up, down, **explicit("mxfp4", {}), **own)
    assert max_error(ours, theirs) <= 2e-5


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 13), (3, 0), (0,)])
@pytest.mark.parametrize("with_weights", [True, False])
def test_shapes(shape, with_weights):
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(*shape)
    weights = weights if with_weights else None
    ours = mlx_anvil.quantized_experts(x, ids, weights, *experts, group_size=32)
    assert ours.shape == (*shape, DIMS) if with_weights else (*shape, 3, DIMS)
    if ours.size:
        theirs = reference.quantized_experts(x, ids, weights, *experts, group_size=32)
        assert max_error(ours, theirs) <= 2e-5


@pytest.mark.parametrize("tokens", [3, 64])
def test_rows_without_weights(tokens):
    """The rows that mlx-lm's SwitchGLU returns, and their gradient."""
    experts, (x, ids, _) = matrices(group_size=32), tokens_of(tokens)

    def call(function):
        return lambda x: function(x, ids, None, *experts, group_size=32)

    cotangent = mx.random.normal((tokens, 3, DIMS))
    ours, theirs = call(mlx_anvil.quantized_experts), call(reference.quantized_experts)
    assert_accurate(ours, theirs, [x], float32_tolerance=2e-5)
    assert_accurate(vjp_of(ours, 1), vjp_of(theirs, 1), [x, cotangent], float32_tolerance=5e-5)


@pytest.mark.parametrize("tokens", [4, 40])
def test_ids(tokens):
    """All integer dtypes, ids from the end, one expert for all tokens, and the same expert twice."""
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(tokens)
    want = mlx_anvil.quantized_experts(x, ids, weights, *experts, group_size=32)
    for dtype in (mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint64):
        got = mlx_anvil.quantized_experts(x, ids.astype(dtype), weights, *experts, group_size=32)
        assert_same_bits(got, want)
    negative = ids.astype(mx.int32) - EXPERTS
    assert_same_bits(mlx_anvil.quantized_experts(x, negative, weights, *experts, group_size=32), want)
    for same in (mx.zeros(ids.shape, mx.int32), mx.full(ids.shape, EXPERTS - 1, mx.int32)):
        ours = mlx_anvil.quantized_experts(x, same, weights, *experts, group_size=32)
        assert max_error(ours, reference.quantized_experts(x, same, weights, *experts, group_size=32)) <= 2e-5


def test_ids_out_of_range_stay_in_memory():
    """Lazy ids are not known at the call: they clamp."""
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(5)
    mx.eval(ids)
    lazy = ids.astype(mx.int32) + 1000 * mx.ones(ids.shape, mx.int32)
    last = mx.full(ids.shape, EXPERTS - 1, mx.int32)
    ours = mlx_anvil.quantized_experts(x, lazy, weights, *experts, group_size=32)
    assert max_error(ours, reference.quantized_experts(x, last, weights, *experts, group_size=32)) <= 2e-5


def test_result_has_the_promoted_dtype():
    x, ids, weights = tokens_of(3)
    experts = matrices(group_size=32)  # float32 scales
    assert mlx_anvil.quantized_experts(x.astype(mx.bfloat16), ids, weights, *experts, group_size=32).dtype == mx.float32
    experts = matrices("mxfp4")
    for scores in (weights, weights.astype(mx.float16)):
        ours = mlx_anvil.quantized_experts(x.astype(mx.bfloat16), ids, scores, *experts, mode="mxfp4")
        assert ours.dtype == mx.bfloat16


# ---- transformations -------------------------------------------------------------------------------------------------


def test_router_that_is_trained():
    """Ids that depend on what is trained have no gradient, and ask for none."""
    experts, x = matrices(group_size=32), mx.random.normal((5, DIMS))
    router = mx.random.normal((EXPERTS, DIMS))

    def loss(router, x):
        scores = mx.softmax(x @ router.T, axis=-1)
        ids = mx.argpartition(-scores, kth=2, axis=-1)[..., :2]
        weights = mx.take_along_axis(scores, mx.stop_gradient(ids), axis=-1)
        return mlx_anvil.quantized_experts(x, ids, weights, *experts, group_size=32).square().sum()

    for gradient in mx.grad(loss, argnums=(0, 1))(router, x):
        assert mx.abs(gradient).max() > 0
        assert mx.isfinite(gradient).all()


@pytest.mark.parametrize("tokens", [2, 30])
def test_vmap_over_every_array(tokens):
    batch = 3
    x, ids, weights = tokens_of(batch, tokens)
    experts = [matrices(group_size=32) for _ in range(batch)]
    stacked = [[mx.stack([experts[b][side][part] for b in range(batch)]) for part in range(3)] for side in range(3)]
    arrays = [x, ids, weights, *(part for side in stacked for part in side)]

    def call(x, ids, weights, *parts):
        sides = parts[:3], parts[3:6], parts[6:]
        return mlx_anvil.quantized_experts(x, ids, weights, *sides, group_size=32)

    for mapped in (*([i] for i in range(12)), [0, 1, 2], list(range(3, 12)), list(range(12))):
        axes = tuple(0 if i in mapped else None for i in range(12))
        given = [array if i in mapped else array[0] for i, array in enumerate(arrays)]
        ours = mx.vmap(call, in_axes=axes)(*given)
        want = mx.stack([call(*(a[b] if i in mapped else a for i, a in enumerate(given))) for b in range(batch)])
        assert max_error(ours, want) <= 1e-5, mapped
    last = mx.vmap(call, in_axes=(2, 2, 2, *[None] * 9), out_axes=1)(
        *(mx.moveaxis(array, 0, 2) for array in arrays[:3]), *(array[0] for array in arrays[3:])
    )
    want = mx.stack([call(*(a[b] for a in arrays[:3]), *(a[0] for a in arrays[3:])) for b in range(batch)], axis=1)
    assert max_error(last, want) <= 1e-5


@pytest.mark.parametrize("tokens", [3, 40])
def test_forward_mode(tokens):
    """mx.gather_qmm has none."""
    experts, (x, ids, weights) = matrices("mxfp4"), tokens_of(tokens)

    def call(x, weights):
        return mlx_anvil.quantized_experts(x, ids, weights, *experts, mode="mxfp4")

    tangents = [mx.random.normal(x.shape), mx.random.normal(weights.shape)]
    _, (forward,) = mx.jvp(call, [x, weights], tangents)
    cotangent = mx.random.normal(forward.shape)
    _, backward = mx.vjp(call, [x, weights], [cotangent])
    ours = (forward * cotangent).sum()
    theirs = sum((a * b).sum() for a, b in zip(tangents, backward, strict=True))
    assert abs((ours - theirs).item()) <= 1e-4 * mx.abs(forward * cotangent).sum().item()


def test_shapeless_compile():
    """For other numbers of tokens and of experts per token, with and without a sort."""
    experts = matrices(group_size=32)
    mx.eval(experts)

    def call(x, ids, weights):
        return mlx_anvil.quantized_experts(x, ids, weights, *experts, group_size=32)

    def gradients(x, ids, weights):
        return mx.grad(lambda x, weights: call(x, ids, weights).square().sum(), argnums=(0, 1))(x, weights)

    compiled, of_gradients = mx.compile(call, shapeless=True), mx.compile(gradients, shapeless=True)
    for tokens, k in ((3, 2), (50, 2), (1, 4), (64, 1)):
        arrays = tokens_of(tokens, k=k)
        mx.eval(arrays)
        assert max_error(compiled(*arrays), call(*arrays)) <= 1e-6
        for ours, want in zip(of_gradients(*arrays), gradients(*arrays), strict=True):
            assert max_error(ours, want) <= 1e-6


def test_two_runs_have_the_same_bits():
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(90)
    call = lambda x: mlx_anvil.quantized_experts(x, ids, weights, *experts, group_size=32)  # noqa: E731
    gradient = mx.grad(lambda x: call(x).square().sum())
    assert_same_bits(call(x), call(x))
    assert_same_bits(gradient(x), gradient(x))


# ---- errors ----------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], text: str, *arrays, **options) -> None:
    with pytest.raises(error, match=rf"^\[quantized_experts\] {text}"):
        mlx_anvil.quantized_experts(*arrays, **{"group_size": 32, **options})


@pytest.mark.cpu_only
def test_errors():
    experts, (x, ids, weights) = matrices(group_size=32), tokens_of(4)
    outside = ids + EXPERTS
    mx.eval(ids, outside)
    gate, up, down = experts
    refused(TypeError, "ids has dtype float32; allowed: an integer dtype", x, weights, weights, *experts)
    refused(ValueError, r"ids has \d+ and gate w 6 experts; allowed: -6 to 5", x, outside, weights, *experts)
    shape = r"ids has shape \(3, 3\) and x has shape \(4, 64\); allowed: ids \[..., k\] with the leading axes of x"
    refused(ValueError, shape, x, ids[1:], weights, *experts)
    refused(ValueError, "ids has shape", x, ids[..., 0], weights, *experts)
    refused(ValueError, "ids has shape .* k = 9, .* 6 experts; allowed: k at most", x, mx.tile(ids, 3), None, *experts)
    refused(ValueError, r"weights has shape \(4, 2\) and ids .*; allowed: equal", x, ids, weights[:, :2], *experts)
    refused(ValueError, "weights has dtype int32; allowed: float32", x, ids, ids.astype(mx.int32), *experts)
    refused(ValueError, r"x has shape \(4, 32\)", x[:, :32], ids, weights, *experts)
    refused(ValueError, "x has dtype uint32", ids, ids, weights, *experts)
    refused(ValueError, "gate w has shape .* and up w .*; allowed: equal", x, ids, weights, gate, down, down)
    one = tuple(part[0] for part in gate)
    refused(ValueError, "gate w has shape .*; allowed: equal shapes of rank 3", x, ids, weights, one, one, down)
    refused(ValueError, "down w has shape .* and gate w .*H = 96", x, ids, weights, gate, up, gate)
    fewer = tuple(part[:5] for part in down)
    refused(ValueError, "down w has shape .*with E = 6", x, ids, weights, gate, up, fewer)
    refused(TypeError, r"gate is a mlx\.core\.array; allowed: a tuple", x, ids, weights, gate[0], up, down)
    refused(ValueError, "up has 1 entries", x, ids, weights, gate, up[:1], down)
    refused(ValueError, "gate w has shape .*These gate arrays fit", x, ids, weights, *experts, group_size=64)
    refused(ValueError, "activation is 'tanh'; allowed", x, ids, weights, *experts, activation="tanh")
    for bad in (math.nan, 0.0, -1.0):
        refused(ValueError, "limit is", x, ids, weights, *experts, limit=bad)
    bias = mx.zeros((EXPERTS, HIDDEN))
    refused(ValueError, r"down_bias has shape \(6, 96\); allowed: \(6, 64\)", x, ids, weights, *experts, down_bias=bias)
    refused(ValueError, "gate_bias has dtype int32", x, ids, weights, *experts, gate_bias=bias.astype(mx.int32))


def test_no_gradient_in_codes():
    experts, (x, ids, weights) = matrices("mxfp4"), tokens_of(2)

    def loss(scales):
        gate = experts[0][0], scales
        return mlx_anvil.quantized_experts(x, ids, weights, gate, *experts[1:], mode="mxfp4").sum()

    with pytest.raises(ValueError, match="no gradient in scales of mode 'mxfp4'"):
        mx.grad(loss)(experts[0][1])
    assert np.isfinite(loss(experts[0][1]).item())
