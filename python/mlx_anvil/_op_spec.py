"""What the registry of ops holds for each op."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class OpSpec:
    """What the check, the contract tests and the benchmarks need to know of an op.

    Attributes:
        name: Python name, also the name of its folders and files.
        variant: which way of calling it this is, where an op has several entries.
        function: the op.
        reference: its definition, with the same array arguments.
        make_inputs: ``(shape, dtype) -> arrays``, random from MLX's global generator.
        arguments: names of the array arguments, in order.
        operands: the first of them, which have to be arrays of float32, float16 or bfloat16.
        contract_shapes: shapes of the contract tests: odd, prime, empty, one element; the last two with the same rank.
        check_shapes: shapes of ``python -m mlx_anvil``: one small and odd, one of a model's size.
        float32_tolerance: largest error allowed in float32, as a share of the result's largest magnitude.
        special_values: what the contract tests put in place of elements; the result has to be that of the definition
            in float32, to rounding.
        scattered_gradients: whether MLX's scatter adds some of the gradients up, on CUDA in any order.
    """

    name: str
    variant: str
    function: Callable[..., mx.array]
    reference: Callable[..., mx.array]
    make_inputs: Callable[[tuple[int, ...], mx.Dtype], list[mx.array]]
    arguments: tuple[str, ...]
    operands: tuple[str, ...]
    contract_shapes: tuple[tuple[int, ...], ...]
    check_shapes: tuple[tuple[int, ...], ...]
    float32_tolerance: float = 1e-5
    special_values: tuple[float, ...] = (math.nan, math.inf, -math.inf, 1e4, -1e4, 0.0, -0.0)
    scattered_gradients: bool = False

    @property
    def id(self) -> str:
        """``silu_gate``; with the variant where there are several."""
        return f"{self.name}/{self.variant}" if self.variant else self.name
