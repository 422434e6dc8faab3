"""What quantized layers of MLX, mlx-lm and ours have in common: the arguments that ops take."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


def format_of(layer: nn.Module) -> dict[str, Any]:
    """``group_size``, ``bits`` and ``mode``."""
    return {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}


def options_of(layer: nn.Module) -> dict[str, Any]:
    """The format, and the ``activation_bits`` of one of our layers."""
    return format_of(layer) | {"activation_bits": layer.activation_bits}


def matrix_of(layer: nn.Module) -> tuple[mx.array, ...]:
    """``(w, scales, biases)``, or ``(w, scales)`` in modes without biases."""
    biases = layer.get("biases")
    matrix = (layer["weight"], layer["scales"])
    return matrix if biases is None else (*matrix, biases)
