"""Layers with random weights, quantized without anything to quantize, which takes MLX long; and patched copies."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_anvil

GROUP_SIZE, BITS = 64, 4


def _matrix(outputs: int, columns: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Parameters of a quantized layer of random codes, which keeps the size of what goes through it."""
    # Not drawn as 32 bits at once: MLX makes integers of random float32, whose lowest bits are zeros.
    codes = mx.random.randint(0, 2**16, (outputs, columns * BITS // 16), mx.uint16).view(mx.uint32)
    middle, deviation = (2**BITS - 1) / 2, 4.6
    scales = mx.random.uniform(0.5, 1.5, (outputs, columns // GROUP_SIZE)) * (columns**-0.5 / deviation)
    scales = scales.astype(dtype)
    return {"weight": codes, "scales": scales, "biases": -middle * scales}


def quantized_linear(inputs: int, outputs: int, dtype: mx.Dtype) -> nn.QuantizedLinear:
    """``mlx.nn.QuantizedLinear`` without a bias."""
    layer = nn.QuantizedLinear(GROUP_SIZE, 1, bias=False, group_size=GROUP_SIZE, bits=BITS)
    layer.update(_matrix(outputs, inputs, dtype))
    return layer


def quantized_embedding(count: int, dims: int, dtype: mx.Dtype) -> nn.QuantizedEmbedding:
    """``mlx.nn.QuantizedEmbedding``."""
    layer = nn.QuantizedEmbedding(1, GROUP_SIZE, group_size=GROUP_SIZE, bits=BITS)
    layer.num_embeddings, layer.dims = count, dims
    layer.update(_matrix(count, dims, dtype))
    return layer


def patched_twin(model: nn.Module) -> Any:
    """A copy after ``mlx_anvil.patch``; the arrays are the same ones."""
    twin = copy.deepcopy(model)
    mlx_anvil.patch(twin)
    return twin
