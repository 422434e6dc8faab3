"""gather_quantized_matmul and gather_matmul: their definitions in MLX ops, and their entries in the registry."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference._quantized import SPECIAL_VALUES, dequantized, quantized_codes


def gather_quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = True,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """``gather_matmul`` of ``x`` and the dequantized ``w``, transposed with ``transpose``."""
    matrix = dequantized(w, scales, biases, group_size, bits, mode)
    dtype = x.dtype if biases is None else mx.result_type(x, matrix)
    matrix = matrix.astype(dtype)
    return gather_matmul(x.astype(dtype), matrix.swapaxes(-1, -2) if transpose else matrix, lhs_indices, rhs_indices)


def gather_matmul(
    a: mx.array, b: mx.array, lhs_indices: mx.array | None = None, rhs_indices: mx.array | None = None
) -> mx.array:
    """``a[lhs] @ b[rhs]``, where ids count the matrices over all leading axes."""
    left = a if lhs_indices is None else a.reshape(-1, *a.shape[-2:])[lhs_indices]
    right = b if rhs_indices is None else b.reshape(-1, *b.shape[-2:])[rhs_indices]
    return left @ right


# ---- a shape is (tokens, experts per token, experts, outputs, groups of 64) ------------------------------------------


@cache
def _ids(tokens: int, k: int, count: int, seed: int = 0) -> mx.array:
    """Random ids ``[tokens, k]``. Some repeat, and some are negative."""
    draw = random.Random(f"{tokens} {k} {count} {seed}")
    ids = [[draw.randrange(-count, count) for _ in range(k)] for _ in range(tokens)]
    return mx.array(ids, mx.int32).reshape(tokens, k)


def _quantized_inputs(shape: tuple[int, ...], dtype: mx.Dtype, transpose: bool, rows: int) -> list[mx.array]:
    tokens, _, experts, outputs, groups = shape
    x = mx.random.normal((tokens, 1, rows, groups * 64 if transpose else outputs))
    scales = 0.02 * mx.random.normal((experts, outputs, groups))
    biases = 0.1 * mx.random.normal((experts, outputs, groups))
    return [a.astype(dtype) for a in (x, scales, biases)]


def _quantized_spec(
    variant: str,
    bits: int,
    transpose: bool = True,
    rows: int = 1,
    with_lhs: bool = False,
    check_shapes: tuple[tuple[int, ...], ...] = (),
) -> OpSpec:
    """With ``with_lhs``, tokens are chosen by ids too; otherwise each takes its experts."""
    k = 3

    def of_floats(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(x: mx.array, scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
            experts, outputs, groups = biases.shape
            codes = quantized_codes(experts * outputs, groups, bits).reshape(experts, outputs, groups * 2 * bits)
            tokens = x.shape[0] if isinstance(x, mx.array) else 1
            ids = {"rhs_indices": _ids(tokens, k, experts)}
            if with_lhs:
                ids["lhs_indices"] = _ids(tokens, k, tokens, seed=1)
            return function(x, codes, scales, biases, bits=bits, transpose=transpose, **ids, **more)

        return call

    return OpSpec(
        name="gather_quantized_matmul",
        variant=variant,
        function=of_floats(_ext.gather_quantized_matmul),
        reference=of_floats(gather_quantized_matmul),
        make_inputs=lambda shape, dtype: _quantized_inputs(shape, dtype, transpose, rows),
        arguments=("x", "scales", "biases"),
        operands=("x", "scales"),
        # The last two are equal, because codes and ids are constants of a compiled graph.
        contract_shapes=(
            (1, k, 1, 1, 1),
            (int(with_lhs), k, 2, 3, 1),
            (5, k, 4, 7, 3),
            (13, k, 2, 37, 2),
            (3, k, 5, 5, 1),
            (3, k, 5, 5, 1),
        ),
        check_shapes=check_shapes,
        float32_tolerance=5e-5,
        special_values=SPECIAL_VALUES,
        scattered_gradients=True,
    )


def _dense_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """A shape is (tokens, experts per token, experts, outputs, columns)."""
    tokens, _, experts, outputs, columns = shape
    w = mx.random.normal((experts, columns, outputs)) / max(1, columns) ** 0.5
    return [a.astype(dtype) for a in (mx.random.normal((tokens, 1, 1, columns)), w)]


def _dense_spec() -> OpSpec:
    k = 2

    def of_floats(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(a: mx.array, b: mx.array, **more: Any) -> mx.array:
            counts = (x.shape[0] if isinstance(x, mx.array) else 1 for x in (a, b))
            return function(a, b, rhs_indices=_ids(next(counts), k, next(counts)), **more)

        return call

    return OpSpec(
        name="gather_matmul",
        variant="",
        function=of_floats(_ext.gather_matmul),
        reference=of_floats(gather_matmul),
        make_inputs=_dense_inputs,
        arguments=("a", "b"),
        operands=("a", "b"),
        contract_shapes=(
            (1, k, 1, 1, 1),
            (0, k, 2, 3, 5),
            (5, k, 4, 7, 33),
            (29, k, 2, 37, 67),
            (3, k, 5, 5, 9),
            (3, k, 5, 5, 9),
        ),
        check_shapes=((5, k, 4, 65, 130), (64, k, 8, 256, 512)),
        scattered_gradients=True,
    )


SPECS = (
    _quantized_spec("4 bits", 4, check_shapes=((1, 3, 8, 65, 2), (64, 3, 8, 256, 8))),
    _quantized_spec("3 bits, x by ids", 3, rows=2, with_lhs=True, check_shapes=((3, 3, 8, 65, 2), (16, 3, 8, 256, 8))),
    _quantized_spec("plain", 4, transpose=False, check_shapes=((3, 3, 8, 65, 2), (16, 3, 8, 256, 8))),
    _dense_spec(),
)
