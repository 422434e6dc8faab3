"""Inputs of the calls in tests/<op>/launches.py."""

from collections.abc import Callable
from itertools import product

import mlx.core as mx

import mlx_anvil

Call = Callable[[], object]


def for_matrix_units(call: Call, *, group_products: bool = False) -> Call:
    def chosen() -> object:
        if mx.default_device() == mx.gpu:  # which has them or not
            return call()
        with mlx_anvil.simulate(matrix_units=True, group_products=group_products):
            return call()

    chosen.for_matrix_units = True
    return chosen


# ---- quantized matrices ----------------------------------------------------------------------------------------------

EVERY_FORMAT = [
    {"group_size": group_size, "bits": bits, "mode": mode}
    for mode, group_sizes, widths in (
        ("affine", (32, 64, 128), (2, 3, 4, 5, 6, 8)),
        ("mxfp4", (32,), (4,)),
        ("mxfp8", (32,), (8,)),
        ("nvfp4", (16,), (4,)),
    )
    for group_size, bits in product(group_sizes, widths)
]

# Formats of models.
FORMATS = [{"group_size": group_size, "bits": bits} for bits in (4, 8) for group_size in (32, 64, 128)]
MANY, SEVERAL, FEW = 65536, 8192, 1024  # rows of a matrix: a vocabulary; an MLP's; the keys' projection

ODD_WIDTH = 896  # no multiple of the 256 columns that kernels by matrix units take at a time: Qwen 2.5 0.5B


def columns_of(form: dict[str, int]) -> tuple[int, ...]:
    """Columns of a model's matrices in this format."""
    return (256, ODD_WIDTH) if form == {"group_size": 64, "bits": 4} else (256,)


def matrix(dtype: mx.Dtype, rows: int, columns: int, group_size: int, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    factors = mx.zeros((rows, columns // group_size), dtype)
    return mx.zeros((rows, columns * bits // 32), mx.uint32), factors, factors


# ---- sizes of models; small where a dispatch does not go by them -----------------------------------------------------

MODEL_DTYPES = (mx.float16, mx.bfloat16)  # of weights and activations
WIDTH = 2048  # of the residual stream
PROMPT, RAGGED_PROMPT = 512, 77
SHORT_CACHE, LONG_CACHE = 64, 4096
FEW_TOKENS = 4
BATCHES = 16, 32  # tokens of as many requests, or drafted ones


def projected_heads(dtype: mx.Dtype, count: int, length: int, dim: int) -> mx.array:
    """Heads of a projection's output, as in models: the rows of one head are not adjacent."""
    return mx.zeros((1, length, count, dim), dtype).swapaxes(1, 2)


def cached(dtype: mx.Dtype, count: int, length: int, dim: int) -> mx.array:
    """A part of a buffer that grows in steps."""
    return mx.zeros((1, count, length + 256, dim), dtype)[:, :, :length]
