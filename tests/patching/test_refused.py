"""A model is patched completely or not at all. A class whose methods cannot be replaced is left, with the reason."""

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_anvil
from mlx_anvil.patching import _routes
from support import max_error

pytestmark = pytest.mark.cpu_only

LIMIT = 2e-5


class Norm(nn.Module):
    def __call__(self, x):
        return mx.fast.rms_norm(x, None, 1e-5)


class Registered(Norm):
    """Its subclasses have to be named."""

    def __init_subclass__(cls, *, key, **options):
        super().__init_subclass__(**options)


class Final(Norm):
    def __init_subclass__(cls):
        raise TypeError("Final has no subclasses")


class Slots(Norm):
    __slots__ = ("extra",)


class Closed(type):
    """Classes with it keep the attributes that they were made with."""

    def __setattr__(cls, name, value):
        raise AttributeError(f"{cls.__name__} is closed")


class Silent(type):
    def __setattr__(cls, name, value):
        pass


class HalfClosed(type):
    def __setattr__(cls, name, value):
        if name == "second":
            raise AttributeError("no second")
        super().__setattr__(name, value)


class ClosedNorm(nn.Module, metaclass=Closed):
    __call__ = Norm.__call__


class SilentNorm(nn.Module, metaclass=Silent):
    __call__ = Norm.__call__


class HalfClosedNorm(nn.Module, metaclass=HalfClosed):
    __call__ = Norm.__call__

    def first(self, x):
        return mx.fast.rms_norm(x, None, 1e-5)

    def second(self, x):
        return mx.fast.rms_norm(x, None, 1e-5)


def kernels_of(function, *arguments):
    with mlx_anvil.trace() as trace:
        mx.eval(function(*arguments))
    return trace.kernels


@pytest.fixture
def x():
    return mx.random.normal((3, 8))


@pytest.mark.parametrize("cls", [Registered, Final, Slots])
def test_classes_that_cannot_be_subclassed(cls, x):
    model = nn.Sequential(cls(), nn.RMSNorm(8))
    want = model(x)
    report = mlx_anvil.patch(model)
    assert [row.path for row in report.swapped] == ["layers.0", "layers.1"]
    with mlx_anvil.strict():
        assert max_error(model(x), want) <= LIMIT
    assert len(kernels_of(model, x)) == 2


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (ClosedNorm, "AttributeError: ClosedNorm is closed"),
        (SilentNorm, "TypeError: assigning SilentNorm.__call__ had no effect"),
        (HalfClosedNorm, "AttributeError: no second"),
    ],
)
def test_classes_that_take_no_other_methods(cls, why, x):
    model = nn.Sequential(nn.RMSNorm(8), cls(), nn.LayerNorm(8))
    want, was = model(x), dict(vars(cls))
    report = mlx_anvil.patch(model)
    assert [(row.path, row.op) for row in report.swapped] == [("layers.0", "rms_norm"), ("layers.2", "layer_norm")]
    assert {(row.path, row.op, row.why) for row in report.left} == {
        ("layers.1", "rms_norm", f"the methods of {cls.__name__} cannot be replaced: {why}")
    }
    assert dict(vars(cls)) == was
    assert max_error(model(x), want) <= LIMIT
    assert len(kernels_of(model, x)) == 2
    mlx_anvil.unpatch(model)
    assert kernels_of(model, x) == []


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("point", ["install", "weakref"])
def test_an_exception_leaves_the_model_as_it_was(patched, point, x, monkeypatch):
    """An exception while classes are patched, and while modules are patched."""
    model, original = nn.Sequential(nn.RMSNorm(8), nn.LayerNorm(8)), nn.LayerNorm.__call__
    if patched:
        mlx_anvil.patch(model, norm=True)
    classes = {cls: dict(vars(cls)) for cls in (nn.RMSNorm, nn.LayerNorm, nn.Sequential)}
    kernels, done = kernels_of(model, x), []

    def interrupted(*arguments):
        done.append(arguments)
        if len(done) == 2:
            raise KeyboardInterrupt
        return actual(*arguments)

    where, name = (_routes, "_assign") if point == "weakref" else (mlx_anvil.patching._patch, "install")
    actual = getattr(where, name)
    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        mlx_anvil.patch(model)
    monkeypatch.undo()
    assert {cls: dict(vars(cls)) for cls in classes} == classes
    assert kernels_of(model, x) == kernels
    mlx_anvil.unpatch(model)
    assert nn.LayerNorm.__call__ is getattr(original, "__wrapped__", original)


class Attention(nn.Module):
    """Calls MLX's attention with an argument that ours lacks, or with a mask that ours refuses."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def __call__(self, x):
        return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.5, **self.options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"force_fused": False}, "force_fused is no argument: mlx_anvil.strict() raises where"),
        ({"mask": mx.ones((1, 1, 4, 4), mx.int32)}, "mask has dtype int32; allowed: bool"),
    ],
    ids=["argument", "mask"],
)
def test_calls_that_our_op_refuses_run_as_before(options, reason):
    model, heads = Attention(**options), mx.random.normal((1, 2, 4, 8))
    before = model(heads)
    report = mlx_anvil.patch(model)
    assert max_error(model(heads), before) == 0
    (fallback,) = report.fallbacks
    assert reason in fallback.reason
    assert "flash_attention(" not in fallback.reason  # no signature
