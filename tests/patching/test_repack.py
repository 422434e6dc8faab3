"""``patch(model, repack=True)``: which layers get scales of 16 bits, that no result changes, and how it is undone."""

import copy
import gc

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_anvil
from lm_models import ARCHITECTURES, greedy, tokens
from mlx_anvil.patching import _repack

pytestmark = pytest.mark.cpu_only

HALVES = [mx.float16, mx.bfloat16]
halves = pytest.mark.parametrize("half", HALVES, ids=str)


def model_of(half: mx.Dtype, name: str = "llama") -> nn.Module:
    """A model that was quantized in 16 bits and set to float32."""
    model = ARCHITECTURES[name].build(half)
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def in_16_bits(model: nn.Module) -> set[str]:
    return {name for name, array in parameters(model).items() if array.dtype in HALVES}


def of_linears(model: nn.Module) -> set[str]:
    """The names of the arrays that may have 16 bits."""
    names = (name for name in parameters(model) if name.endswith((".scales", ".biases")))
    return {name for name in names if "embed_tokens" not in name}


def results(model: nn.Module, batch: mx.array) -> list[mx.array]:
    """A prompt, a few rows and one token."""
    return [model(batch), model(batch[:1, :3]), model(batch[:1, :1])]


def equal(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(bool(mx.array_equal(x, y)) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


@halves
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "qwen3_moe"])
def test_no_result_changes(name, half):
    model, batch = model_of(half, name), tokens(2, 17)
    before, values, of_mlx = parameters(model), results(model, batch), greedy(model, batch[:1], 5)
    mlx_anvil.patch(model)
    want = results(model, batch)
    report = mlx_anvil.patch(model, repack=True)
    after = parameters(model)
    assert in_16_bits(model) == of_linears(model)
    assert report.repacked == len(of_linears(model)) // 2
    assert report.summary.endswith(f"swapped, {report.repacked} layers repacked.")
    assert {after[key].dtype for key in of_linears(model)} == {half}
    assert after.keys() == before.keys()
    assert all(mx.array_equal(after[key].astype(before[key].dtype), before[key]) for key in before)
    assert sum(array.nbytes for array in after.values()) < sum(array.nbytes for array in before.values())
    with mlx_anvil.strict():
        assert equal(results(model, batch), want)
        assert greedy(model, batch[:1], 5) == of_mlx
    mlx_anvil.unpatch(model)
    assert not in_16_bits(model)
    assert all(mx.array_equal(array, before[key]) for key, array in parameters(model).items())
    assert equal(results(model, batch), values)


@halves
def test_the_last_options_count(half):
    model = model_of(half)
    first = mlx_anvil.patch(model, repack=True)
    arrays = {name: id(array) for name, array in parameters(model).items()}
    assert mlx_anvil.patch(model, repack=True) == first
    assert {name: id(array) for name, array in parameters(model).items()} == arrays
    assert mlx_anvil.patch(model).repacked == 0
    assert not in_16_bits(model)
    assert mlx_anvil.patch(model, quantized=False, repack=True).repacked == 0
    mlx_anvil.patch(model, repack=True)
    model.set_dtype(mx.float32)
    assert mlx_anvil.patch(model, repack=True) == first
    layer = model.model.layers[0]
    mlx_anvil.unpatch(layer)  # a part
    assert in_16_bits(model) == {name for name in of_linears(model) if not name.startswith("model.layers.0.")}


def test_scales_that_are_no_16_bit_numbers_stay():
    model = ARCHITECTURES["llama"].build()
    nn.quantize(model, group_size=32, bits=4)  # of float32 weights
    before = {name: id(array) for name, array in parameters(model).items()}
    assert mlx_anvil.patch(model, repack=True).repacked == 0
    assert {name: id(array) for name, array in parameters(model).items()} == before


@pytest.mark.parametrize("value", [1e-9, 1e30, float("nan"), 1 + 2.0**-12])
def test_one_number_decides_on_its_layer(value):
    model = model_of(mx.float16)
    odd = model.model.layers[1].self_attn.o_proj
    odd.biases = mx.concatenate([mx.full((1, odd.biases.shape[1]), value), odd.biases[1:]])
    mlx_anvil.patch(model, repack=True)
    prefix = "model.layers.1.self_attn.o_proj."
    assert in_16_bits(model) == {name for name in of_linears(model) if not name.startswith(prefix)}


def test_scales_and_biases_have_one_dtype():
    layer = nn.QuantizedLinear(64, 32, bias=False)
    layer.scales = layer.scales.astype(mx.float16).astype(mx.float32)
    layer.biases = mx.full(layer.biases.shape, 1e30).astype(mx.bfloat16).astype(mx.float32)
    assert mlx_anvil.patch(layer, repack=True).repacked == 0
    layer.scales = mx.full(layer.scales.shape, 0.5)  # is of either dtype
    assert mlx_anvil.patch(layer, repack=True).repacked == 1
    assert {layer.scales.dtype, layer.biases.dtype} == {mx.bfloat16}


def test_models_with_other_dtypes_stay():
    """There the input of a layer may have 16 bits, and its result float32 only because of the scales."""
    model = model_of(mx.float16)
    model.model.norm.set_dtype(mx.float16)
    assert mlx_anvil.patch(model, repack=True).repacked == 0
    model = ARCHITECTURES["llama"].build(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    before = in_16_bits(model)
    assert mlx_anvil.patch(model, repack=True).repacked == 0
    mlx_anvil.unpatch(model)
    assert in_16_bits(model) == before  # were never float32


def test_layers_of_ours():
    theirs = nn.Linear(128, 96)
    theirs.set_dtype(mx.float16)
    linear = mlx_anvil.nn.QuantizedLinear.from_mlx(theirs.to_quantized(64, 4))
    experts = mlx_anvil.nn.SwitchGLU(64, 128, 4)
    experts.set_dtype(mx.float16)
    nn.quantize(experts, group_size=32, bits=4)
    x, ids = mx.random.normal((3, 64)), mx.array([[0, 1], [2, 3], [1, 0]])
    model = nn.Sequential(linear, experts)
    model.set_dtype(mx.float32)
    want = [linear(mx.concatenate([x, x], axis=-1)), experts(x, ids)]
    assert mlx_anvil.patch(model, repack=True).repacked == 4
    assert equal([linear(mx.concatenate([x, x], axis=-1)), experts(x, ids)], want)
    mlx_anvil.unpatch(model)
    assert not in_16_bits(model)


def test_layers_that_are_dequantized_stay():
    """LoRA fuses weights in the dtype of the scales."""
    model = model_of(mx.float16)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": {"self_attn.q_proj"}})
    batch = tokens(2, 9)
    mlx_anvil.patch(model)
    want = results(model, batch)
    mlx_anvil.patch(model, repack=True)
    assert in_16_bits(model) == {name for name in of_linears(model) if "q_proj" not in name}
    assert equal(results(model, batch), want)
    assert model.model.layers[0].self_attn.q_proj.fuse(dequantize=True).weight.dtype == mx.float32


def test_arrays_that_layers_share():
    one, two = nn.QuantizedLinear(64, 32, bias=False), nn.QuantizedLinear(64, 32, bias=False)
    table = nn.QuantizedEmbedding(32, 64)
    one.update({name: mx.round(array * 64) for name, array in one.items() if name in ("scales", "biases")})
    two.update(one.parameters())
    model = nn.Sequential(one, two)
    assert mlx_anvil.patch(model, repack=True).repacked == 2
    assert one.scales is two.scales
    mlx_anvil.unpatch(model)
    assert one.scales is two.scales
    table.update(one.parameters())
    assert mlx_anvil.patch(nn.Sequential(model, table), repack=True).repacked == 0


@halves
def test_weights_load_and_save(half, tmp_path):
    model, batch = model_of(half), tokens(1, 5)
    want = model(batch)
    path = str(tmp_path / "weights.safetensors")
    mlx_anvil.patch(model, repack=True)
    model.save_weights(path)
    other = model_of(half)
    other.load_weights(path)
    assert mx.array_equal(other(batch), want)  # by MLX
    assert in_16_bits(other) == of_linears(other)


def test_copies_and_deleted_models():
    model, batch = model_of(mx.float16), tokens(1, 5)
    want = model(batch)
    mlx_anvil.patch(model, repack=True)
    twin = copy.deepcopy(model)
    assert in_16_bits(twin) == of_linears(twin)
    assert mx.array_equal(twin(batch), want)  # by MLX
    del model
    gc.collect()
    assert not any(_repack.is_repacked(module) for module in twin.modules())


def test_gradients_and_compile():
    model, batch = model_of(mx.bfloat16), tokens(2, 9)

    def loss(inputs):
        return mx.grad(lambda weight: weighted(weight, inputs))(model.model.norm.weight)

    def weighted(weight, inputs):
        model.model.norm.weight = weight
        return model(inputs).square().mean()

    weight = model.model.norm.weight
    mlx_anvil.patch(model)
    want = [loss(batch), mx.compile(lambda inputs: model(inputs))(batch)]
    model.model.norm.weight = weight
    mlx_anvil.patch(model, repack=True)
    assert equal([loss(batch), mx.compile(lambda inputs: model(inputs))(batch)], want)


def test_an_error_leaves_the_model(monkeypatch):
    model = model_of(mx.float16)
    arrays = {name: id(array) for name, array in parameters(model).items()}
    monkeypatch.setattr("mlx_anvil.patching._patch.assign", lambda functions: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mlx_anvil.patch(model, repack=True)
    assert {name: id(array) for name, array in parameters(model).items()} == arrays
