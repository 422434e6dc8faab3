"""Which calls ``patch`` finds in the methods of a module, in all spellings, and which it leaves."""

import functools

import mlx.core as core
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.core import fast
from mlx.core.fast import rms_norm

import mlx_anvil
from support import max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5  # of float32 with attention
counted = 0


def normed(x):
    return mx.fast.rms_norm(x, None, 1e-5)


def even(x, depth):
    return odd(x, depth - 1) if depth else x


def odd(x, depth):
    return even(normed(x), depth - 1)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Attribute(nn.Module):
    def __call__(self, x):
        return core.fast.rms_norm(x, None, 1e-5)


class NameOfModule(nn.Module):
    def __call__(self, x):
        return fast.rms_norm(x, None, 1e-5)


class NameOfFunction(nn.Module):
    def __call__(self, x):
        return rms_norm(x, None, eps=1e-5)


class Helper(nn.Module):
    def __call__(self, x):
        return mx.concatenate([normed(rows) for rows in (x,)])


class FunctionsThatCallEachOther(nn.Module):
    def __call__(self, x):
        return even(x, 2)


class Decorated(nn.Module):
    @logged
    def __call__(self, x):
        return normed(x)


class InnerFunction(nn.Module):
    def __call__(self, x):
        return (lambda row: mx.fast.rms_norm(row, None, 1e-5))(x)


def norm_with(library):
    def call(self, x):
        return library.rms_norm(x, None, 1e-5)

    return call


class Closure(nn.Module):
    __call__ = norm_with(mx.fast)


def recursive():
    def call(self, x, depth=0):
        return mx.fast.rms_norm(x, None, 1e-5) if depth == 0 else call(self, x, depth - 1)

    return call


class InnerFunctionThatCallsItself(nn.Module):
    __call__ = recursive()


class OtherMethod(nn.Module):
    def norm(self, x, *, eps=1e-5):
        return mx.fast.rms_norm(x, None, eps)

    def __call__(self, x):
        return self.norm(x)


class Inherited(OtherMethod):
    pass


class UsesSuper(Decorated):
    def __call__(self, x):
        return super().__call__(x) + mx.fast.rms_norm(x, None, 1e-5)


FORMS = [
    Attribute,
    NameOfModule,
    NameOfFunction,
    Helper,
    FunctionsThatCallEachOther,
    Decorated,
    InnerFunction,
    Closure,
    InnerFunctionThatCallsItself,
    OtherMethod,
    Inherited,
]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_call(form):
    module, x = form(), mx.random.normal((3, 8))
    want = module(x)
    report = mlx_anvil.patch(module)
    assert [(row.path, row.op) for row in report.swapped] == [("", "rms_norm")]
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        assert max_error(module(x), want) <= LIMIT
    assert len(trace.kernels) == 1


def test_a_method_behind_super():
    module, x = UsesSuper(), mx.random.normal((3, 8))
    want = module(x)
    mlx_anvil.patch(module)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        assert max_error(module(x), want) <= LIMIT
    assert len(trace.kernels) == 2


def test_a_method_that_assigns_globals_is_left():
    class Counting(nn.Module):
        def __call__(self, x):
            global counted
            counted += 1
            return normed(x)

    module = Counting()
    report = mlx_anvil.patch(module)
    assert report.swapped == ()
    (row,) = report.left
    assert row.why == "Counting.__call__ assigns to globals of its module"
    module(mx.ones((2, 8)))
    assert counted == 1


class Mlp(nn.Module):
    """A SwiGLU MLP written inline, with other names."""

    def __init__(self, bias=False):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(32, 64, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(64, 32, bias=bias)

    def __call__(self, x):
        """A method with a docstring."""
        return self.w2(nn.silu(self.w1(x)) * self.w3(x))


class Other(Mlp):
    """Uses the same functions as a SwiGLU MLP, but is not one."""

    def __call__(self, x):
        return self.w2(nn.silu(self.w1(x)) + self.w3(x))


def quantize(mlp, up_group=32):
    mlp.w1 = mlp.w1.to_quantized(32, 4)
    mlp.w3 = mlp.w3.to_quantized(up_group, 4) if up_group else mlp.w3


@pytest.mark.parametrize(
    ("bias", "up_group", "op"),
    [(False, 32, "quantized_swiglu"), (True, 32, "silu_gate"), (False, 16, "silu_gate"), (False, None, "silu_gate")],
)
def test_quantized_mlp_in_line(bias, up_group, op):
    """Gate and up run in one kernel if they have the same format and no bias."""
    mlp, x = Mlp(bias), mx.random.normal((2, 3, 32))
    if up_group != 16:
        quantize(mlp, up_group)
    else:
        mlp.w1, mlp.w3 = mlp.w1.to_quantized(32, 4), mlp.w3.to_quantized(32, 8)
    want = mlp(x)
    report = mlx_anvil.patch(mlp)
    assert "silu_gate, quantized_swiglu" in {row.op for row in report.swapped}
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        assert max_error(mlp(x), want) <= LIMIT
    assert op in {event.op for event in trace.events}


def test_quantized_mlp_without_the_option():
    mlp, x = Mlp(), mx.random.normal((3, 32))
    quantize(mlp)
    mlx_anvil.patch(mlp, quantized=False)
    with mlx_anvil.trace() as trace:
        mx.eval(mlp(x))
    assert {event.op for event in trace.events} == {"silu_gate"}


def test_what_only_looks_like_an_mlp_is_left():
    report = mlx_anvil.patch(Other())
    assert report.swapped == ()
    (row,) = report.left
    assert (row.what, row.why) == ("silu", "no kernel for an activation without a gate")


def test_modules_of_mlx():
    """A tree of ``mlx.nn`` alone, with its attention, norms and rotary embedding."""
    layer = nn.TransformerEncoderLayer(32, 4)
    positions = nn.RoPE(8, traditional=True)
    x, mask = mx.random.normal((2, 5, 32)), nn.MultiHeadAttention.create_additive_causal_mask(5)

    def output(x):
        return layer(positions(x), mask)

    def gradient(x):
        return mx.grad(lambda x: output(x).square().sum())(x)

    want = output(x), gradient(x)
    reports = [mlx_anvil.patch(module) for module in (layer, positions)]
    assert {row.op for report in reports for row in report.swapped} == {"flash_attention", "layer_norm", "rope"}
    with mlx_anvil.strict():
        assert max_error(output(x), want[0]) <= LIMIT
        assert max_error(gradient(x), want[1]) <= LIMIT


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("weight", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_dtypes_of_norms(norm, dtype, weight):
    """As in MLX, a wider weight widens the result."""
    module, x = norm(8), mx.random.normal((3, 8)).astype(dtype)
    module.set_dtype(weight)
    want = module(x)
    report = mlx_anvil.patch(module)
    got = module(x)
    assert got.dtype == want.dtype
    assert max_error(got, want) <= {mx.float32: LIMIT, mx.float16: 2e-3, mx.bfloat16: 2e-2}[got.dtype]
    assert report.fallbacks == ()
