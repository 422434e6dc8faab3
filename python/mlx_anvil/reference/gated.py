"""gated: its definition in MLX ops, and its entries in the registry."""

import math
from functools import partial

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64
from mlx_anvil.reference.silu_gate import SPECS as SILU_GATE


def gated(gate: mx.array, up: mx.array, *, activation: str = "silu", limit: float | None = None) -> mx.array:
    """``activation(gate) * up``, elementwise; with a limit, of ``min(gate, limit)`` and ``clip(up, -limit, limit)``."""
    if activation == "swiglu_oai":
        limit = 7.0 if limit is None else limit
    if limit is not None:
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    if activation == "silu":
        return gate * _float64.sigmoid(gate) * up
    if activation == "gelu":
        return gate * (1 + _float64.erf(gate / math.sqrt(2))) / 2 * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + mx.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if activation == "relu2":
        return mx.square(mx.maximum(gate, 0)) * up
    return (up + 1) * (gate * _float64.sigmoid(1.702 * gate))


def _normal(shape: tuple[int, ...], dtype: mx.Dtype, limit: float | None) -> mx.array:
    """A limit clamps about a tenth of the numbers. None are near it, where numerical gradients see both sides."""
    x = mx.random.normal(shape)
    if limit is not None:
        x = x * limit / 1.6
        x = mx.where(mx.abs(mx.abs(x) - limit) < 0.1 * limit, 0.8 * x, x)
    return x.astype(dtype)


def _spec(activation: str, limit: float | None = None) -> OpSpec:
    return OpSpec(
        name="gated",
        variant=activation if limit is None else f"{activation}, limit",
        function=partial(_ext.gated, activation=activation, limit=limit),
        reference=partial(gated, activation=activation, limit=limit),
        make_inputs=lambda shape, dtype: [_normal(shape, dtype, limit) for _ in range(2)],
        arguments=("gate", "up"),
        operands=("gate", "up"),
        contract_shapes=SILU_GATE[0].contract_shapes,
        check_shapes=SILU_GATE[0].check_shapes,
    )


SPECS = (
    *(_spec(activation) for activation in ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")),
    *(_spec(activation, limit=1.5) for activation in ("silu", "swiglu_oai")),
)
