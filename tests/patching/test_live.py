"""Patched modules still see what their own code would see: their class, its module's globals, other packages'
wrappers."""

import functools
import gc
import threading
import types

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama

import mlx_anvil
from lm_models import ARCHITECTURES, tokens
from support import max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5
EPS, SCALE, FACTORS, steps, norms = 1e-5, 1.0, (1.0,), 0, []


def normed(x):
    norms.append(x.shape)
    return mx.fast.rms_norm(x, None, EPS)


def counted(x):
    global steps
    steps += 1
    return mx.fast.rms_norm(x, None, EPS)


def count():
    global steps
    steps += 1


class Scaled(nn.Module):
    calls = 0

    def __call__(self, x):
        type(self).calls += 1
        count()
        product = SCALE * normed(x)
        for factor in FACTORS:
            product = product * factor
        return product, steps, type(self) is Scaled


class Steps(nn.Module):
    def __call__(self, x):
        for _ in range(2):
            x = mx.fast.rms_norm(x, None, EPS)
            yield x


class Worker(nn.Module):
    """Its call runs in a thread of its own."""

    def norm(self, x, results):
        with mlx_anvil.trace() as trace, mx.stream(mx.new_stream(mx.cpu)):
            mx.eval(mx.fast.rms_norm(x, None, EPS))
        results += trace.kernels

    def __call__(self, x):
        results = []
        thread = threading.Thread(target=self.norm, args=(x, results))
        thread.start()
        thread.join()
        return results


@pytest.fixture
def x():
    return mx.random.normal((3, 8))


def kernels_of(function, *arguments):
    with mlx_anvil.trace() as trace:
        mx.eval(function(*arguments))
    return trace.kernels


def test_globals_are_those_of_now(x, monkeypatch):
    monkeypatch.setattr(Scaled, "calls", 0)
    module = Scaled()
    want, first, is_class = module(x)
    mlx_anvil.patch(module)
    assert is_class
    assert vars(module) == vars(Scaled())
    product, second, is_class = module(x)
    assert (second, is_class, Scaled.calls) == (first + 1, True, 2)
    assert max_error(product, want) <= LIMIT
    for name, value, factor in (("SCALE", 3.0, 3.0), ("FACTORS", (0.5, 0.25), 0.375)):
        monkeypatch.setitem(globals(), name, value)
        assert len(kernels_of(module, x)) == 1
        assert max_error(module(x)[0], factor * want) <= LIMIT
    monkeypatch.setitem(globals(), "EPS", 1.0)
    rows = x.astype(mx.float32)
    exact = 3.0 * 0.125 * rows / mx.sqrt(mx.mean(rows * rows, axis=-1, keepdims=True) + 1.0)
    assert max_error(module(x)[0], exact) <= LIMIT


def test_a_name_that_is_deleted_raises(x, monkeypatch):
    module = Scaled()
    mlx_anvil.patch(module)
    monkeypatch.delitem(globals(), "SCALE")
    with pytest.raises(NameError, match="SCALE"):
        module(x)


@pytest.mark.parametrize("name", ["normed", "mx"])
def test_a_helper_that_is_replaced_later(x, monkeypatch, name):
    module = Scaled()
    report = mlx_anvil.patch(module)
    replaced = []

    def other(x, *arguments):
        replaced.append(x.shape)
        return x

    value = other if name == "normed" else types.SimpleNamespace(fast=types.SimpleNamespace(rms_norm=other))
    monkeypatch.setitem(globals(), name, value)
    product, _, _ = module(x)
    assert product is not None
    assert replaced == [x.shape]
    if name == "mx":
        (fallback,) = report.fallbacks
        assert "call patch() again" in fallback.reason
    monkeypatch.undo()
    assert len(kernels_of(module, x)) == 1


def test_a_function_of_mlx_that_is_replaced_later(x, monkeypatch):
    norm, calls, rms_norm = nn.RMSNorm(8), [], mx.fast.rms_norm
    report = mlx_anvil.patch(norm)

    def profiled(*arguments, **options):
        calls.append(arguments)
        return rms_norm(*arguments, **options)

    monkeypatch.setattr(mx.fast, "rms_norm", profiled)
    norm(x)
    assert len(calls) == 1
    (fallback,) = report.fallbacks
    assert (fallback.op, fallback.count) == ("rms_norm", 1)
    with mlx_anvil.strict(), pytest.raises(RuntimeError, match=r"call patch\(\) again"):
        norm(x)
    monkeypatch.undo()
    assert len(kernels_of(norm, x)) == 1


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "swiglu"])
def test_a_function_of_mlx_lm_that_is_replaced_later(monkeypatch, name):
    """In a method whose code is copied, and in one that is rewritten."""
    model, batch, calls = ARCHITECTURES["llama"].build(), tokens(1, 5), []
    original, want = getattr(llama, name), model(batch)
    mlx_anvil.patch(model)

    @functools.wraps(original)
    def profiled(*arguments, **options):
        calls.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(llama, name, profiled)
    assert max_error(model(batch), want) <= LIMIT
    assert len(calls) == 2  # one a layer
    monkeypatch.undo()
    assert max_error(model(batch), want) <= LIMIT
    assert len(calls) == 2


def test_a_helper_that_assigns_globals_is_left(x):
    class Counting(nn.Module):
        def __call__(self, x):
            return counted(x)

    module = Counting()
    report = mlx_anvil.patch(module)
    assert report.swapped == ()
    assert [(row.op, row.why) for row in report.left] == [("rms_norm", "counted assigns to globals of its module")]
    before = steps
    module(x)
    assert steps == before + 1


def test_functions_that_no_copy_can_stand_for_are_left(x):
    class Reads(nn.Module):
        def __call__(self, x):
            return mx.fast.rms_norm(x, None, globals()["EPS"])

    class Defines(nn.Module):
        def __call__(self, x):
            class Norm:
                function = mx.fast.rms_norm

            return Norm.function(x, None, EPS)

    for cls, why in ((Reads, "calls globals()"), (Defines, "defines a class")):
        module = cls()
        want = module(x)
        report = mlx_anvil.patch(module)
        assert report.swapped == ()
        assert [row.why for row in report.left] == [f"{cls.__name__}.__call__ {why}"]
        assert mx.array_equal(module(x), want)


def test_a_variable_of_a_decorator_stays_shared(x):
    def counting(function):
        n = 0

        def wrapper(self, x):
            nonlocal n
            n += 1
            return function(self, x), n

        wrapper.count = lambda: n
        return wrapper

    class Decorated(nn.Module):
        @counting
        def __call__(self, x):
            return mx.fast.rms_norm(x, None, EPS)

    module = Decorated()
    module(x)
    mlx_anvil.patch(module)
    assert len(kernels_of(module, x)) == 1
    assert Decorated.__call__.count() == 2
    mlx_anvil.unpatch(module)
    assert module(x)[1] == 3


def test_generators_and_threads(x):
    generator = Steps()
    mlx_anvil.patch(generator)
    results = generator(x)
    with mlx_anvil.trace() as trace:
        first = next(results)
        mlx_anvil.unpatch(generator)  # what has begun goes on
        second = next(results)
        mx.eval(first, second)
    assert len(trace.kernels) == 2
    worker = Worker()
    assert worker(x) == []
    mlx_anvil.patch(worker)
    assert len(worker(x)) == 1


def test_checkpoint_inside_a_method_computes_again_with_ours(x):
    class Block(nn.Module):
        def inner(self, x):
            return mx.fast.rms_norm(x, None, EPS)

        def __call__(self, x):
            return mx.checkpoint(self.inner)(x)

    block, weights = Block(), mx.random.normal(x.shape)
    gradient = mx.grad(lambda x: (block(x) * weights).sum())
    want = gradient(x)
    mlx_anvil.patch(block)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        got = gradient(x)
        mx.eval(got)
    assert max_error(got, want) <= LIMIT
    assert all(event.op == "rms_norm" for event in trace.events)
    assert len(trace.kernels) >= 2


def test_a_module_that_takes_the_place_of_a_patched_one_is_not_patched(x):
    """Patched modules are recognised by identity, which another module may have after they are freed."""
    for _ in range(4):
        norm = nn.RMSNorm(8)
        assert kernels_of(norm, x) == []
        mlx_anvil.patch(norm)
        assert len(kernels_of(norm, x)) == 1
        del norm
        gc.collect()
    assert nn.RMSNorm.__call__._mlx_anvil_route.functions == {}
    mlx_anvil.unpatch(nn.RMSNorm(8))  # restores the method, since no module needs the route


def test_a_wrapper_of_another_package_around_a_route(x, monkeypatch):
    """The wrapper survives patch and unpatch in any order, and is called once."""
    norm, other, calls = nn.RMSNorm(8), nn.RMSNorm(8), []
    gc.collect()
    mlx_anvil.unpatch(norm)  # restores the method, if an earlier test has left a route
    monkeypatch.setattr(nn.RMSNorm, "__call__", nn.RMSNorm.__call__)
    mlx_anvil.patch(norm)
    route = nn.RMSNorm.__call__

    @functools.wraps(route)
    def profiled(self, x):
        calls.append(id(self))
        return route(self, x)

    nn.RMSNorm.__call__ = profiled
    for step in (mlx_anvil.patch, mlx_anvil.unpatch, mlx_anvil.patch):
        calls.clear()
        step(norm)
        assert len(kernels_of(norm, x)) == (step is mlx_anvil.patch)
        assert kernels_of(other, x) == []
        assert calls == [id(norm), id(other)]
    mlx_anvil.unpatch(norm)
    assert nn.RMSNorm.__call__ is profiled


def test_mlx_lm_is_not_touched():
    before = {module: dict(vars(module)) for module in (base, llama, mx, mx.fast, nn)}
    model = ARCHITECTURES["llama"].build()
    mlx_anvil.patch(model)
    mx.eval(model(tokens(1, 5)))
    for module, names in before.items():
        assert dict(vars(module)) == names
