"""flash_attention on GPUs that multiply for four SIMD groups at once. The checked simulator runs its kernels, whose
products complete there when they start."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from tests.flash_attention.cases import check, draw, gradients_of

pytestmark = [pytest.mark.slow, pytest.mark.alike("dtype"), pytest.mark.usefixtures("group_products")]

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
each_dims = pytest.mark.parametrize("dims", [(64, 64), (40, 64), (64, 48), (128, 128), (80, 96), (128, 72)], ids=str)
each_feature = pytest.mark.parametrize("feature", ["none", "causal", "window", "window+causal", "softcap", "sinks"])
GROUP = "flash_attention_forward_matrix_group_"


def attention64(case) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64."""
    q, k, v = (np.array(x.astype(mx.float32), np.float64) for x in (case.q, case.k, case.v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale, softcap = case.options.get("scale", q.shape[-1] ** -0.5), case.options.get("softcap")
    scores = scale * q @ k.swapaxes(-1, -2)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    query = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = np.arange(k.shape[2])[None]
    left, right = case.options.get("window_size", (k.shape[2] + q.shape[2],) * 2)
    seen = (key >= query - left) & (key <= query + right)
    if case.options.get("mask") == "causal":
        seen &= key <= query
    scores = np.where(seen, scores, -np.inf)
    if "sinks" in case.options:
        sinks = np.array(case.options["sinks"].astype(mx.float32), np.float64)
        sinks = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, sinks], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:, :, :1])], axis=2)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    return weights @ v / np.where(total == 0, 1, total), lse


def check_forward(case, *, by_group: bool = True) -> None:
    with mlx_anvil.trace() as trace:
        out, lse = mlx_anvil.flash_attention(case.q, case.k, case.v, return_lse=True, **case.options)
        mx.eval(out, lse)
    assert [kernel.startswith(GROUP) for kernel in trace.kernels] == [by_group], trace.kernels
    expected, expected_lse = attention64(case)
    # Weights and results are rounded to 16 bits.
    limit = (2**-10 if out.dtype == mx.float16 else 2**-7) * np.abs(expected).max()
    assert np.abs(np.array(out.astype(mx.float32)) - expected).max() <= limit
    np.testing.assert_allclose(np.array(lse), expected_lse, rtol=1e-5, atol=2e-5)


def passes_of(kernels: list[str]) -> set[str]:
    return {kernel.split("_float16")[0].split("_bfloat16")[0] for kernel in kernels}


GROUP_PASSES = {f"flash_attention_{name}_matrix_group" for name in ("forward", "backward_dq", "backward_dkv")}


def check_backward(case, kernels: set[str] = GROUP_PASSES) -> None:
    """Checks the results and gradients, and that exactly these kernels for matrix units ran."""
    with mlx_anvil.trace() as trace:
        check(case)
    assert passes_of(trace.kernels) - {"flash_attention_delta", "flash_attention_d_sinks"} == kernels


@each_dtype
@each_dims
def test_head_dims(dims, dtype):
    # Ragged blocks of queries and keys; several tiles of keys.
    check_forward(draw((2, 1), (133, 230), dims, dtype, "causal"))


@pytest.mark.alike("dim", "dtype")
@each_dtype
@each_feature
@pytest.mark.parametrize("dim", [64, 128])
def test_features(dim, feature, dtype):
    check_forward(draw((4, 2), (150, 210), (dim, dim), dtype, feature, batch=2))


@pytest.mark.parametrize("feature", ["none", "softcap"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
def test_factors_of_scores(scale, feature):
    """exp2's argument is one fma with a positive factor."""
    case = draw((2, 1), (70, 100), (64, 64), mx.float16, feature)
    case.options["scale"] = scale
    check_forward(case)


@pytest.mark.parametrize("feature", ["causal", "sinks+causal"])
def test_queries_without_keys(feature):
    """The first 160 of 200 queries see no key: one block of them has no tile, one has some rows without keys."""
    case = draw((1, 1), (200, 40), (128, 128), mx.float16, feature.replace("sinks+", ""))
    if "sinks" in feature:
        case.options["sinks"] = mx.array([0.5], mx.float16)
    check_forward(case)


def test_one_tile_of_keys():
    check_forward(draw((1, 1), (70, 9), (64, 64), mx.bfloat16))


@pytest.mark.cpu_only
def test_the_order_of_threads_does_not_matter():
    case = draw((2, 1), (140, 210), (128, 128), mx.bfloat16, "causal")
    results = []
    for seed in (0, 1, 2):
        with mlx_anvil.simulate(checked=True, group_products=True, seed=seed):
            results.append(np.array(mlx_anvil.flash_attention(case.q, case.k, case.v, **case.options).view(mx.uint16)))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


# ---- gradients -------------------------------------------------------------------------------------------------------


@each_dtype
@each_dims
def test_gradients_of_head_dims(dims, dtype):
    # Ragged blocks of queries and keys; several tiles of both.
    check_backward(draw((2, 1), (133, 230), dims, dtype, "causal"))


@pytest.mark.alike("dim", "dtype")
@each_dtype
@each_feature
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_features(dim, feature, dtype):
    check_backward(draw((4, 2), (150, 210), (dim, dim), dtype, feature, batch=2))


def test_gradients_of_a_negative_factor():
    case = draw((2, 1), (70, 100), (64, 64), mx.float16)
    case.options["scale"] = -0.3
    check_backward(case)


def test_gradients_without_pairs():
    """The first 160 of 200 queries see no key: a block of them has no tile. With a window, a block of keys has none."""
    check_backward(draw((1, 1), (200, 70), (128, 128), mx.float16, "causal"))
    case = draw((1, 1), (70, 300), (64, 64), mx.bfloat16, "causal")
    case.options["window_size"] = (20, 0)
    check_backward(case)


@pytest.mark.cpu_only
def test_gradients_do_not_depend_on_the_order_of_threads():
    case = draw((4, 2), (140, 210), (128, 128), mx.bfloat16, "causal")
    results = []
    for seed in (0, 1, 2):
        with mlx_anvil.simulate(checked=True, group_products=True, seed=seed):
            gradients = gradients_of(case)[1]
            results.append({name: np.array(x.view(mx.uint16)) for name, x in gradients.items()})
    for name in ("q", "k", "v"):
        assert (results[0][name] == results[1][name]).all()
        assert (results[0][name] == results[2][name]).all()


@pytest.mark.cpu_only
def test_gradients_of_other_calls_take_other_kernels():
    """Few queries or keys, and mask arrays."""
    others = {f"flash_attention_{name}_matrix" for name in ("forward", "backward_dq", "backward_dkv")}
    group_forward = others - {"flash_attention_forward_matrix"} | {"flash_attention_forward_matrix_group"}
    check_backward(draw((1, 1), (64, 70), (64, 64), mx.float16), others)
    check_backward(draw((1, 1), (70, 64), (64, 64), mx.float16), group_forward)
    check_backward(draw((1, 1), (70, 70), (64, 64), mx.float16, "bool mask"), others)


def test_other_calls_take_other_kernels():
    """Few queries, and rows that are not vectors. With mask arrays: test_matrix_units.py has the kernels."""
    check_forward(draw((1, 1), (64, 70), (64, 64), mx.float16), by_group=False)
    case = draw((1, 1), (70, 70), (66, 66), mx.float16)
    case.q, case.k, case.v = (x[..., ::2] for x in (case.q, case.k, case.v))
    check_forward(case, by_group=False)
    case = draw((1, 1), (70, 70), (64, 64), mx.float16, "bool mask")
    with mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.flash_attention(case.q, case.k, case.v, **case.options))
    assert not any(kernel.startswith(GROUP) for kernel in trace.kernels)
