"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import EVERY_FORMAT, FORMATS, MODEL_DTYPES, Call, for_matrix_units

EXPERTS = 3
# Sorted pairs, by the rows that an expert has on average: few; many; those of each tile of gather_gemm, and of
# gather_gemm_group.
FEW, MANY = 24, 60
GEMM, GEMM_GROUP = (36, 60), (60, 200, 500)

Matrix = tuple[mx.array, ...]


def ids(pairs: int, experts: int = EXPERTS) -> mx.array:
    return mx.array(sorted(i % experts for i in range(pairs)), mx.int32)


def experts_of(dtype: mx.Dtype, outputs: int, columns: int, count: int = EXPERTS, **options: object) -> Matrix:
    return tuple(mx.quantize(mx.zeros((count, outputs, columns), dtype), **options))


def rows(dtype: mx.Dtype, count: int, columns: int) -> mx.array:
    return mx.zeros((count, 1, columns), dtype)


def gated(x: mx.array, matrix: Matrix, rhs: mx.array, *, sorted: bool = True, **options: object) -> mx.array:
    return _ext._gather_quantized_swiglu(x, list(matrix), list(matrix), rhs, sorted=sorted, **options)


def product_of(x: mx.array, matrix: Matrix, rhs: mx.array, *, sorted: bool = True, **options: object) -> mx.array:
    return mlx_anvil.gather_quantized_matmul(x, *matrix, rhs_indices=rhs, sorted_indices=sorted, **options)


def of_format(dtype: mx.Dtype, options: dict[str, object]) -> Iterator[Call]:
    matrix = experts_of(dtype, 128, 128, **options)
    few, many = rows(dtype, FEW, 128), rows(dtype, MANY, 128)
    for op in (product_of, gated):
        yield partial(op, rows(dtype, 2, 128), matrix, mx.array([[2, 0], [1, 1]]), sorted=False, **options)
        yield partial(op, few, matrix, ids(FEW), **options)
        yield partial(op, many, matrix, ids(MANY), **options)
        yield partial(op, mx.zeros((2, 40, 128), dtype), matrix, mx.array([2, 0]), sorted=False, **options)
        if dtype != mx.float32:
            for pairs in GEMM:
                yield for_matrix_units(partial(op, rows(dtype, pairs, 128), matrix, ids(pairs), **options))
            for pairs in GEMM_GROUP:
                by_groups = partial(op, rows(dtype, pairs, 128), matrix, ids(pairs), **options)
                yield for_matrix_units(by_groups, group_products=True)
    yield partial(product_of, many, matrix, ids(MANY), transpose=False, **options)


def of_matrix_units(dtype: mx.Dtype, options: dict[str, object]) -> Iterator[Call]:
    """Tiles of matrix units for few rows of w and for many. Eight rows of x of the first are not staged."""
    for outputs, op in product((32, 512), (product_of, gated)):
        matrix = experts_of(dtype, outputs, 256, **options)
        one = partial(op, rows(dtype, 2, 256), matrix, mx.array([2, 0]), sorted=False, **options)
        several = partial(op, rows(dtype, FEW, 256), matrix, ids(FEW), **options)
        yield for_matrix_units(one)
        yield for_matrix_units(several)


def of_dense(dtype: mx.Dtype) -> Iterator[Call]:
    w = mx.zeros((EXPERTS, 128, 128), dtype)
    for pairs, b in product((FEW, MANY), (w, w.swapaxes(-1, -2))):
        x = rows(dtype, pairs, 128)
        yield partial(mlx_anvil.gather_matmul, x, b, rhs_indices=ids(pairs), sorted_indices=True)


def of_sums(dtype: mx.Dtype) -> Iterator[Call]:
    """The gradient in x, of which several pairs have a row."""
    for columns in (128, 37):
        w, x, y = mx.zeros((EXPERTS, columns, columns), dtype), rows(dtype, 2, columns), rows(dtype, 3, columns)
        product_with = partial(mlx_anvil.gather_matmul, b=w, lhs_indices=mx.array([1, 0, 1]), rhs_indices=ids(3))
        yield partial(mx.vjp, product_with, [x], [y])


def every_kernel() -> Iterator[Call]:
    for dtype in DTYPES:
        yield from of_dense(dtype)
        yield from of_sums(dtype)
        for options in EVERY_FORMAT:
            yield from of_format(dtype, options)
            if dtype != mx.float32 and options["mode"] == "affine" and options["bits"] == 4:
                yield from of_matrix_units(dtype, options)


def of_models() -> Iterator[Call]:
    """A token, a few and a prompt of a mixture with 64 experts, 8 of a token."""
    experts, k = 64, 8
    for dtype, form, columns in product(MODEL_DTYPES, FORMATS, (512, 768)):  # 768: no multiple of gather_gemm's steps
        matrix = experts_of(dtype, 64, columns, experts, **form)
        for tokens in (1, 16, 512):
            pairs = tokens * k
            order = ids(pairs, experts)
            if tokens == 1:
                x, order = rows(dtype, 1, columns), order.reshape(1, k)
            else:
                x = rows(dtype, pairs, columns)
            for op in (product_of, gated):
                yield partial(op, x, matrix, order, sorted=tokens > 1, **form)
            back = rows(dtype, pairs, 64)  # the gradient in x, where adapters are trained
            yield partial(product_of, back, matrix, order.reshape(-1), transpose=False, sorted=tokens > 1, **form)
