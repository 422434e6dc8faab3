"""One entry of the registry of ops."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class OpSpec:
    """One way of calling an op, as the check, the contract tests and the benchmarks run it.

    Attributes:
        name: Python name of the op.
        variant: distinguishes the entries of one op; empty if it has a single entry.
        function: the op, as a function of arrays.
        reference: its definition in MLX ops, with the same arguments.
        make_inputs: ``(shape, dtype) -> arrays``, drawn from MLX's global generator.
        arguments: names of the array arguments, in order.
        operands: the leading arguments that must be float32, float16 or bfloat16.
        contract_shapes: shapes of the contract tests: odd, prime, empty, one element. The last two have the same rank.
        check_shapes: shapes of ``python -m mlx_anvil``: a small odd one first, one of a model's size last.
        float32_tolerance: largest error in float32, relative to the largest magnitude of the result.
        special_values: values that the contract tests write into the inputs. The result must equal the definition in
            float32, up to rounding.
        without_gradient: arguments that only rank, whose gradient is 0 by definition.
        scattered_gradients: True if MLX's scatter sums some of the gradients; on CUDA its order is not fixed.
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
    without_gradient: tuple[str, ...] = ()
    scattered_gradients: bool = False

    @property
    def id(self) -> str:
        """``"rope/halves"``; the name alone if there is no variant."""
        return f"{self.name}/{self.variant}" if self.variant else self.name
