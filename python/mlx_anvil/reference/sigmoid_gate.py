"""sigmoid_gate: its definition in MLX ops, and its entry in the registry."""

from dataclasses import replace

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil.reference import _float64
from mlx_anvil.reference.silu_gate import SPECS as SILU_GATE


def sigmoid_gate(x: mx.array, gate: mx.array) -> mx.array:
    """``x * sigmoid(gate)``, elementwise."""
    return x * _float64.sigmoid(gate)


SPECS = (
    replace(
        SILU_GATE[0],
        name="sigmoid_gate",
        function=_ext.sigmoid_gate,
        reference=sigmoid_gate,
        arguments=("x", "gate"),
        operands=("x", "gate"),
    ),
)
