"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import BATCHES, FEW, MANY, MODEL_DTYPES, PROMPT, Call, for_matrix_units

# Bytes of a block, and its columns.
BLOCKS = {
    "q4_0": (18, 32),
    "q8_0": (34, 32),
    "q4_k": (144, 256),
    "q5_k": (176, 256),
    "q6_k": (210, 256),
    "iq4_nl": (18, 32),
    "iq4_xs": (136, 256),
}
MODES_OF_MODELS = ("q4_k", "q6_k", "q8_0")  # files named Q4_K_M have the first two


def matrix(mode: str, outputs: int, columns: int = 256) -> mx.array:
    size, of_block = BLOCKS[mode]
    return mx.zeros((outputs, columns // of_block * size), mx.uint8)


def every_kernel() -> Iterator[Call]:
    for dtype, mode in product(DTYPES, BLOCKS):
        for outputs in (128, 512):  # rows of w, which a plain product sums in one part or in several
            w = matrix(mode, outputs)
            for rows in (1, 2, 4, 8, 9, 17, 40):
                x, y = mx.zeros((rows, 256), dtype), mx.zeros((rows, outputs), dtype)
                yield partial(mlx_anvil.quantized_matmul, x, w, mode=mode)
                yield partial(mlx_anvil.quantized_matmul, y, w, transpose=False, mode=mode)
                if rows <= 8:  # by GEMV, where quantized_matmul takes tiles from 3 rows on
                    yield partial(mlx_anvil.quantized_gemv, x, w, mode=mode)
        yield for_matrix_units(partial(mlx_anvil.quantized_matmul, mx.zeros((40, 256), dtype), w, mode=mode))
        for ids in (mx.zeros((3,), mx.int32), mx.zeros((3,), mx.uint64)):
            yield partial(mlx_anvil.quantized_embedding, ids, w, mode=mode, dtype=dtype)


def of_models() -> Iterator[Call]:
    for dtype, mode in product(MODEL_DTYPES, MODES_OF_MODELS):
        few = matrix(mode, FEW)
        for rows, outputs in product((1, 8), (FEW, MANY)):
            yield partial(mlx_anvil.quantized_matmul, mx.zeros((rows, 256), dtype), matrix(mode, outputs), mode=mode)
        for rows in (*BATCHES, PROMPT):
            yield partial(mlx_anvil.quantized_matmul, mx.zeros((rows, 256), dtype), few, mode=mode)
        # The gradient in x, where adapters are trained.
        back = mx.zeros((PROMPT, FEW), dtype)
        yield partial(mlx_anvil.quantized_matmul, back, few, transpose=False, mode=mode)
        yield partial(mlx_anvil.quantized_embedding, mx.zeros((1, 1), mx.int32), few, mode=mode, dtype=dtype)
