"""Tests of silu_gate beyond the contract: broadcasting, promotion, extremes, sizes, fusion."""

import itertools
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import silu_gate as reference
from support import (
    GRADIENT_FACTOR,
    assert_accurate,
    assert_same_bits,
    kernel_names,
    max_error,
    vjp_of,
    without_copies,
)

silu_gate = mlx_anvil.silu_gate


# ---- shapes and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate_shape", "up_shape"),
    [
        ((4, 1, 6), (5, 1)),
        ((), (3, 4)),
        ((3, 4), ()),
        ((1,), (7, 5)),
        ((64, 130), (130,)),
        ((64, 1), (1, 130)),
        ((2, 3, 4, 5), (3, 1, 5)),
        ((1, 0, 3), (4, 1, 3)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast(gate_shape, up_shape, dtype):
    gate, up = mx.random.normal(gate_shape).astype(dtype), mx.random.normal(up_shape).astype(dtype)
    assert_accurate(silu_gate, reference, [gate, up])
    cotangent = mx.random.normal(silu_gate(gate, up).shape).astype(dtype)
    # A gradient that is summed over broadcast axes is summed by MLX, in the dtype: that is not our error.
    # One that is summed to a single number may cancel to a small one, of which it is a larger share.
    if dtype == mx.float32:
        gradients = vjp_of(silu_gate, 2), vjp_of(reference, 2)
        assert_accurate(*gradients, [gate, up, cotangent], float32_tolerance=1e-4)
    assert [g.shape for g in vjp_of(silu_gate, 2)(gate, up, cotangent)] == [gate_shape, up_shape]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_views(data):
    """Random views: permuted, sliced with steps, broadcast axes, up to five axes."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5), label="shape")
    operands = []
    for name in ("gate", "up"):
        order = data.draw(st.permutations(range(len(shape))), label=f"{name} order")
        steps = data.draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)), label=f"{name} steps")
        ones = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)), label=f"{name} broadcast")
        stored = [1 if one else n * step for n, step, one in zip(shape, steps, ones, strict=True)]
        base = mx.contiguous(mx.random.normal(stored).transpose(order))
        view = base.transpose([order.index(axis) for axis in range(len(shape))])
        operands.append(
            view[tuple(slice(None, None, 1 if one else step) for step, one in zip(steps, ones, strict=True))]
        )
    gate, up = operands
    plain = silu_gate(*(mx.contiguous(mx.broadcast_to(x, shape)) for x in operands))
    assert_same_bits(mx.broadcast_to(silu_gate(gate, up), shape), plain)
    assert_accurate(silu_gate, reference, [gate, up])


def test_more_axes_than_a_kernel_takes():
    shape = (2, 1, 3, 2, 2, 1, 2, 3, 2, 2)
    gate = mx.random.normal(shape).transpose(9, 0, 7, 3, 4, 5, 6, 2, 8, 1)
    up = mx.random.normal(gate.shape)
    assert_accurate(silu_gate, reference, [gate, up])
    compiled = mx.compile(silu_gate, shapeless=True)
    for extent in (2, 3):
        gate = mx.random.normal((extent, *shape)).swapaxes(0, -1)
        up = mx.random.normal(gate.shape)
        assert max_error(compiled(gate, up), silu_gate(gate, up)) == 0


@pytest.mark.parametrize(("a", "b"), list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_promotion(a, b):
    gate, up = mx.random.normal((5, 9)).astype(a), mx.random.normal((5, 9)).astype(b)
    result = silu_gate(gate, up)
    assert result.dtype == (mx.zeros((), a) + mx.zeros((), b)).dtype
    assert_accurate(silu_gate, lambda g, u: reference(g.astype(result.dtype), u.astype(result.dtype))
                    if g.dtype != mx.float64 else reference(g, u), [gate, up])  # fmt: skip
    gradients = mx.grad(lambda g, u: silu_gate(g, u).astype(mx.float32).sum(), argnums=(0, 1))(gate, up)
    assert [g.dtype for g in gradients] == [a, b]


def test_shapes_that_do_not_broadcast():
    with pytest.raises(
        ValueError, match=r"^\[silu_gate\] gate has shape \(2, 3\) and up has shape \(4,\); allowed: shapes"
    ):
        silu_gate(mx.zeros((2, 3)), mx.zeros((4,)))


def test_split_projection_is_read_in_place():
    """gate and up are the halves of one projection, as in Phi."""
    both = mx.random.normal((33, 2 * 1024))
    gate, up = mx.split(both, 2, axis=-1)
    without_copies(silu_gate, gate, up)
    assert_accurate(silu_gate, reference, [gate, up])


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 7, 8, 9, 63, 64, 65, 127, 129, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tail(columns, dtype):
    """Row widths near the vector sizes, in rows that are not adjacent."""
    wide = mx.random.normal((9, 2 * columns + 3)).astype(dtype)
    gate, up = wide[:, :columns], wide[:, columns + 1 : 2 * columns + 1]
    cotangent = mx.random.normal(gate.shape).astype(dtype)
    assert_accurate(silu_gate, reference, [gate, up])
    assert_accurate(vjp_of(silu_gate, 2), vjp_of(reference, 2), [gate, up, cotangent], factor=GRADIENT_FACTOR)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    rows, columns = 2**16 + 1, 2**15
    gate = mx.random.normal((rows, 1)).astype(mx.float16)
    up = mx.random.normal((1, columns)).astype(mx.float16)
    if support.check_simulation:
        pytest.skip("checks record 24 bytes for every byte that a kernel writes: 100 GB for this result")
    result = silu_gate(gate, up)
    mx.eval(result)
    assert result.size > 2**31
    for row in (0, 1, rows // 2, rows - 2, rows - 1):
        assert_same_bits(result[row], silu_gate(gate[row], up[0]))


# ---- extreme values --------------------------------------------------------------------------------------------------


def formula_in_float32(gate: np.ndarray, up: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    """Output and both gradients by the formulas in float32."""
    with np.errstate(all="ignore"):
        small = np.exp(-np.abs(gate))
        major, minor = 1 / (1 + small), small / (1 + small)
        sigmoid, complement = np.where(gate < 0, minor, major), np.where(gate < 0, major, minor)
        return [gate * sigmoid * up, dy * (up * (sigmoid * (1 + gate * complement))), dy * (gate * sigmoid)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype):
    finite = [0.0, 1e-30, 1e-4, 1.0, 10.0, 20.0, 87.0, 88.0, 89.0, 100.0, 104.0, 1e3, 1e4]
    values = [sign * v for v in [*finite, math.inf, math.nan] for sign in (1, -1)]
    gate, up, dy = (np.array(x, np.float32) for x in zip(*itertools.product(values, values, [1.0, -2.0]), strict=True))
    arrays = [mx.array(x).astype(dtype) for x in (gate, up, dy)]
    exact = formula_in_float32(*(np.array(x.astype(mx.float32)) for x in arrays))
    results = [silu_gate(*arrays[:2]), *vjp_of(silu_gate, 2)(*arrays)]
    tolerance = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    # Where e^-|x| is subnormal a backend may take it for zero, and zero times infinity is NaN.
    magnitude = np.abs(gate)
    clear = ~((magnitude > 87.3) & (magnitude < 104) & np.isinf(up))
    for result, want in zip(results, exact, strict=True):
        holds = mx.array(want).astype(dtype).astype(mx.float32)  # what the dtype can hold of it
        smallest = 1e-30 if dtype != mx.float16 else 1e-7
        given = np.array(result.astype(mx.float32))
        np.testing.assert_allclose(given[clear], np.array(holds)[clear], rtol=tolerance, atol=smallest)


def test_finite_gates_never_give_nan():
    gate = mx.concatenate([mx.linspace(-1e4, 1e4, 20001), mx.array([3e38, -3e38, 1e-45, -1e-45])])
    up, dy = mx.random.normal(gate.shape), mx.random.normal(gate.shape)
    for result in (silu_gate(gate, up), *vjp_of(silu_gate, 2)(gate, up, dy)):
        assert not mx.any(mx.isnan(result)).item()


# ---- fusion ----------------------------------------------------------------------------------------------------------


def test_one_kernel_each_way():
    gate, up = mx.random.normal((64, 64)), mx.random.normal((64, 64))
    cotangent = mx.random.normal((64, 64))
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mx.vjp(silu_gate, [gate, up], [cotangent])[1])
    assert kernel_names(trace) == ["silu_gate_backward_float32_flat"]
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mx.jvp(silu_gate, [gate, up], [cotangent, cotangent])[1])
    assert kernel_names(trace) == ["silu_gate_jvp_float32_flat"]
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mx.vmap(silu_gate, in_axes=(0, None))(gate, up[0]))
    assert kernel_names(trace) == ["silu_gate_forward_float32_strided"]


def test_second_derivative_is_composed_and_says_so():
    gate, up = mx.random.normal((8,)), mx.random.normal((8,))

    def second():
        return mx.grad(lambda g: mx.grad(lambda x: silu_gate(x, up).sum())(g).sum())(gate)

    with mlx_anvil.trace() as trace:
        mx.eval(second())
    assert [event.reason for event in trace.fallbacks] == ["the gradient of SiluGateBackward is a graph of MLX ops"]
    with mlx_anvil.strict(), pytest.raises(RuntimeError, match=r"^\[silu_gate\] strict\(\): no fused kernel"):
        second()


def test_llama_mlp_trains():
    """nn.SwiGLU has the same losses and parameters as the MLP in plain MLX in a short training."""
    mx.random.seed(7)
    ours = mlx_anvil.nn.SwiGLU(16, 40)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 40, bias=False) for _ in range(3))

        def __call__(self, x):
            return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))

    plain = Plain()
    plain.update(ours.parameters())
    x = mx.random.normal((64, 16))
    y = mx.sin(x)
    losses = {}
    for name, model in (("ours", ours), ("plain", plain)):
        step = nn.value_and_grad(model, lambda m: nn.losses.mse_loss(m(x), y))
        losses[name] = []
        for _ in range(20):
            loss, gradients = step(model)
            model.update(nn.utils.tree_map(lambda p, g: p - 1.0 * g, model.parameters(), gradients))
            losses[name].append(loss.item())
    assert losses["ours"][-1] < 0.95 * losses["ours"][0]
    np.testing.assert_allclose(losses["ours"], losses["plain"], rtol=1e-5)
