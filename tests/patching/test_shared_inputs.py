"""Quantized layers that get the same input: one node computes their products, with the bits of single products."""

import copy
import gc
import re
import threading
import weakref
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_anvil
from lm_models import ARCHITECTURES, tokens
from support import assert_same_bits, normal

pytestmark = pytest.mark.cpu_only

DIMS, KV_DIMS = 128, 64
NAMES = ("q_proj", "k_proj", "v_proj")


class Projections(nn.Module):
    """The projections of an attention, and one behind them that has the width of their input."""

    def __init__(self, dtype: mx.Dtype = mx.float16, bias: bool = False, **options: Any) -> None:
        super().__init__()
        for name, outputs in (*zip(NAMES, (DIMS, KV_DIMS, KV_DIMS), strict=True), ("o_proj", DIMS)):
            linear = nn.Linear(DIMS, outputs, bias=bias)
            linear.set_dtype(dtype)
            self[name] = nn.QuantizedLinear.from_linear(linear, **options)

    def __call__(self, x: mx.array) -> list[mx.array]:
        q, k, v = (self[name](x) for name in NAMES)
        return [q, k, v, self.o_proj(q + 0)]


def patched(module: nn.Module, **options: Any) -> nn.Module:
    mlx_anvil.patch(module, **options)
    return module


def kernels_of(function: Any, *arguments: Any) -> list[str]:
    with mlx_anvil.trace() as trace:
        mx.eval(function(*arguments))
    return trace.kernels


def products_of(function: Any, *arguments: Any) -> Counter[str]:
    """How many nodes have one product, and three: ``{"": 1, "_x3": 1}``."""
    names = [name for name in kernels_of(function, *arguments) if name.startswith("quantized_gemv")]
    return Counter("_x3" if "_x3_" in name else "_x2" if "_x2_" in name else "" for name in names)


APART, TOGETHER = Counter({"": 4}), Counter({"_x3": 1, "": 1})


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{"bits": bits, "group_size": 32} for bits in (2, 3, 4, 8)] + [{"mode": "mxfp4"}, {"mode": "mxfp8"}],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_bits_are_those_of_single_products(dtype, options, rows):
    module = patched(Projections(dtype, bias=True, **options), activation_bits=8 if rows == 3 else None)
    x = normal(2, rows // 2, DIMS, dtype=dtype) if rows == 8 else normal(1, rows, DIMS, dtype=dtype)
    mx.eval(x)
    alone = module(x)
    assert products_of(lambda: alone) == APART
    together = module(x)
    assert products_of(lambda: together) == TOGETHER
    for one, other in zip(together, alone, strict=True):
        assert_same_bits(one, other)


def test_many_rows_are_single_products():
    module, x = patched(Projections()), normal(1, 9, DIMS, dtype=mx.float16)
    for _ in range(3):
        assert not any("_x3" in name for name in kernels_of(module, x))


def test_a_layer_alone_and_other_inputs():
    module = patched(Projections())
    x, y = (normal(1, 1, DIMS, dtype=mx.float16) for _ in range(2))
    want = [*module(x), module.k_proj(y)]
    module(y)
    q, k = module.q_proj(x), module.k_proj(y)  # the other products of x are dropped
    v = module.v_proj(x)
    for one, other in zip((q, k, v), (want[0], want[4], want[2]), strict=True):
        assert_same_bits(one, other)
    for _ in range(40):  # never all three: they are computed alone in the end
        module.q_proj(y + 0)
    assert products_of(module.q_proj, y + 0) == Counter({"": 1})


def test_an_array_that_changes_in_place_is_another_input():
    module, x = patched(Projections()), normal(1, 1, DIMS, dtype=mx.float16)
    module(x)
    module.q_proj(x)
    x += 1
    assert_same_bits(module.k_proj(x), patched(copy.deepcopy(module)).k_proj(x))


def test_parameters_that_change_between_two_layers():
    module, x = patched(Projections()), normal(1, 1, DIMS, dtype=mx.float16)
    other = Projections()
    module(x)
    module.q_proj(x)
    module.update(other.parameters())
    for _ in range(3):
        for ours, want in zip(module(x), patched(other)(x), strict=True):
            assert_same_bits(ours, want)
    assert products_of(module, x) == TOGETHER


def test_a_layer_that_is_replaced():
    module, x = patched(Projections()), normal(1, 1, DIMS, dtype=mx.float16)
    module(x)
    module(x)
    module.k_proj = nn.QuantizedLinear.from_linear(nn.Linear(DIMS, KV_DIMS, bias=False))
    module.k_proj.set_dtype(mx.float16)
    want = patched(copy.deepcopy(module))(x)
    for ours, wanted in zip(module(x), want, strict=True):
        assert mx.allclose(ours, wanted, atol=2e-2)


def test_no_array_outlives_the_calls():
    module = patched(Projections())
    mx.eval(module.parameters())
    for _ in range(6):  # it learns that o_proj is alone
        mx.eval(module(normal(1, 1, DIMS, dtype=mx.float16)))
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(20):
        mx.eval(module(normal(1, 1, DIMS, dtype=mx.float16)))
    gc.collect()
    assert mx.get_active_memory() == before


def test_modules_are_not_kept():
    module = patched(Projections())
    for _ in range(2):
        module(normal(1, 1, DIMS, dtype=mx.float16))
    layer = weakref.ref(module.k_proj)
    del module
    gc.collect()
    assert layer() is None


@pytest.mark.parametrize("compiled", [False, True])
def test_transformations(compiled):
    module, x = patched(Projections(mx.float32)), normal(1, 1, DIMS)
    module(x)
    module(x)

    def loss(x):
        return sum(mx.square(y).sum() for y in module(x))

    gradient = mx.grad(loss)
    plain = copy.deepcopy(module)
    want = mx.grad(lambda x: sum(mx.square(y).sum() for y in plain(x)))(x)
    assert mx.allclose((mx.compile(gradient) if compiled else gradient)(x), want, rtol=1e-4, atol=1e-5)
    batch = normal(3, 1, DIMS)
    for ours, wanted in zip(mx.vmap(module)(batch), module(batch), strict=True):
        assert mx.allclose(ours, wanted, rtol=1e-4, atol=1e-5)
    for ours, wanted in zip(mx.compile(module)(x), module(x), strict=True):
        assert_same_bits(ours, wanted)
    assert products_of(module, x) == TOGETHER


def test_gradients_of_scales_with_a_constant_input():
    module, x = patched(Projections(mx.float32)), normal(1, 1, DIMS)
    module(x)
    module(x)
    module.unfreeze(keys=["scales", "biases"])
    ours = nn.value_and_grad(module, lambda: sum(y.sum() for y in module(x)))()[1]
    assert mx.abs(ours["k_proj"]["scales"]).max() > 0
    assert products_of(module, x) == TOGETHER


def test_threads():
    module = patched(Projections())
    inputs = [normal(1, 1, DIMS, dtype=mx.float16) for _ in range(4)]
    want = [[mx.array(y) for y in module(x)] for x in inputs]
    mx.eval(inputs, want, module.parameters())
    failures: list[int] = []

    def run(index: int) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(30):
                results = module(inputs[index])
                mx.eval(results)
                if not all(mx.array_equal(a, b) for a, b in zip(results, want[index], strict=True)):
                    failures.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_another_stream_is_another_call():
    module, x = patched(Projections()), normal(1, 1, DIMS, dtype=mx.float16)
    want = module(x)
    module.q_proj(x)
    with mx.stream(mx.new_stream(mx.cpu)):
        assert_same_bits(module.k_proj(x), want[1])


def quantized_llama() -> nn.Module:
    model = ARCHITECTURES["llama"].build()
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=32, bits=4)
    return model


def decoded(model: nn.Module) -> tuple[list[mx.array], list[Counter[str]]]:
    """The logits of four tokens one after another, and the kernels of each."""
    cache = make_prompt_cache(model)
    logits, kernels = [], []
    mx.random.seed(3)
    mx.eval(model(tokens(1, 12), cache))
    for _ in range(4):
        with mlx_anvil.trace() as trace:
            logits.append(model(tokens(1, 1), cache))
            mx.eval(logits[-1])
        kernels.append(Counter(name.partition("_float")[0] for name in trace.kernels))
    return logits, kernels


def test_nodes_of_a_decode_step():
    """Of a layer: two norms with the residual sum before them, five products, rope with the cache, attention."""
    model = patched(quantized_llama())
    layers = len(model.layers)
    _, kernels = decoded(model)
    assert kernels[-1] == {
        "rms_norm_forward": 2 * layers + 1,
        "quantized_gemv_x3": layers,
        "quantized_gemv": 2 * layers + 1,
        "quantized_swiglu": layers,
        "rope_and_cache": layers,
        "flash_attention_decode": layers,
        "quantized_embedding": 1,
    }


def test_layers_of_a_decode_step_have_no_nodes_of_mlx(tmp_path):
    model = patched(quantized_llama())
    cache = make_prompt_cache(model)
    mx.eval(model(tokens(1, 12), cache))
    for _ in range(2):
        mx.eval(model(tokens(1, 1), cache))
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), model(mx.array([[1]]), cache))
    text = graph.read_text()
    assert "QuantizedProducts" in text
    names = {name for name in re.findall(r'label ?= ?"(\w+)', text) if name[0].isupper() and len(name) > 1}
    assert not names & {"Add", "Reshape", "Transpose", "Slice"}, names


def test_lora_on_a_projection():
    model = patched(quantized_llama())
    decoded(model)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]})
    plain = copy.deepcopy(model)
    want, _ = decoded(plain)
    for patched_again in (False, True):
        if patched_again:
            mlx_anvil.patch(model)
        for ours, wanted in zip(decoded(model)[0], want, strict=True):
            assert mx.allclose(ours, wanted, rtol=2e-2, atol=2e-2)
