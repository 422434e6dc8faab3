"""Quantized layers with random codes, which avoids MLX's slow quantization; and patched copies of models."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_anvil

GROUP_SIZE, BITS = 64, 4


def _matrix(outputs: int, columns: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Parameters of a quantized layer with random codes. The scales keep the magnitude of activations.

    Float32 ones have values of float16, as in a model that was quantized in float16 and is run in float32.
    """
    # MLX makes random integers from float32, so 32-bit ones would have zeros in their lowest bits.
    codes = mx.random.randint(0, 2**16, (outputs, columns * BITS // 16), mx.uint16).view(mx.uint32)
    middle, deviation = (2**BITS - 1) / 2, 4.6
    scales = mx.random.uniform(0.5, 1.5, (outputs, columns // GROUP_SIZE)) * (columns**-0.5 / deviation)
    scales = scales.astype(mx.float16 if dtype == mx.float32 else dtype)
    return {"weight": codes, "scales": scales.astype(dtype), "biases": (-middle * scales).astype(dtype)}


def quantized_linear(inputs: int, outputs: int, dtype: mx.Dtype) -> nn.QuantizedLinear:
    """A random ``mlx.nn.QuantizedLinear`` without a bias."""
    layer = nn.QuantizedLinear(GROUP_SIZE, 1, bias=False, group_size=GROUP_SIZE, bits=BITS)
    layer.update(_matrix(outputs, inputs, dtype))
    return layer


def quantized_embedding(count: int, dims: int, dtype: mx.Dtype) -> nn.QuantizedEmbedding:
    """A random ``mlx.nn.QuantizedEmbedding``."""
    layer = nn.QuantizedEmbedding(1, GROUP_SIZE, group_size=GROUP_SIZE, bits=BITS)
    layer.num_embeddings, layer.dims = count, dims
    layer.update(_matrix(count, dims, dtype))
    return layer


def patched_twin(model: nn.Module, **options: Any) -> Any:
    """A copy of the model after ``mlx_anvil.patch``, which shares its arrays. ``options`` are those of ``patch``."""
    twin = copy.deepcopy(model)
    mlx_anvil.patch(twin, **options)
    return twin
