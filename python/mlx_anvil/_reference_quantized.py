"""The definitions of the ops on quantized matrices in plain MLX, and their entries in the registry of ops."""

import math
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx

from mlx_anvil import _ext, _float64
from mlx_anvil._op_spec import OpSpec


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
    """The product with the matrix that ``w`` stands for, in full."""
    matrix = _dequantized(w, scales, biases, group_size, bits, mode)
    dtype = x.dtype if biases is None else mx.result_type(x, matrix)
    matrix = matrix.astype(dtype)
    return x.astype(dtype) @ (matrix.swapaxes(-1, -2) if transpose else matrix)


def quantized_embedding(
    ids: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """Rows of the matrix that ``w`` stands for, of which only these are made."""
    rows = (w[ids], scales[ids], None if biases is None else biases[ids])
    return _dequantized(*rows, group_size, bits, mode)


def quantized_swiglu(x: mx.array, gate: tuple[mx.array, ...], up: tuple[mx.array, ...], **options: Any) -> mx.array:
    """``silu(x Wg^T) * (x Wu^T)`` with both matrices in full."""
    product: Callable[..., mx.array] = quantized_matmul
    gates, ups = product(x, *gate, **options), product(x, *up, **options)
    return gates * _float64.sigmoid(gates) * ups


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


def _dequantized(
    w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str
) -> mx.array:
    with mx.stream(mx.cpu):
        ones, zeros = (scales, None) if biases is None else (mx.ones(scales.shape), mx.zeros(scales.shape))
        rows = w.shape[0]
        if mode == "nvfp4":  # of which MLX 0.32.4 takes no odd number of groups on the CPU
            w, ones = (mx.concatenate([x, x]) for x in (w, ones))
        codes = mx.dequantize(w, ones, zeros, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)[:rows]
    if biases is None:
        return codes
    codes = codes.astype(mx.result_type(scales, biases))
    return codes * mx.repeat(scales, group_size, axis=-1) + mx.repeat(biases, group_size, axis=-1)


# ---- quantized matrices: a shape is (rows of x, outputs, groups of 64) ------------------------------------------------


@cache
def _quantized_codes(outputs: int, groups: int, bits: int, copy: int = 0) -> mx.array:
    """Codes that depend on the shape only, so that those of a call can be made again from its arguments."""
    draw = random.Random(copy)
    return mx.array([[draw.getrandbits(32) for _ in range(groups * 2 * bits)] for _ in range(outputs)], mx.uint32)


def _quantized_inputs(shape: tuple[int, ...], dtype: mx.Dtype, transpose: bool = True) -> list[mx.array]:
    rows, outputs, groups = shape
    x = mx.random.normal((rows, groups * 64 if transpose else outputs))
    scales = 0.02 * mx.random.normal((outputs, groups))
    biases = 0.1 * mx.random.normal((outputs, groups))
    return [a.astype(dtype) for a in (x, scales, biases)]


def _with_codes(function: Callable[..., mx.array], bits: int, **options: Any) -> Callable[..., mx.array]:
    """As a function of its floating-point arguments."""

    def of_floats(x: mx.array, scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
        return function(x, _quantized_codes(*biases.shape, bits), scales, biases, bits=bits, **options, **more)

    return of_floats


@cache
def _ids(rows: int) -> mx.array:
    """Twice as many as there are rows, so that some come several times; some count from the end."""
    draw = random.Random(rows)
    return mx.array([[draw.randrange(-rows, rows) for _ in range(rows)] for _ in range(2)], mx.int32)


def _embedding_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return _quantized_inputs((1, *shape), dtype)[1:]


def _embedding_with_codes(function: Callable[..., mx.array], bits: int) -> Callable[..., mx.array]:
    """As a function of its floating-point arguments."""

    def of_floats(scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
        rows, groups = biases.shape
        return function(_ids(rows), _quantized_codes(rows, groups, bits), scales, biases, bits=bits, **more)

    return of_floats


def _swiglu_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """With a small ``x``: tests take differences along random directions, over which silu should hardly bend."""
    x, scales, biases = _quantized_inputs(shape, mx.float32)
    return [a.astype(dtype) for a in (0.05 * x, scales, biases)]


def _swiglu_with_codes(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def of_floats(x: mx.array, scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
        gate, up = ((_quantized_codes(*biases.shape, 4, copy), scales, biases) for copy in range(2))
        return function(x, gate, up, **more)

    return of_floats


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


def _quantized_spec(variant: str, bits: int, transpose: bool, check_shapes: tuple[tuple[int, ...], ...]) -> OpSpec:
    return OpSpec(
        name="quantized_matmul",
        variant=variant,
        function=_with_codes(_ext.quantized_matmul, bits, transpose=transpose),
        reference=_with_codes(quantized_matmul, bits, transpose=transpose),
        make_inputs=partial(_quantized_inputs, transpose=transpose),
        arguments=("x", "scales", "biases"),
        operands=("x", "scales"),
        contract_shapes=((1, 1, 1), (0, 3, 1), (8, 5, 3), (9, 37, 2), (33, 65, 5), (12, 11, 2), (5, 11, 2)),
        check_shapes=check_shapes,
        float32_tolerance=5e-5,
        special_values=_QUANTIZED_SPECIAL_VALUES,
    )


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
        # The last twice: codes and ids are constants of a compiled graph.
        contract_shapes=((1, 1), (7, 1), (5, 3), (37, 2), (11, 2), (11, 2)),
        check_shapes=check_shapes,
        special_values=_QUANTIZED_SPECIAL_VALUES,
        scattered_gradients=True,  # rows that come several times are added up by MLX's scatter
    )


def _head_spec(name: str, bits: int, **options: Any) -> OpSpec:
    """Of the values: indices have no derivatives and no tolerance, and the tests of the op judge them."""
    function, reference = getattr(_ext, name), {"quantized_argmax": quantized_argmax, "quantized_topk": quantized_topk}
    return OpSpec(
        name=name,
        variant="",
        function=_with_codes(_values_of(function), bits, **options),
        reference=_with_codes(_values_of(reference[name]), bits, **options),
        make_inputs=_head_inputs,
        arguments=("x", "scales", "biases"),
        operands=("x", "scales"),
        contract_shapes=((1, 3, 1), (0, 3, 1), (8, 5, 3), (9, 67, 2), (12, 11, 2), (5, 11, 2)),
        check_shapes=((1, 4096, 8), (3, 513, 4)),
        float32_tolerance=5e-5,
        special_values=_QUANTIZED_SPECIAL_VALUES,
        scattered_gradients=True,  # rows of w that are best for several of x are added up by MLX's scatter
    )


# Without infinities: scale * sum(code * x) + bias * sum(x) takes 0 times infinity where the definition does not.
_QUANTIZED_SPECIAL_VALUES = (math.nan, 0.0, -0.0)


QUANTIZED_SPECS = (
    _quantized_spec("4 bits", 4, True, check_shapes=((1, 513, 8), (8, 512, 16), (64, 512, 16))),
    _quantized_spec("3 bits", 3, True, check_shapes=((3, 513, 8),)),
    _quantized_spec("plain", 4, False, check_shapes=((5, 512, 16),)),
    OpSpec(
        name="quantized_swiglu",
        variant="",
        function=_swiglu_with_codes(_ext.quantized_swiglu),
        reference=_swiglu_with_codes(quantized_swiglu),
        make_inputs=_swiglu_inputs,
        arguments=("x", "scales", "biases"),
        operands=("x",),
        contract_shapes=((1, 1, 1), (0, 3, 1), (8, 5, 3), (9, 37, 2), (12, 11, 2), (5, 11, 2)),
        check_shapes=((1, 512, 16),),
        float32_tolerance=5e-5,
        special_values=_QUANTIZED_SPECIAL_VALUES,
    ),
    _embedding_spec("4 bits", 4, check_shapes=((257, 16),)),
    _embedding_spec("5 bits", 5, check_shapes=((257, 16),)),
    _head_spec("quantized_argmax", 4, return_values=True),
    _head_spec("quantized_topk", 5, k=3),
)
