"""The definitions of quantized_topk and quantized_argmax in plain MLX, and their entries in the registry of ops."""

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
    """All logits, sorted. MLX's sort is stable, with NaN above all: in reverse order the first of equal ones comes last."""
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
    """The first of those."""
    indices, values = quantized_topk(x, w, scales, biases, k=1, **options)
    return (indices[..., 0], values[..., 0]) if return_values else indices[..., 0]


def _head_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """With up to 4 rows of the matrix that stand out, each by its own bias: tests take differences, over which the order
    of logits should not change, and compare with products in other formats, which should not change it either."""
    rows, outputs, groups = shape
    x = 1 + 0.3 * mx.random.normal((rows, groups * 64))
    scales = 0.004 * mx.random.normal((outputs, groups))
    levels = mx.maximum(4 - mx.random.permutation(outputs).astype(mx.float32), 0)
    biases = mx.broadcast_to(0.25 * levels[:, None], (outputs, groups))
    return [a.astype(dtype) for a in (x, scales, biases)]


def _values_of(function: Callable[..., Any]) -> Callable[..., mx.array]:
    return lambda *arrays, **options: cast(mx.array, function(*arrays, **options)[1])


def _head_spec(name: str, bits: int, **options: Any) -> OpSpec:
    """Of the values: indices have no derivatives and no tolerance, and the tests of the op judge them."""
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
        scattered_gradients=True,  # rows of w that are best for several of x are added up by MLX's scatter
    )


SPECS = (
    _head_spec("quantized_argmax", 4, return_values=True),
    _head_spec("quantized_topk", 5, k=3),
)
