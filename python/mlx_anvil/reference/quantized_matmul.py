"""quantized_matmul and quantized_swiglu: their definitions in MLX ops, and their entries in the registry."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference._quantized import SPECIAL_VALUES, dequantized, quantized_codes, quantized_inputs, with_codes
from mlx_anvil.reference.gated import gated


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """``x W^T``, or ``x W`` without ``transpose``, where ``W`` is the dequantized ``w``. ``x`` is ``[..., K]``."""
    matrix = dequantized(w, scales, biases, group_size, bits, mode)
    dtype = x.dtype if biases is None else mx.result_type(x, matrix)
    matrix = matrix.astype(dtype)
    return x.astype(dtype) @ (matrix.swapaxes(-1, -2) if transpose else matrix)


def quantized_swiglu(
    x: mx.array,
    gate: tuple[mx.array, ...],
    up: tuple[mx.array, ...],
    activation: str = "silu",
    limit: float | None = None,
    **options: Any,
) -> mx.array:
    """``gated(x Wg^T, x Wu^T)``, where ``Wg`` and ``Wu`` are the dequantized ``gate`` and ``up``."""
    product: Callable[..., mx.array] = quantized_matmul
    gates, ups = product(x, *gate, **options), product(x, *up, **options)
    return gated(gates, ups, activation=activation, limit=limit)


# ---- a shape is (rows of x, outputs, groups of 64) -------------------------------------------------------------------


def _swiglu_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Inputs with a small ``x``, so that silu is nearly linear over the steps of finite differences."""
    x, scales, biases = quantized_inputs(shape, mx.float32)
    return [a.astype(dtype) for a in (0.05 * x, scales, biases)]


def _swiglu_with_codes(function: Callable[..., mx.array], **options: Any) -> Callable[..., mx.array]:
    def of_floats(x: mx.array, scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
        gate, up = ((quantized_codes(*biases.shape, 4, copy), scales, biases) for copy in range(2))
        return function(x, gate, up, **options, **more)

    return of_floats


def _quantized_spec(variant: str, bits: int, transpose: bool, check_shapes: tuple[tuple[int, ...], ...]) -> OpSpec:
    return OpSpec(
        name="quantized_matmul",
        variant=variant,
        function=with_codes(_ext.quantized_matmul, bits, transpose=transpose),
        reference=with_codes(quantized_matmul, bits, transpose=transpose),
        make_inputs=partial(quantized_inputs, transpose=transpose),
        arguments=("x", "scales", "biases"),
        operands=("x", "scales"),
        contract_shapes=((1, 1, 1), (0, 3, 1), (8, 5, 3), (9, 37, 2), (33, 65, 5), (12, 11, 2), (5, 11, 2)),
        check_shapes=check_shapes,
        float32_tolerance=5e-5,
        special_values=SPECIAL_VALUES,
    )


def _swiglu_spec(variant: str, contract_shapes: tuple[tuple[int, ...], ...], **options: Any) -> OpSpec:
    return OpSpec(
        name="quantized_swiglu",
        variant=variant,
        function=_swiglu_with_codes(_ext.quantized_swiglu, **options),
        reference=_swiglu_with_codes(quantized_swiglu, **options),
        make_inputs=_swiglu_inputs,
        arguments=("x", "scales", "biases"),
        operands=("x",),
        contract_shapes=contract_shapes,
        check_shapes=((1, 512, 16),),
        float32_tolerance=5e-5,
        special_values=SPECIAL_VALUES,
    )


SPECS = (
    _quantized_spec("4 bits", 4, True, check_shapes=((1, 513, 8), (8, 512, 16), (64, 512, 16))),
    _quantized_spec("3 bits", 3, True, check_shapes=((3, 513, 8),)),
    _quantized_spec("plain", 4, False, check_shapes=((5, 512, 16),)),
    _swiglu_spec("", ((1, 1, 1), (0, 3, 1), (8, 5, 3), (9, 37, 2), (12, 11, 2), (5, 11, 2))),
    *(
        _swiglu_spec(activation, ((9, 11, 2), (5, 11, 2)), activation=activation)
        for activation in ("gelu", "gelu_tanh", "relu2", "swiglu_oai")
    ),
)
