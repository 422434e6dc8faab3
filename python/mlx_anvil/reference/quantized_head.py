"""quantized_topk and quantized_argmax: their definitions in MLX ops, and their entries in the registry."""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference._quantized import SPECIAL_VALUES, with_codes
from mlx_anvil.reference.quantized_matmul import quantized_matmul


def quantized_topk(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    k: int,
    **options: Any,
) -> tuple[mx.array, mx.array]:
    """Indices and values of the ``k`` largest logits of ``x W^T``, ``[..., k]``; sorts all logits.

    MLX's sort is stable and puts NaN last. The logits are reversed, so that the first of equal ones is chosen.
    """
    logits = quantized_matmul(x, w, scales, biases, **options)
    last = logits.shape[-1] - 1
    indices = mx.stop_gradient(last - mx.argsort(logits[..., ::-1], axis=-1)[..., ::-1][..., :k])
    return indices, mx.take_along_axis(logits, indices, axis=-1)


def quantized_argmax(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    return_values: bool = False,
    **options: Any,
) -> mx.array | tuple[mx.array, mx.array]:
    """Index of the largest logit of ``x W^T``, ``[...]``; with ``return_values``, also its value."""
    indices, values = quantized_topk(x, w, scales, biases, k=1, **options)
    return (indices[..., 0], values[..., 0]) if return_values else indices[..., 0]


def _head_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Inputs for which up to 4 rows of the matrix have clearly larger logits.

    Finite differences and products in another precision must not change the order of the logits.
    """
    rows, outputs, groups = shape
    x = 1 + 0.3 * mx.random.normal((rows, groups * 64))
    scales = 0.004 * mx.random.normal((outputs, groups))
    levels = mx.maximum(4 - mx.random.permutation(outputs).astype(mx.float32), 0)
    biases = mx.broadcast_to(0.25 * levels[:, None], (outputs, groups))
    return [a.astype(dtype) for a in (x, scales, biases)]


def _values_of(function: Callable[..., Any]) -> Callable[..., mx.array]:
    return lambda *arrays, **options: cast(mx.array, function(*arrays, **options)[1])


def _head_spec(name: str, bits: int, **options: Any) -> OpSpec:
    """Compares the values alone. Indices have neither derivatives nor a tolerance; the tests of the op check them."""
    function, reference = getattr(_ext, name), {"quantized_argmax": quantized_argmax, "quantized_topk": quantized_topk}
    return OpSpec(
        name=name,
        variant="",
        function=with_codes(_values_of(function), bits, **options),
        reference=with_codes(_values_of(reference[name]), bits, **options),
        make_inputs=_head_inputs,
        arguments=("x", "scales", "biases"),
        operands=("x", "scales"),
        contract_shapes=((1, 3, 1), (0, 3, 1), (8, 5, 3), (9, 67, 2), (12, 11, 2), (5, 11, 2)),
        check_shapes=((3, 513, 4), (1, 4096, 8)),
        float32_tolerance=5e-5,
        special_values=SPECIAL_VALUES,
        scattered_gradients=True,  # MLX's scatter sums the gradients of a row of w that several rows of x choose
    )


SPECS = (
    _head_spec("quantized_argmax", 4, return_values=True),
    _head_spec("quantized_topk", 5, k=3),
)
