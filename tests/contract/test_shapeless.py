"""Graphs compiled for any shapes: nothing that an op derives from a shape keeps its value of the first call."""

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import flash_attention, quantized_gemv, quantized_matmul, rms_norm, rope, silu_gate, softmax_topk
from support import OTHER_KERNEL, assert_same_bits, kernel_names, max_error, on_one_device


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def quantized(outputs: int, columns: int) -> tuple[mx.array, ...]:
    matrix = mx.quantize(normal(outputs, columns))
    mx.eval(matrix)  # a graph that captures them would make them again, for other shapes
    return matrix


def assert_serves(function, *calls) -> None:
    compiled = mx.compile(function, shapeless=True)
    for arrays in calls:
        wanted = function(*arrays)
        with on_one_device():
            results = compiled(*arrays)
        for a, b in zip(results, wanted, strict=True):
            assert max_error(a, b) <= OTHER_KERNEL


def test_default_scale_of_attention():
    assert_serves(lambda q: [flash_attention(q, q, q)], [normal(1, 2, 3, 8)], [normal(1, 2, 3, 32)])


def test_attention_changes_its_route():
    """From a kernel to a graph of MLX ops and back."""
    calls = [[normal(1, 2, 9, dim)] for dim in (8, 260, 16)]
    assert_serves(lambda q: [flash_attention(q, q, q)], *calls)
    assert_serves(mx.grad(lambda q: flash_attention(q, q, q).sum()), [calls[0][0]])
    gradient = mx.grad(lambda q: (flash_attention(q, q, q) ** 2).sum())
    assert_serves(lambda q: [gradient(q)], *calls)


def test_causal_jvp_of_attention_at_other_lengths():
    def tangent(q, k):
        return mx.jvp(lambda a, b: flash_attention(a, b, b, mask="causal", window_size=4), [q, k], [q, k])[1]

    assert_serves(tangent, *([normal(1, 4, n, 8), normal(1, 2, m, 8)] for n, m in ((1, 1), (3, 7), (5, 5))))


def test_gradient_sums_over_the_axes_that_are_broadcast_now():
    gradient = mx.grad(lambda q, mask: (flash_attention(q, q, q, mask=mask) ** 2).sum(), argnums=1)
    calls = [[normal(2, 2, 3, 8), normal(*shape)] for shape in ((2, 2, 3, 3), (1, 2, 1, 3), (2, 1, 3, 1))]
    assert_serves(lambda *xs: [gradient(*xs)], *calls)
    gradients = mx.grad(lambda gate, up: (silu_gate(gate, up) ** 2).sum(), argnums=(0, 1))
    assert_serves(
        gradients, *([normal(*a), normal(*b)] for a, b in (((1, 5), (4, 5)), ((4, 5), (4, 1)), ((3, 2),) * 2))
    )


def test_router_changes_its_route():
    """Above 4096 experts there is no kernel."""
    assert_serves(lambda x: list(softmax_topk(x, 5)[:1]), [normal(2, 9)], [normal(1, 4100)], [normal(3, 20)])


def test_groups_of_experts_are_of_the_size_that_they_have_now():
    def router(x, bias):
        return list(softmax_topk(x, 5, e_score_correction_bias=bias, n_group=4, topk_group=2)[:1])

    assert_serves(router, *([normal(3, n), normal(n)] for n in (16, 4100, 40)))


def test_rope_keeps_no_heads():
    calls = [[normal(2, 3, 4, 5, 8)], [normal(1, 2, 2, 7, 10)]]
    assert_serves(lambda x: [rope(x, 8)], *calls)
    freqs = mx.array([1.0, 3.0])
    gradient = mx.grad(lambda x, f: (rope(x, 4, base=None, freqs=f) ** 2 * x).sum(), argnums=(0, 1))
    assert_serves(gradient, *([*call, freqs] for call in calls))


def test_quantized_leading_axes():
    def product(x, w, scales, biases):
        return [quantized_matmul(x, w, scales, biases)]

    w = quantized(4, 128)
    stacks = [[mx.stack([a] * n) for a in w] for n in (2, 3)]
    assert_serves(product, *([normal(1, 5, 128), *stack] for stack in stacks))
    assert_serves(product, *([normal(n, 5, 128), *stack] for n, stack in zip((2, 3), stacks, strict=True)))


def test_a_scattered_gradient():
    w = quantized(7, 64)
    gradient = mx.grad(
        lambda scales, biases, ids: (mlx_anvil.quantized_embedding(ids, w[0], scales, biases) ** 2).sum(),
        argnums=(0, 1),
    )
    assert_serves(gradient, [*w[1:], mx.array([[1, 1, 0]])], [*w[1:], mx.array([[2], [2]])])


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_other_shapes_are_checked():
    """Without the check a kernel would read past an array."""
    attention = mx.compile(lambda q, k, v: flash_attention(q, k, v), shapeless=True)
    attention(*(normal(1, 2, 5, 8) for _ in range(3)))
    with pytest.raises(ValueError, match=r"^\[flash_attention\] k has shape .*allowed: the same length"):
        attention(normal(1, 2, 5, 8), normal(1, 2, 50, 8), normal(1, 2, 5, 8))
    norm = mx.compile(rms_norm, shapeless=True)
    norm(normal(3, 8), normal(8))
    with pytest.raises(ValueError, match=r"^\[rms_norm\] weight has shape \(8,\); allowed: \(9,\)"):
        norm(normal(3, 9), normal(8))
    w = quantized(4, 128)
    product = mx.compile(lambda x: quantized_gemv(x, *w), shapeless=True)
    product(normal(3, 128))
    with pytest.raises(ValueError, match=r"^\[quantized_gemv\] x has shape \(9, 128\), 9 rows"):
        product(normal(9, 128))


def test_errors_of_derivatives_come_with_the_first_call():
    offset = mx.array(3)
    derivative = mx.compile(mx.grad(lambda o, x: rope(x, 4, offset=o).sum()), shapeless=True)
    with pytest.raises(ValueError, match=r"^\[grad\]|^\[rope\]"):
        derivative(offset, normal(1, 2, 3, 4))
    w = quantized(4, 128)
    derivative = mx.compile(mx.grad(lambda x: quantized_matmul(x, *w).sum()), shapeless=True)
    assert derivative(normal(2, 128)).shape == (2, 128)

    def second(x, s):
        def gradient(s):
            return mx.grad(lambda s: (mlx_anvil.quantized_embedding(x, w[0], s, w[2]) ** 2).sum())(s)

        return mx.jvp(gradient, [s], [s])[1][0]

    compiled = mx.compile(second, shapeless=True)
    for ids in (mx.array([0, 0]), mx.array([3, 1, 3])):
        assert mx.allclose(compiled(ids, w[1]), second(ids, w[1]), rtol=1e-4)


def test_strict_and_trace():
    call = mx.compile(lambda q: flash_attention(q, q, q), shapeless=True)
    mx.eval(call(normal(1, 2, 9, 8)))
    with mlx_anvil.trace() as trace:
        mx.eval(call(normal(1, 2, 9, 16)))
    assert len(kernel_names(trace)) == 1
    assert not trace.fallbacks
    with mlx_anvil.trace() as trace:
        mx.eval(call(normal(1, 2, 9, 1030)))
    assert len(trace.fallbacks) == 1
    with mlx_anvil.strict(), pytest.raises(RuntimeError, match=r"^\[flash_attention\] strict\(\)"):
        call(normal(1, 2, 9, 1030))


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_inputs_lend_their_memory():
    """If the node is one kernel, as without shapeless=True."""
    compiled = mx.compile(silu_gate, shapeless=True)
    up = normal(64, 1024)
    mx.eval(up, compiled(up, up))
    x = normal(64, 1024) * 2
    wanted = silu_gate(x, up)
    mx.eval(wanted)
    y = normal(1, 1)
    peak = []
    for function in (silu_gate, compiled):
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(function(x * y, up))
        peak.append(mx.get_peak_memory() - before)
    assert peak[1] <= peak[0] + 4096
    assert_same_bits(compiled(x * 1, up), wanted)


def test_streams():
    """The graph inside a node uses the stream of the op, not the default stream."""
    stream = mx.new_stream(mx.default_device())

    def gradient(x, w):
        return mx.vjp(lambda a, b: rms_norm(a, b, stream=stream), [x, w], [x])[1]

    def second(x, w):
        return mx.vjp(lambda a, b: [g * 1 for g in gradient(a, b)], [x, w], [x, w])[1]

    default = mx.default_stream(mx.default_device())
    assert_serves(second, [normal(3, 8), normal(8)], [normal(5, 9), normal(9)])
    assert mx.default_stream(mx.default_device()) == default


def test_results_that_are_one_array():
    """The gradients of x and of the residual are one array. mx.vjp would use only one of its two cotangents."""

    def gradients(x, r, w, weights):
        first = mx.grad(lambda x, r: (rms_norm(x, w, residual=r)[0] ** 2).sum(), argnums=(0, 1))
        return mx.grad(lambda x, r: sum((g * h).sum() for g, h in zip(first(x, r), weights, strict=True)))(x, r)

    def flat(x, r, w, a, b):
        return [gradients(x, r, w, [a, b])]

    shapes = [[(3, 8), (3, 8), (8,), (3, 8), (3, 8)], [(2, 9), (2, 9), (9,), (2, 9), (2, 9)]]
    assert_serves(flat, *([normal(*s) for s in each] for each in shapes))
