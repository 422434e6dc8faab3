"""The definition of every op in plain MLX, and the registry that the check, the tests and the benchmarks run over.

A reference takes the op's arguments and nothing else. Called with float64 arrays on the CPU it is the truth that
errors are measured against; called in the dtype itself it is what a user would write without this package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_anvil import _ext

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def silu_gate(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up``, as ``mlx.nn.silu`` has it."""
    return gate * mx.sigmoid(gate) * up


@dataclass(frozen=True)
class OpSpec:
    """What the check, the contract tests and the benchmarks need to know of an op.

    Attributes:
        name: Python name, also the name of its folders and files.
        function: the op.
        reference: its definition, with the same array arguments.
        make_inputs: ``(shape, dtype) -> arrays``, random from MLX's global generator.
        arguments: names of the array arguments, in order.
        contract_shapes: shapes of the contract tests: odd, prime, empty, one element; the last two with the same rank.
        check_shapes: shapes of ``python -m mlx_anvil``: one small and odd, one of a model's size.
        float32_tolerance: largest error allowed in float32, as a share of the result's largest magnitude.
    """

    name: str
    function: Callable[..., mx.array]
    reference: Callable[..., mx.array]
    make_inputs: Callable[[tuple[int, ...], mx.Dtype], list[mx.array]]
    arguments: tuple[str, ...]
    contract_shapes: tuple[tuple[int, ...], ...]
    check_shapes: tuple[tuple[int, ...], ...]
    float32_tolerance: float = 1e-5


def _normal_pair(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return [mx.random.normal(shape).astype(dtype) for _ in range(2)]


OPS = {
    spec.name: spec
    for spec in (
        OpSpec(
            name="silu_gate",
            function=_ext.silu_gate,
            reference=silu_gate,
            make_inputs=_normal_pair,
            arguments=("gate", "up"),
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
}
