"""Calls that match no signature, and argument names of other libraries: the error says what an argument is called
here."""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _calls, _ext
from mlx_anvil._calls import Signature, checks_arguments, signature_of_method, signature_of_op
from mlx_anvil._habits import NAMES

pytestmark = pytest.mark.cpu_only  # of the call alone; nothing is evaluated

OPS = sorted(name for name in mlx_anvil.__all__ if hasattr(getattr(mlx_anvil, name), "__nb_signature__"))
MODULES = sorted(
    name
    for name, value in vars(mlx_anvil.nn).items()
    if inspect.isclass(value) and value.__module__ == "mlx_anvil.nn" and issubclass(value, mlx.nn.Module)
)
MAKE = {  # a module of each class
    "SwiGLU": (8, 16),
    "QuantizedSwiGLU": (64, 64),
    "SwitchLinear": (64, 8, 4),
    "QuantizedSwitchLinear": (64, 8, 4),
    "SwitchGLU": (64, 64, 4),
    "RMSNorm": (8,),
    "LayerNorm": (8,),
    "RoPE": (8,),
    "QuantizedLinear": (64, 8),
    "QuantizedEmbedding": (8, 64),
}
METHODS = [
    f"{name}.{method}"
    for name in MODULES
    for method in sorted(vars(getattr(mlx_anvil.nn, name)))
    if method == "__call__" or (method[0] != "_" and callable(getattr(getattr(mlx_anvil.nn, name), method)))
]
Q = mx.zeros((1, 2, 4, 8))
W = mx.quantize(mx.zeros((8, 64)))


def function(name: str) -> Callable[..., Any]:
    """An op, a class, or a bound method."""
    if name in OPS:
        return getattr(mlx_anvil, name)
    module, _, method = name.partition(".")
    cls = getattr(mlx_anvil.nn, module)
    return getattr(cls(*MAKE[module]), method) if method else cls


def signature(name: str) -> Signature:
    if name in OPS:
        return signature_of_op(function(name))
    module, _, method = name.partition(".")
    cls = getattr(mlx_anvil.nn, module)
    return signature_of_method(cls, inspect.getattr_static(cls, method or "__init__").__wrapped__, method)


def text_of(error: type[Exception], call: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert "incompatible function arguments" not in str(caught.value)
    assert "nanobind" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(name: str, *args: object, **kwargs: object) -> str:
    """The error text of a call that matches no signature, without the signature at its end."""
    text = text_of(TypeError, function(name), *args, **kwargs)
    start, end = f"[{name.partition('.')[0]}] ", f"; allowed: {signature(name)}."
    assert text.startswith(start)
    assert text.endswith(end)
    return text.removeprefix(start).removesuffix(end)


def test_signatures():
    assert str(signature("rms_norm")) == (
        "rms_norm(x, weight=None, eps=1e-05, *, residual=None, gate=None, gate_activation='silu', weight_offset=0.0, "
        "stream=None)"
    )
    assert str(signature("silu_gate")) == "silu_gate(gate, up, *, stream=None)"
    assert str(signature("SwiGLU")) == "SwiGLU(dims, hidden_dims, bias=False)"
    assert str(signature("RMSNorm.__call__")) == "module(x, residual=None, gate=None)"
    assert str(signature("QuantizedLinear.from_mlx")) == "QuantizedLinear.from_mlx(layer)"
    assert {*OPS, *MODULES} == {name for name in NAMES if "." not in name}
    assert {name for name in NAMES if "." in name} <= {*METHODS}
    assert {f"{name}.__call__" for name in MODULES} <= {*NAMES}


@pytest.mark.parametrize("name", OPS + MODULES + METHODS)
def test_every_way_to_miss_a_signature(name: str):
    known = signature(name)
    required = [p for p in known.parameters if p not in known.defaults]
    by_position = [p for p in known.by_position if p in required]
    values = dict.fromkeys(required, 1)
    assert refused(name, **values, qqqq=1) == "qqqq is no argument"
    for left_out in required:
        given = {p: 1 for p in required if p != left_out}
        assert refused(name, **given) == f"{left_out} is missing"
    named = {p: 1 for p in required if p not in by_position}
    for twice in by_position:
        assert refused(name, *(1 for _ in by_position), **named, **{twice: 1}) == (
            f"{twice} is given twice, by position and by name"
        )
    most = len(known.by_position)
    assert refused(name, *range(most + 1), **named).startswith(
        f"{most + 1} arguments are given by position, of at most {most} ({', '.join(known.by_position)})"
    )
    assert refused(name, **values, **{f"{known.parameters[-1]}_": 1}).endswith(f", {known.parameters[-1]} is")


def applies(name: str, theirs: str) -> bool:
    """Tables are shared by several functions, not all of which have every argument."""
    ours, parameters = NAMES[name][theirs], signature(name).parameters
    return theirs not in parameters and (ours.endswith(".") or ours.partition("=")[0] in parameters)


@pytest.mark.parametrize(
    ("name", "theirs"), [(name, theirs) for name, table in NAMES.items() for theirs in table if applies(name, theirs)]
)
def test_every_name_of_another_library(name: str, theirs: str):
    ours = NAMES[name][theirs]
    rest = [p for p in signature(name).parameters if p != ours.partition("=")[0]]
    text = refused(name, **{theirs: 1}, **dict.fromkeys(rest, 1))
    if ours.endswith("."):
        assert text == f"{theirs} is no argument: {ours.removesuffix('.')}"
    else:
        assert text == f"{theirs} is called {ours} here"


def test_every_entry_applies_somewhere():
    """An entry with an argument that no function has would never be shown."""
    entries = {(theirs, ours) for table in NAMES.values() for theirs, ours in table.items()}
    used = {(theirs, NAMES[name][theirs]) for name in NAMES for theirs in NAMES[name] if applies(name, theirs)}
    assert entries == used


def test_flash_attn_and_pytorch():
    op = "flash_attention"
    assert refused(op, Q, Q, Q, causal=True) == "causal is called mask='causal' here"
    assert refused(op, Q, Q, Q, is_causal=True, dropout_p=0.0) == (
        "is_causal is called mask='causal' here; dropout_p is no argument: there is no dropout, so leave it out"
    )
    assert (
        refused(op, query=Q, key=Q, value=Q) == "query is called q here; key is called k here; value is called v here"
    )
    assert refused(op, Q, Q, Q, 0.0, 0.125, True) == (
        "6 arguments are given by position, of at most 3 (q, k, v), the others by name"
    )
    assert refused(op, Q, softmax_scale=0.125) == "softmax_scale is called scale here; k and v are missing"
    assert refused(op, Q, Q, Q, maks="causal") == "maks is no argument, mask is"


def test_names_that_the_caller_makes():
    name = "".join(["cau", "sal"])  # not interned
    assert refused("flash_attention", Q, Q, Q, **{name: True}) == "causal is called mask='causal' here"
    assert refused("silu_gate", Q, Q, **{"ä": 1}) == "ä is no argument"
    assert refused("silu_gate", Q, Q, **{f"a{i}": 1 for i in range(2000)}).startswith("a0 is no argument")


class Tensor:
    """Stands for an array of another library, which its module names."""


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.ones(3), "; mlx.core.array({}) converts it"),
        ([1.0], "; mlx.core.array({}) converts it"),
        ((1.0,), "; mlx.core.array({}) converts it"),
        ("torch", "; mlx.core.array({}.detach().cpu().numpy()) converts it"),
        ("jaxlib._jax", "; mlx.core.array(numpy.asarray({})) converts it"),
        (1.0, ""),
        ("a text", ""),
        (None, ""),
    ],
    ids=str,
)
def test_arrays_of_other_libraries(value: object, hint: str, monkeypatch: pytest.MonkeyPatch):
    if isinstance(value, str) and hint:
        monkeypatch.setattr(Tensor, "__module__", value)
        value = Tensor()
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("silu_gate", "gate", lambda: mlx_anvil.silu_gate(value, Q)),
        ("silu_gate", "up", lambda: mlx_anvil.silu_gate(Q, up=value)),
        ("flash_attention", "k", lambda: mlx_anvil.flash_attention(Q, value, Q)),
        ("rope", "x", lambda: mlx_anvil.rope(value, 8)),
        ("softmax_topk", "logits", lambda: mlx_anvil.softmax_topk(value, 2)),
        ("quantized_embedding", "ids", lambda: mlx_anvil.quantized_embedding(value, *W)),
        ("quantized_swiglu", "up scales", lambda: mlx_anvil.quantized_swiglu(mx.zeros((1, 64)), W, (W[0], value))),
    ]
    if value is not None:  # which is no bias
        router = functools.partial(mlx_anvil.softmax_topk, mx.zeros((2, 8)), 2, e_score_correction_bias=value)
        calls.append(("softmax_topk", "e_score_correction_bias", router))
    for op, argument, call in calls:
        text, argument_name = text_of(TypeError, call), argument.rpartition(" ")[2]
        assert text.startswith(f"[{op}] {argument} is a ")
        assert text.endswith(f"{type(value).__name__}; allowed: mlx.core.array{hint.format(argument_name)}.")


def test_positions_of_other_norms():
    x, weight = mx.zeros((2, 8)), mx.ones((8,))
    by_name = "allowed: mlx.core.array; give eps by name, eps=1e-06."
    assert text_of(TypeError, mlx_anvil.rms_norm, x, 1e-6) == f"[rms_norm] weight is a float; {by_name}"
    assert text_of(TypeError, mlx_anvil.layer_norm, x, weight, 1e-6) == f"[layer_norm] bias is a float; {by_name}"
    for shape in ((8,), [8], 8):  # PyTorch's functions take the shape first
        assert "the shape is not given" in text_of(TypeError, mlx_anvil.rms_norm, x, shape, weight)
        assert "the shape is not given" in text_of(TypeError, mlx_anvil.layer_norm, x, shape, weight, weight)


def test_quantized_arrays_in_one_argument():
    x, unpacked = mx.zeros((1, 64)), "; give its parts as separate arguments: *w."
    assert text_of(TypeError, mlx_anvil.quantized_matmul, x, W).endswith(unpacked)
    assert text_of(TypeError, mlx_anvil.quantized_gemv, x, W, W[1]).endswith(unpacked)


def test_mask_that_is_a_bool():
    assert text_of(TypeError, mlx_anvil.flash_attention, Q, Q, Q, mask=True).endswith(
        "; a causal mask is mask='causal'."
    )


@pytest.mark.parametrize("model", [("model", "tokenizer"), ["model"]])
def test_what_load_of_mlx_lm_returns(model: object):
    for call in (mlx_anvil.patch, mlx_anvil.unpatch):
        assert text_of(TypeError, call, model).endswith(
            "allowed: an mlx.nn.Module, such as model[0] of the pair (model, tokenizer)."
        )


# ---- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_types_of_module_arguments(name: str):
    known = signature(name)
    numbers = {"dims": 64, "hidden_dims": 64, "input_dims": 64, "output_dims": 64, "num_embeddings": 64}
    numbers["num_experts"] = 4
    arguments = {p: numbers[p] for p in known.parameters if p not in known.defaults}
    function(name)(**arguments)
    for parameter, bad in itertools.product(known.parameters, ("a", 1.5, True, None, mx.array(64), [64])):
        allowed = {
            "bool": (bool,),
            "eps": (float,),
            "weight_offset": (float,),
            "base": (float,),
            "scale": (float,),
            "mode": (str,),
            "activation": (str,),
            "limit": (float,),
        }
        switches = {"bias", "affine", "traditional"}
        kinds = (bool,) if parameter in switches else allowed.get(parameter, (int,))
        if isinstance(bad, kinds) and not (isinstance(bad, bool) and bool not in kinds):
            continue
        if bad is None and parameter in known.defaults and parameter in ("group_size", "bits", "limit"):
            continue
        text = text_of(TypeError, function(name), **(arguments | {parameter: bad}))
        assert text.startswith(f"[{name}] {parameter} is a {type(bad).__name__}; allowed: a")


def test_numbers_of_numpy_in_modules():
    layer = mlx_anvil.nn.RMSNorm(np.int64(8), np.float32(1e-6))
    assert layer(mx.zeros((2, 8))).shape == (2, 8)
    assert mlx_anvil.nn.RoPE(8, base=500).base == 500


def test_modules_keep_their_signatures():
    assert str(inspect.signature(mlx_anvil.nn.SwiGLU)) == "(dims: int, hidden_dims: int, bias: bool = False) -> None"
    assert list(inspect.signature(mlx_anvil.nn.QuantizedLinear).parameters)[:2] == ["input_dims", "output_dims"]


def test_calls_of_modules():
    norm, rope = mlx_anvil.nn.RMSNorm(8), mlx_anvil.nn.RoPE(8)
    assert text_of(TypeError, norm, hidden_states=Q) == (
        "[RMSNorm] hidden_states is called x here; allowed: module(x, residual=None, gate=None)."
    )
    assert text_of(TypeError, norm, Q, eps=1e-6).startswith("[RMSNorm] eps is no argument: an argument of the constr")
    assert text_of(TypeError, rope, Q, position_ids=Q).startswith("[RoPE] position_ids is no argument: give the first")
    linear = mlx_anvil.nn.QuantizedLinear(64, 8)
    assert text_of(TypeError, linear, [1.0]).startswith("[quantized_matmul] x is a list")  # of the body: unchanged
    assert linear(x=mx.zeros((2, 64))).shape == (2, 8)
    for name in METHODS:
        assert "args" not in inspect.signature(function(name)).parameters


def test_subclass_of_a_module():
    class Scaled(mlx_anvil.nn.RMSNorm):
        def __init__(self, hidden_size: int, factor: float) -> None:
            super().__init__(dims=hidden_size)
            self.factor = factor

    assert Scaled(8, factor=2.0).weight.shape == (8,)


def test_constructors_are_all_checked():
    assert all(hasattr(function(name).__init__, "__wrapped__") for name in MODULES)

    @checks_arguments
    class Own(mlx.nn.Module):
        def __init__(self, size: int, *, names: list[str] | None = None, rate: float | None = None) -> None:
            super().__init__()

    Own(3, names=["a"], rate=None)
    assert text_of(TypeError, Own, 3, rate="a") == "[Own] rate is a str; allowed: a number or None."
    assert text_of(TypeError, Own, 3, 4).startswith("[Own] 2 arguments are given by position, of at most 1 (size), the")


# ---- how the extension is told ---------------------------------------------------------------------------------------


def test_other_errors_stay():
    text = text_of(ValueError, mlx_anvil.silu_gate, mx.zeros((2,)), mx.zeros((3,)))
    assert text.startswith("[silu_gate] gate has shape") or "broadcast" in text
    assert text_of(TypeError, mlx_anvil.rope, Q, "8") == "[rope] dims is a str; allowed: an int."


def test_an_explanation_that_fails(monkeypatch: pytest.MonkeyPatch):
    """If the explanation itself fails, the error of the binding remains."""
    monkeypatch.setattr(_calls, "problem", lambda *_: 1 / 0)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        mlx_anvil.silu_gate(Q)


def test_registering_twice():
    _calls.register()
    assert refused("silu_gate", Q) == "up is missing"
    assert mlx_anvil.silu_gate(Q, Q).shape == Q.shape
    assert _ext.silu_gate is mlx_anvil.silu_gate
