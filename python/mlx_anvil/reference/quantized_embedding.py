"""quantized_embedding: its definition in MLX ops, and its entries in the registry."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference._quantized import SPECIAL_VALUES, dequantized, quantized_codes, quantized_inputs


def quantized_embedding(
    ids: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """Rows ``ids`` of the quantized matrix ``w``, ``[..., columns]``. Dequantizes only these rows."""
    rows = (w[ids], scales[ids], None if biases is None else biases[ids])
    return dequantized(*rows, group_size, bits, mode)


@cache
def _ids(rows: int) -> mx.array:
    """Random ids ``[2, rows]``. Some repeat, and some are negative."""
    draw = random.Random(rows)
    return mx.array([[draw.randrange(-rows, rows) for _ in range(rows)] for _ in range(2)], mx.int32)


def _embedding_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return quantized_inputs((1, *shape), dtype)[1:]


def _embedding_with_codes(function: Callable[..., mx.array], bits: int) -> Callable[..., mx.array]:
    """The op as a function of its floating-point arguments."""

    def of_floats(scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
        rows, groups = biases.shape
        return function(_ids(rows), quantized_codes(rows, groups, bits), scales, biases, bits=bits, **more)

    return of_floats


def _embedding_spec(variant: str, bits: int, check_shapes: tuple[tuple[int, ...], ...]) -> OpSpec:
    """A shape is (rows of the matrix, groups of 64)."""
    return OpSpec(
        name="quantized_embedding",
        variant=variant,
        function=_embedding_with_codes(_ext.quantized_embedding, bits),
        reference=_embedding_with_codes(quantized_embedding, bits),
        make_inputs=_embedding_inputs,
        arguments=("scales", "biases"),
        operands=("scales",),
        # The last two are equal, because codes and ids are constants of a compiled graph.
        contract_shapes=((1, 1), (7, 1), (5, 3), (37, 2), (11, 2), (11, 2)),
        check_shapes=check_shapes,
        special_values=SPECIAL_VALUES,
        scattered_gradients=True,  # MLX's scatter sums the gradients of repeated rows
    )


SPECS = (
    _embedding_spec("4 bits", 4, check_shapes=((257, 16),)),
    _embedding_spec("5 bits", 5, check_shapes=((257, 16),)),
)
