"""Tests of rms_norm and layer_norm beyond the contract: both results, dtypes of the weight, widths, views, batches,
modules."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import layer_norm, reference, rms_norm
from mlx_anvil.reference import DTYPES
from support import (
    GRADIENT_FACTOR,
    OTHER_KERNEL,
    assert_accurate,
    assert_same_bits,
    in_float64,
    kernel_names,
    max_error,
    normal,
    vjp_of,
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NORMS = {"rms_norm": (rms_norm, reference.rms_norm), "layer_norm": (layer_norm, reference.layer_norm)}
each_norm = pytest.mark.parametrize("name", NORMS)


# ---- results and dtypes ----------------------------------------------------------------------------------------------


@each_norm
@each_dtype
def test_both_results_and_their_gradients(name, dtype):
    """Checks y and h separately (the contract checks their sum), with a cotangent for each."""
    ours, definition = NORMS[name]
    arrays = [normal(5, 129, dtype=dtype) for _ in range(2)]

    def of(norm):
        return lambda x, residual: norm(x, residual=residual)

    assert_accurate(of(ours), of(definition), arrays)
    cotangents = [normal(5, 129, dtype=dtype) for _ in range(2)]
    assert_accurate(vjp_of(of(ours), 2), vjp_of(of(definition), 2), [*arrays, *cotangents], factor=GRADIENT_FACTOR)


@each_dtype
def test_norm_is_of_the_rounded_sum(dtype):
    x, residual = normal(3, 96, dtype=dtype), normal(3, 96, dtype=dtype)
    y, h = rms_norm(x, residual=residual)
    assert_same_bits(h, x + residual)
    assert_same_bits(y, rms_norm(h))


@each_norm
@each_dtype
def test_weight_of_another_dtype(name, dtype):
    """The weight is used in float32, and its gradient has its own dtype."""
    norm, _ = NORMS[name]
    x = normal(9, 67, dtype=dtype)
    for weight_dtype in DTYPES:
        weight = normal(67, dtype=weight_dtype)
        y = norm(x, weight)
        assert y.dtype == dtype
        exact = norm(x.astype(mx.float32), weight.astype(mx.float32))
        assert max_error(y, exact) <= {mx.float32: OTHER_KERNEL, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
        dx, dw = mx.grad(lambda x, w: (norm(x, w).astype(mx.float32) ** 2).sum(), argnums=(0, 1))(x, weight)
        assert (dx.dtype, dw.dtype) == (dtype, weight_dtype)


def test_rows_promote():
    y, h = rms_norm(normal(4, 8, dtype=mx.float16), residual=normal(4, 8, dtype=mx.bfloat16))
    assert y.dtype == h.dtype == mx.float32


def test_matches_mlx():
    x, weight, bias = normal(7, 130), normal(130), normal(130)
    assert max_error(rms_norm(x, weight, 1e-3), mx.fast.rms_norm(x, weight, 1e-3)) <= OTHER_KERNEL
    assert max_error(layer_norm(x, weight, bias, 1e-3), mx.fast.layer_norm(x, weight, bias, 1e-3)) <= OTHER_KERNEL
    assert max_error(layer_norm(x, bias=bias), mx.fast.layer_norm(x, None, bias, 1e-5)) <= OTHER_KERNEL


def test_large_mean_does_not_cancel():
    x = 1000 + normal(4, 257)
    (exact,) = in_float64(reference.layer_norm, [x])
    assert max_error(layer_norm(x), exact) <= 1e-4  # x itself has a unit of 2^-14


@pytest.mark.parametrize("columns", [7, 300, 5000])
@pytest.mark.parametrize("equal", [True, False], ids=["equal cotangents", "random cotangents"])
def test_gradient_of_rows_with_a_large_mean(columns, equal):
    """Equal cotangents cancel to zero. The rounding of the mean must not appear instead."""
    weight, d_y = (mx.ones(columns), mx.ones((5, columns))) if equal else (normal(columns), normal(5, columns))
    arrays = [1000 + normal(5, columns), weight, mx.zeros(columns), d_y]
    exact = in_float64(vjp_of(reference.layer_norm, 3), arrays)
    for result, truth in zip(vjp_of(layer_norm, 3)(*arrays), exact, strict=True):
        assert max_error(result, truth, scale=1.0) < 2e-5


def test_all_extras_at_once():
    arrays = [normal(6, 40), 1 + 0.3 * normal(40), normal(6, 40), normal(6, 40)]

    def of(norm):
        def function(x, weight, residual, gate):
            return norm(x, weight, residual=residual, gate=gate, weight_offset=0.5)

        return function

    assert_accurate(of(rms_norm), of(reference.rms_norm), arrays)
    cotangents = [normal(6, 40) for _ in range(2)]
    assert_accurate(vjp_of(of(rms_norm), 4), vjp_of(of(reference.rms_norm), 4), [*arrays, *cotangents])


# ---- widths and views ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 2, 7, 9, 31, 33, 63, 65, 255, 256, 513])
@each_norm
def test_every_tail(columns, name):
    ours, definition = NORMS[name]
    # Far from 0, so that rows of one or two columns are not all rounding, and with an eps that bounds their gradients.
    x, weight, cotangent = 2 + normal(3, columns), normal(columns), normal(3, columns)
    of = [lambda x, w, norm=norm: norm(x, w, eps=0.5) for norm in (ours, definition)]
    assert_accurate(*of, [x, weight])
    limits = {"float32_tolerance": 1e-5 if columns > 2 else 1e-4}
    assert_accurate(vjp_of(of[0], 2), vjp_of(of[1], 2), [x, weight, cotangent], **limits)


@each_dtype
def test_heads_of_a_projection_are_read_in_place(dtype):
    """q and k are slices of one product, and each of their heads is normalised by itself."""
    qkv = normal(2, 5, 3 * 4 * 32, dtype=dtype)
    q = qkv[..., : 4 * 32].reshape(2, 5, 4, 32)
    k = qkv[..., 4 * 32 : 8 * 32].reshape(2, 5, 4, 32).swapaxes(1, 2)
    weight = normal(32, dtype=dtype)
    for view in (q, k):
        assert_same_bits(rms_norm(view, weight), rms_norm(mx.contiguous(view), weight))


def test_more_axes_than_a_kernel_walks():
    x = normal(2, 3, 2, 3, 2, 3, 8).transpose(5, 0, 3, 2, 1, 4, 6)
    assert_same_bits(rms_norm(x), rms_norm(mx.contiguous(x)))


@each_norm
def test_rows_do_not_depend_on_one_another(name):
    """A row has the same bits alone and among others."""
    norm, _ = NORMS[name]
    x, weight = normal(33, 300), normal(300)
    whole = norm(x, weight)
    for row in (0, 7, 32):
        assert_same_bits(norm(x[row], weight), whole[row])


def test_broadcast_rows_need_no_copy():
    x = mx.broadcast_to(normal(1, 64), (6, 64))
    with mlx_anvil.trace() as trace:
        y = rms_norm(x)
        mx.eval(y)
    assert kernel_names(trace) in (["rms_norm_forward_float32"], ["rms_norm_forward_float32_float32"])
    assert_same_bits(y[0], y[5])


@each_dtype
@pytest.mark.parametrize("kept", ["x", "gate", "neither"])
@pytest.mark.parametrize("columns", [100, 9000])
def test_the_result_takes_the_memory_of_an_input_that_nobody_else_needs(columns, kept, dtype):
    """The result overwrites x or the gate, for rows that stay in registers and for longer ones."""
    weight = normal(columns, dtype=dtype)
    arrays = {name: normal(180000 // columns, columns, dtype=dtype) for name in ("x", "gate")}
    doubled = {name: 2 * x for name, x in arrays.items()}
    expected = rms_norm(weight=weight, **doubled)
    mx.eval(expected, doubled)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    fresh = {name: doubled[name] if name == kept else 2 * x for name, x in arrays.items()}
    made = 2 - (kept in fresh)
    result = rms_norm(weight=weight, **fresh)
    del fresh
    mx.eval(result)
    assert mx.get_peak_memory() - before <= made * result.nbytes + 65536
    assert_same_bits(result, expected)


# ---- transformations -------------------------------------------------------------------------------------------------


def test_gradient_is_one_kernel_for_rows_and_strict():
    x, weight, residual, gate = normal(5, 64), normal(64), normal(5, 64), normal(5, 64)

    def loss(*arrays):
        y, h = rms_norm(arrays[0], arrays[1], residual=arrays[2], gate=arrays[3])
        return (y * h).sum()

    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        mx.eval(mx.grad(loss, argnums=(0, 1, 2, 3))(x, weight, residual, gate))
    names = kernel_names(trace)
    assert [name.split("_float32")[0] for name in names if "sum_parts" not in name] == [
        "rms_norm_forward",
        "rms_norm_backward",
    ]


@each_norm
def test_vmap_twice_over_weights(name):
    """A second vmap multiplies the groups of rows that have their own weights. The same kernels run."""
    norm, _ = NORMS[name]
    x, weights = normal(2, 3, 4, 40), normal(2, 3, 40)

    def gradients(x, weight):
        return mx.grad(lambda x, w: (norm(x, w) ** 2).sum(), argnums=(0, 1))(x, weight)

    with mlx_anvil.strict():
        y = mx.vmap(mx.vmap(norm))(x, weights)
        dx, dw = mx.vmap(mx.vmap(gradients))(x, weights)
        one_weight = mx.vmap(mx.vmap(gradients, in_axes=(0, None)), in_axes=(0, None))(x, weights[0, 0])[1]
    for i, j in np.ndindex(2, 3):
        assert max_error(y[i, j], norm(x[i, j], weights[i, j])) <= OTHER_KERNEL
        for ours, alone in zip((dx, dw), gradients(x[i, j], weights[i, j]), strict=True):
            assert max_error(ours[i, j], alone) <= OTHER_KERNEL
        assert max_error(one_weight[i, j], gradients(x[i, j], weights[0, 0])[1]) <= OTHER_KERNEL


@each_norm
def test_weight_gradient_of_no_rows(name):
    norm, _ = NORMS[name]
    gradient = mx.grad(lambda w: norm(mx.zeros((0, 16)), w).sum())(normal(16))
    assert mx.array_equal(gradient, mx.zeros(16)).item()


def test_unequal_options_stay_apart():
    compiled = mx.compile(lambda x: rms_norm(x, eps=1.0) - rms_norm(x, eps=2.0))
    assert mx.abs(compiled(normal(3, 8))).max().item() > 0


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": mx.zeros(())}, r"x has shape \(\); allowed: one axis or more"),
        ({"weight": mx.zeros((3,))}, r"weight has shape \(3,\); allowed: \(4,\), the last axis of x"),
        ({"weight": mx.zeros((1, 4))}, r"weight has shape \(1, 4\); allowed: \(4,\)"),
        ({"weight": mx.zeros((4,), mx.int32)}, r"weight has dtype int32; allowed: float32"),
        ({"residual": mx.zeros((4,))}, r"residual has shape \(4,\); allowed: the shape of x, \(2, 4\)"),
        ({"gate": mx.zeros((2, 3))}, r"gate has shape \(2, 3\); allowed: the shape of x, \(2, 4\)"),
        ({"gate": mx.zeros((2, 4), mx.uint8)}, r"gate has dtype uint8; allowed: float32"),
        ({"eps": -1.0}, r"eps is -1\.0*; allowed: finite numbers, 0 or more"),
        ({"eps": math.nan}, r"eps is nan; allowed: finite numbers, 0 or more"),
    ],
)
def test_values_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=r"^\[rms_norm\] " + message):
        rms_norm(**{"x": mx.zeros((2, 4)), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": 1.0}, r"weight is a float; allowed: mlx\.core\.array"),
        ({"residual": [1.0]}, r"residual is a list; allowed: mlx\.core\.array"),
        ({"gate": "x"}, r"gate is a str; allowed: mlx\.core\.array"),
        ({"eps": "x"}, r"eps is a str; allowed: a number"),
        ({"weight_offset": True}, r"weight_offset is a bool; allowed: a number"),
    ],
)
def test_arguments_of_the_wrong_type(arguments, message):
    with pytest.raises(TypeError, match=r"^\[rms_norm\] " + message):
        rms_norm(**{"x": mx.zeros((2, 4)), **arguments})


def test_bias_that_does_not_fit():
    with pytest.raises(ValueError, match=r"^\[layer_norm\] bias has shape \(3,\); allowed: \(4,\)"):
        layer_norm(mx.zeros((2, 4)), bias=mx.zeros((3,)))


# ---- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (mlx_anvil.nn.RMSNorm, nn.RMSNorm, {}),
        (mlx_anvil.nn.LayerNorm, nn.LayerNorm, {}),
        (mlx_anvil.nn.LayerNorm, nn.LayerNorm, {"bias": False}),
        (mlx_anvil.nn.LayerNorm, nn.LayerNorm, {"affine": False}),
    ],
)
def test_modules_load_parameters_of_mlx(ours, theirs, options):
    x, plain, module = normal(3, 32), theirs(32, **options), ours(32, **options)
    assert max_error(module(x), plain(x)) <= OTHER_KERNEL
    for name in plain.parameters():
        plain[name] = normal(32)
    module.update(plain.parameters())
    assert module.parameters().keys() == plain.parameters().keys()
    assert max_error(module(x), plain(x)) <= OTHER_KERNEL
    y, h = module(x, residual=x)
    assert max_error(y, plain(h)) <= OTHER_KERNEL


def test_module_with_weights_less_one():
    gemma, plain, x = mlx_anvil.nn.RMSNorm(16, weight_offset=1.0), mlx_anvil.nn.RMSNorm(16), normal(3, 16)
    assert_same_bits(gemma(x), plain(x))
    assert mx.array_equal(gemma.weight, mx.zeros(16)).item()
