"""Products of bytes by tiles (AMX) have the bits of those by vectors (AVX-512 VNNI)."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from gguf_blocks import BLOCKS, MODES, GgufMatrix
from mlx_anvil import _ext
from mlx_anvil.reference import DTYPES
from quantized_numpy import FORMATS, draw, normal
from support import assert_same_bits, on_isa

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif("amx" not in _ext._supported_isas(), reason="this processor has no AMX"),
]

# Rows of x and of w, groups of 128 columns: a tile has 16 rows, a panel of w 32 rows, and a chunk 256 columns.
SIZES = [(9, 33, 1), (16, 32, 2), (17, 70, 3), (70, 130, 9)]
BITS = (None, 16, 8)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_same_by_tiles(multiply: Callable[[], mx.array]) -> None:
    results = []
    for isa in ("avx512_bf16", "amx"):
        with on_isa(isa), mlx_anvil.strict():
            results.append(multiply())
            mx.eval(results)
    assert_same_bits(*results)


@each_dtype
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_product(format, dtype, rng):
    for rows, outputs, groups in SIZES:
        matrix = draw(format, (outputs, 128 * groups), rng, dtype)
        x = normal((rows, 128 * groups), dtype)
        for bits in BITS:
            assert_same_by_tiles(
                lambda x=x, matrix=matrix, bits=bits: mlx_anvil.quantized_matmul(
                    x, *matrix.arrays, activation_bits=bits, **format.options
                )
            )


@each_dtype
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_product_with_rows(format, dtype, rng):
    for rows, outputs, groups in (*SIZES, (40, 600, 5)):
        matrix = draw(format, (outputs, 128 * groups), rng, dtype)
        dy = normal((rows, outputs), dtype)
        assert_same_by_tiles(
            lambda dy=dy, matrix=matrix: mlx_anvil.quantized_matmul(
                dy, *matrix.arrays, transpose=False, **format.options
            )
        )


@each_dtype
@pytest.mark.parametrize("mode", MODES)
def test_gguf(mode, dtype, rng):
    for rows, outputs, columns in ((9, 33, 256), (70, 95, 1280)):
        matrix = GgufMatrix.random(rng, mode, outputs, columns // BLOCKS[mode][1] * BLOCKS[mode][1])
        x = normal((rows, matrix.weights.shape[1]), dtype)
        for bits in BITS:
            assert_same_by_tiles(
                lambda x=x, matrix=matrix, bits=bits: mlx_anvil.quantized_matmul(
                    x, matrix.w, mode=mode, activation_bits=bits
                )
            )


@each_dtype
def test_experts(dtype, rng):
    format = FORMATS[7]
    experts = draw(format, (3, 40, 256), rng, dtype)
    x, chosen = normal((50, 1, 256), dtype), mx.array(rng.integers(0, 3, (50, 1)).astype(np.uint32))
    assert_same_by_tiles(
        lambda: mlx_anvil.gather_quantized_matmul(x, *experts.arrays, rhs_indices=chosen, **format.options)
    )


@each_dtype
def test_extremes(dtype, rng):
    """Rows that are not finite, zeros, and numbers of very different sizes, in the middle of a tile and at its end."""
    format = FORMATS[7]
    matrix = draw(format, (50, 512), rng, dtype)
    x = np.array(normal((35, 512), mx.float32))
    x[3, 100], x[20, 0], x[34, 511] = np.inf, np.nan, -np.inf
    x[5] = 0
    x[[7, 33]] *= np.exp2(rng.integers(-14, 10, 512))
    rows = mx.array(x).astype(dtype)
    assert_same_by_tiles(lambda: mlx_anvil.quantized_matmul(rows, *matrix.arrays, **format.options))


def test_several_passes(rng):
    """More rows than one pass over the matrix multiplies."""
    format = FORMATS[7]
    matrix = draw(format, (64, 2048), rng)
    x = normal((601, 2048))
    assert_same_by_tiles(lambda: mlx_anvil.quantized_matmul(x, *matrix.arrays, **format.options))
