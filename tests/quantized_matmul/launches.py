"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    BATCHES,
    EVERY_FORMAT,
    FEW,
    FORMATS,
    MANY,
    MODEL_DTYPES,
    PROMPT,
    RAGGED_PROMPT,
    SEVERAL,
    Call,
    columns_of,
    for_matrix_units,
    matrix,
)


def every_kernel() -> Iterator[Call]:
    for dtype, options in product(DTYPES, EVERY_FORMAT):
        for outputs in (128, 512):  # rows of w, which a plain product sums in one part or in several
            gate, up = (mx.quantize(mx.zeros((outputs, 128), dtype), **options) for _ in range(2))
            for rows in (*range(1, 9), 9, 17, 40):
                x = mx.zeros((rows, 128), dtype)
                y = mx.zeros((rows, outputs), dtype)
                yield lambda x=x, w=gate, o=options: mlx_anvil.quantized_matmul(x, *w, transpose=True, **o)
                yield lambda y=y, w=gate, o=options: mlx_anvil.quantized_matmul(y, *w, transpose=False, **o)
                gated = partial(mlx_anvil.quantized_swiglu, x, gate, up, **options)
                yield gated
                yield for_matrix_units(gated)
                if rows <= 8:  # by GEMV, where quantized_matmul takes tiles from 3 rows on
                    yield lambda x=x, w=gate, o=options: mlx_anvil.quantized_gemv(x, *w, **o)
        if dtype != mx.float32:  # each tile of quantized_gemm; dequantised for a dense product
            for outputs, rows in ((128, 9), (8500, 9), (128, 17), (128, 33), (128, 200)):
                w, x = mx.quantize(mx.zeros((outputs, 128), dtype), **options), mx.zeros((rows, 128), dtype)
                yield for_matrix_units(lambda x=x, w=w, o=options: mlx_anvil.quantized_matmul(x, *w, **o))
            for rows in (40, 100, 150, 250):  # each tile of quantized_gemm_group
                w, x = mx.quantize(mx.zeros((128, 128), dtype), **options), mx.zeros((rows, 128), dtype)
                by_groups = partial(mlx_anvil.quantized_matmul, x, *w, **options)
                yield for_matrix_units(by_groups, group_products=True)
            for rows in (9, 17, 33):
                w, y = mx.quantize(mx.zeros((128, 128), dtype), **options), mx.zeros((rows, 128), dtype)
                plain = partial(mlx_anvil.quantized_matmul, y, *w, transpose=False, **options)
                yield for_matrix_units(plain)
        else:  # tiles in threadgroup memory
            for transpose in (True, False):
                x = mx.zeros((40, 128 if transpose else outputs), dtype)
                tiled = partial(mlx_anvil.quantized_matmul, x, *gate, transpose=transpose, **options)
                yield for_matrix_units(tiled)
        # Tiles of matrix units for few, more (some of half as many) and many rows of w; with the last, eight rows of
        # x are not staged.
        for outputs, rows in (
            product((128, 6144, 65536), (1, 8)) if options["mode"] == "affine" and options["bits"] == 4 else ()
        ):
            gate, up = (mx.quantize(mx.zeros((outputs, 256), dtype), **options) for _ in range(2))
            x = mx.zeros((rows, 256), dtype)
            yield for_matrix_units(lambda x=x, w=gate, o=options: mlx_anvil.quantized_gemv(x, *w, **o))
            yield for_matrix_units(lambda x=x, g=gate, u=up, o=options: mlx_anvil.quantized_swiglu(x, g, u, **o))


def of_models() -> Iterator[Call]:
    for dtype, form in product(MODEL_DTYPES, FORMATS):
        widths = columns_of(form)
        for rows, columns, outputs in product((1, 8), widths, (FEW, SEVERAL, MANY)):
            x = mx.zeros((rows, columns), dtype)
            yield partial(mlx_anvil.quantized_matmul, x, *matrix(dtype, outputs, columns, **form), **form)
        for rows, columns in product((1, 8), widths):
            x, half = mx.zeros((rows, columns), dtype), matrix(dtype, SEVERAL, columns, **form)
            yield partial(mlx_anvil.quantized_swiglu, x, half, half, **form)
        few = matrix(dtype, FEW, 256, **form)
        for rows in (*BATCHES, PROMPT, RAGGED_PROMPT):
            yield partial(mlx_anvil.quantized_matmul, mx.zeros((rows, 256), dtype), *few, **form)
            # The gradient in x, where adapters are trained.
            back = partial(mlx_anvil.quantized_matmul, transpose=False, **form)
            yield partial(back, mx.zeros((rows, FEW), dtype), *few)
