"""Decodes on GPUs with matrix units, whose kernels the simulator runs if told so. Gradients have no such kernels."""

import mlx.core as mx
import pytest

import mlx_anvil
from attention_numpy import ROUNDING
from mlx_anvil._check import OUTPUT_FACTOR
from test_flash_attention import FEATURES, Case, assert_close, draw

pytestmark = pytest.mark.cpu_only

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


def decode(case: Case) -> list[str]:
    """Checks the output; gives the kernels."""
    with mlx_anvil.simulate(checked=True, matrix_units=True), mlx_anvil.trace() as trace:
        out = mlx_anvil.flash_attention(case.q, case.k, case.v, **case.options)
        mx.eval(out)
    composed = case.reference(round_to=ROUNDING[case.q.dtype])
    assert_close("out", out, case.reference().out, composed.out, OUTPUT_FACTOR)
    return trace.kernels


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, dtype: mx.Dtype):
    # 12 rows of 16 in two blocks; the last keys are fewer than a SIMD group takes.
    (kernel,) = decode(draw((8, 2), (3, 77), (64, 64), dtype, feature))
    assert "decode_matrix" in kernel


@each_dtype
def test_shapes(dtype: mx.Dtype):
    # Keys in parts, padded heads, fewer keys than SIMD groups.
    for heads, lengths, dims in (
        ((8, 2), (1, 523), (128, 128)),
        ((7, 1), (1, 523), (128, 96)),
        ((4, 1), (2, 9), (40, 72)),
    ):
        kernels = decode(draw(heads, lengths, dims, dtype))
        assert "decode_matrix" in kernels[0]
        assert len(kernels) == (2 if lengths[1] > 256 else 1)


def test_few_rows_and_other_heads_keep_their_kernels():
    for heads, dims in (((2, 1), (64, 64)), ((4, 1), (63, 63)), ((4, 1), (192, 192))):
        (kernel,) = decode(draw(heads, (1, 20), dims, mx.float16))
        assert "decode_matrix" not in kernel
