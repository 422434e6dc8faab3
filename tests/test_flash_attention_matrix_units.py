"""Decodes on GPUs with matrix units, whose kernels the simulator runs if told so."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from test_flash_attention import FEATURES, check, draw

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def matrix_units():
    with mlx_anvil.simulate(checked=True, matrix_units=True):
        yield


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("feature", FEATURES)
def test_decode(rng: np.random.Generator, feature: str, dtype: mx.Dtype):
    # Rows: one of 8 missing, several blocks; keys: in parts, and fewer than a SIMD group takes; padded heads.
    for heads, lengths, dims in (
        ((8, 2), (1, 523), (64, 64)),
        ((12, 1), (3, 37), (128, 96)),
        ((7, 1), (1, 9), (40, 72)),
    ):
        with mlx_anvil.trace() as trace:
            check(draw(heads, lengths, dims, dtype, feature))
        assert any("decode_matrix" in kernel for kernel in trace.kernels)


def test_few_rows_and_other_heads_keep_their_kernels(rng: np.random.Generator):
    for heads, dims in (((2, 1), (64, 64)), ((4, 1), (63, 63)), ((4, 1), (192, 192))):
        with mlx_anvil.trace() as trace:
            case = draw(heads, (1, 20), dims, mx.float16, "none")
            mx.eval(mlx_anvil.flash_attention(case.q, case.k, case.v))
        assert not any("decode_matrix" in kernel for kernel in trace.kernels)
