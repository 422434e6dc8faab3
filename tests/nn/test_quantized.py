"""nn.QuantizedLinear and nn.QuantizedSwiGLU against MLX's modules."""

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_anvil
from support import assert_same_bits, max_error


@pytest.mark.parametrize("bias", [True, False])
def test_quantized_linear(bias, tmp_path):
    linear = nn.Linear(128, 21, bias=bias)
    theirs = nn.QuantizedLinear.from_linear(linear, bits=4, group_size=64)
    x = mx.random.normal((3, 128))
    for ours in (mlx_anvil.nn.QuantizedLinear.from_linear(linear), mlx_anvil.nn.QuantizedLinear.from_mlx(theirs)):
        assert ours.parameters().keys() == theirs.parameters().keys()
        assert max_error(ours(x), theirs(x)) <= 1e-5
    theirs.save_weights(str(tmp_path / "weights.safetensors"))
    loaded = mlx_anvil.nn.QuantizedLinear(128, 21, bias=bias)
    loaded.load_weights(str(tmp_path / "weights.safetensors"))
    assert_same_bits(loaded(x), ours(x))


def test_quantized_swiglu_module():
    plain = mlx_anvil.nn.SwiGLU(128, 192)
    module = mlx_anvil.nn.QuantizedSwiGLU.from_swiglu(plain)
    x = mx.random.normal((3, 128))
    gate, up, down = (getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    assert max_error(module(x), down(nn.silu(gate(x)) * up(x))) <= 1e-5


def test_quantized_swiglu_of_a_quantized_mlp():
    mlp = mlx_anvil.nn.SwiGLU(128, 192)
    nn.quantize(mlp, group_size=32, bits=4)
    module = mlx_anvil.nn.QuantizedSwiGLU.from_mlx(mlp)
    assert module.parameters().keys() == mlp.parameters().keys()
    x = mx.random.normal((3, 128))
    assert max_error(module(x), mlp(x)) <= 1e-5


def test_quantized_swiglu_takes_no_other_mlp():
    mlp = mlx_anvil.nn.SwiGLU(128, 192)
    with pytest.raises(ValueError, match=r"^\[QuantizedSwiGLU\] gate_proj is .*allowed: mlx.nn.QuantizedLinear"):
        mlx_anvil.nn.QuantizedSwiGLU.from_mlx(mlp)
    nn.quantize(mlp, group_size=32, bits=4)
    mlp.up_proj = nn.QuantizedLinear(128, 192, bias=False, group_size=64, bits=4)
    with pytest.raises(ValueError, match=r"^\[QuantizedSwiGLU\] gate_proj has .* allowed: equal formats"):
        mlx_anvil.nn.QuantizedSwiGLU.from_mlx(mlp)
    with pytest.raises(ValueError, match=r"^\[QuantizedSwiGLU\] module has biases"):
        mlx_anvil.nn.QuantizedSwiGLU.from_swiglu(mlx_anvil.nn.SwiGLU(128, 192, bias=True))
