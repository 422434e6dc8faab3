"""Modules that use the ops: drop-in parts for models built with ``mlx.nn``."""

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._ext import silu_gate


class SwiGLU(nn.Module):
    """The Llama MLP: ``down(silu(gate(x)) * up(x))``, with the gate in one fused kernel.

    Parameters are named as in mlx-lm's Llama (``gate_proj``, ``up_proj``, ``down_proj``), so weights load unchanged.

    Args:
        dims: size of the last axis of input and output.
        hidden_dims: size of the hidden axis.
        bias: whether the three projections have a bias. Default: ``False``.
    """

    def __init__(self, dims: int, hidden_dims: int, bias: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = nn.Linear(dims, hidden_dims, bias=bias)
        self.up_proj = nn.Linear(dims, hidden_dims, bias=bias)
        self.down_proj = nn.Linear(hidden_dims, dims, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu_gate(self.gate_proj(x), self.up_proj(x)))
