"""The norms of patched models compute the residual sum before them, unless something forbids it."""

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import _ext
from support import assert_same_bits, normal

pytestmark = pytest.mark.cpu_only

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
WEIGHT = mx.ones((96,)) * 0.5


def rms_norm(x: mx.array) -> mx.array:
    return _ext._rms_norm_after_sum(x, WEIGHT.astype(x.dtype), 1e-5)


def layer_norm(x: mx.array) -> mx.array:
    return _ext._layer_norm_after_sum(x, WEIGHT.astype(x.dtype), None, 1e-5)


NORMS = {"rms": (rms_norm, mlx_anvil.rms_norm), "layer": (layer_norm, mlx_anvil.layer_norm)}


def nodes_of(tmp_path, *arrays: mx.array) -> str:
    path = tmp_path / "graph.dot"
    mx.export_to_dot(str(path), *arrays)
    return path.read_text()


def is_fused(tmp_path, *arrays: mx.array) -> bool:
    return '"Add"' not in nodes_of(tmp_path, *arrays)


def terms(dtype: mx.Dtype = mx.float32, shape: tuple[int, ...] = (2, 3, 96)) -> tuple[mx.array, mx.array]:
    x, y = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    mx.eval(x, y)
    return x, y


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96,), (1, 1, 96), (7, 96), (2, 3, 5, 96), (0, 96)], ids=str)
def test_bits_are_those_of_the_steps(name, dtype, shape, tmp_path):
    ours, steps = NORMS[name]
    x, y = terms(dtype, shape)
    total = x + y
    mx.eval(total)
    want = steps(total, WEIGHT.astype(dtype), eps=1e-5)
    h = x + y
    alias = h
    result = ours(h)
    assert is_fused(tmp_path, result, h)
    after = h + 1
    assert_same_bits(result, want)
    assert_same_bits(h, total)
    assert_same_bits(after, total + 1)
    assert alias is h


def test_large_and_strided_terms(tmp_path):
    x, y = terms(mx.float16, (96, 600))
    h = x.T + y.T
    want = x.T + y.T
    mx.eval(want)
    assert_same_bits(rms_norm(h), mlx_anvil.rms_norm(want, WEIGHT.astype(mx.float16), 1e-5))
    assert_same_bits(h, want)


def test_who_used_the_sum_before_keeps_it():
    x, y = terms()
    h = x + y
    before = h * 2
    kept = [h]
    result = rms_norm(h)
    del h
    mx.eval(before, kept, result)
    assert_same_bits(before, (x + y) * 2)
    assert_same_bits(kept[0], x + y)
    assert_same_bits(result, mlx_anvil.rms_norm(mx.array(x + y), WEIGHT, 1e-5))


def test_a_sum_in_place(tmp_path):
    x, y = terms()
    h = x + 0
    mx.eval(h)
    h += y
    result = rms_norm(h)
    assert is_fused(tmp_path, result, h)
    assert_same_bits(h, x + y)
    h += y
    assert_same_bits(h, (x + y) + y)


def test_two_norms_of_one_sum(tmp_path):
    x, y = terms()
    h = x + y
    first, second = rms_norm(h), layer_norm(h)
    assert is_fused(tmp_path, first, second)
    assert_same_bits(first, mlx_anvil.rms_norm(mx.array(x + y), WEIGHT, 1e-5))
    assert_same_bits(second, mlx_anvil.layer_norm(mx.array(x + y), WEIGHT, None, 1e-5))


def kernels_of(*arrays: mx.array) -> list[str]:
    with mlx_anvil.trace() as trace:
        mx.eval(*arrays)
    return trace.kernels


def test_sums_that_are_left(tmp_path):
    x, y = terms()
    evaluated = x + y
    mx.eval(evaluated)
    scheduled = x + y
    mx.async_eval(scheduled)
    broadcast = x + y[:1, :1]
    stretched = x + mx.broadcast_to(y[0, 0], x.shape)
    scalar = x + 1
    with mx.stream(mx.new_stream(mx.cpu)):
        elsewhere = x + y
    for h in (evaluated, scheduled, broadcast, stretched, scalar, elsewhere, x - y, x):
        was = mx.array(h)
        mx.eval(was)
        result = rms_norm(h)
        assert_same_bits(result, mlx_anvil.rms_norm(was, WEIGHT, 1e-5))
        assert_same_bits(h, was)
    for h in (x + 1, x + y[:1, :1], x + mx.broadcast_to(y[0, 0], x.shape)):
        assert not is_fused(tmp_path, rms_norm(h))
    with mlx_anvil.composed():
        h = x + y
        assert not is_fused(tmp_path, rms_norm(h))


@pytest.mark.parametrize("name", NORMS)
def test_transformations(name):
    ours, steps = NORMS[name]
    x, y = terms()

    def function(norm):
        def call(x, y):
            h = x + y
            return (norm(h) * h + h).sum()

        return call

    fused, plain = function(ours), function(lambda h: steps(h, WEIGHT, eps=1e-5))
    for fused_of, plain_of in (
        (mx.grad(fused, argnums=(0, 1)), mx.grad(plain, argnums=(0, 1))),
        (mx.compile(mx.grad(fused, argnums=(0, 1))), mx.grad(plain, argnums=(0, 1))),
        (mx.grad(mx.checkpoint(fused), argnums=(0, 1)), mx.grad(plain, argnums=(0, 1))),
        (lambda *a: [mx.vmap(fused)(*a)], lambda *a: [mx.vmap(plain)(*a)]),
        (lambda *a: [mx.compile(fused)(*a)], lambda *a: [plain(*a)]),
        (lambda *a: [mx.compile(fused, shapeless=True)(*a)], lambda *a: [plain(*a)]),
        (lambda *a: mx.jvp(fused, a, a)[1], lambda *a: mx.jvp(plain, a, a)[1]),
    ):
        for one, other in zip(fused_of(x, y), plain_of(x, y), strict=True):
            assert mx.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_sum_outside_of_a_gradient():
    x, y = terms()
    h = x + y
    gradient = mx.grad(lambda w: _ext._rms_norm_after_sum(h, w, 1e-5).sum())(WEIGHT)
    total = x + y
    mx.eval(total)
    want = mx.grad(lambda w: mlx_anvil.rms_norm(total, w, 1e-5).sum())(WEIGHT)
    assert mx.allclose(gradient, want, rtol=1e-5, atol=1e-5)
    assert_same_bits(h, total)


def test_memory_is_freed():
    x, y = terms(shape=(64, 96))
    mx.eval(WEIGHT)
    before = mx.get_active_memory()
    h = x + y
    result = rms_norm(h)
    mx.eval(result)
    del h, result
    assert mx.get_active_memory() == before


def test_errors_leave_the_sum():
    x, y = terms()
    h = x + y
    with pytest.raises(ValueError, match=r"^\[rms_norm\] weight has shape"):
        _ext._rms_norm_after_sum(h, mx.ones((5,)), 1e-5)
    assert_same_bits(h, x + y)
    with pytest.raises(TypeError, match=r"^\[rms_norm\] x is a"):
        _ext._rms_norm_after_sum(None, WEIGHT, 1e-5)
