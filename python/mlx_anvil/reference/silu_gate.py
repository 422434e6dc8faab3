"""silu_gate: its definition in MLX ops, and its entry in the registry."""

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64


def silu_gate(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up`` with ``silu(x) = x * sigmoid(x)``, elementwise."""
    return gate * _float64.sigmoid(gate) * up


def _normal_pair(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return [mx.random.normal(shape).astype(dtype) for _ in range(2)]


SPECS = (
    OpSpec(
        name="silu_gate",
        variant="",
        function=_ext.silu_gate,
        reference=silu_gate,
        make_inputs=_normal_pair,
        arguments=("gate", "up"),
        operands=("gate", "up"),
        contract_shapes=(
            (),
            (0,),
            (3, 0, 5),
            (1,),
            (1, 1, 1),
            (31,),
            (257,),
            (8, 128),
            (2, 3, 5, 7),
            (5, 67),
            (13, 31),
        ),
        check_shapes=((3, 1021), (512, 4096)),
    ),
)
