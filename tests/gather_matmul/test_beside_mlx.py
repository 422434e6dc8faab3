"""What the Metal kernels ask of memory, beside MLX's kernels for gathered products."""

import mlx.core as mx
import numpy as np
import pytest

from quantized_numpy import Format
from tests.gather_matmul.metal_cases import Case
from tests.gather_matmul.profiles import device_bytes, profile_mlx, profile_ours

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]  # they choose the simulator themselves

each_width = pytest.mark.parametrize("bits", [3, 4, 8])
COLUMNS, OUTPUTS = 1024, 64


def draw(rng: np.random.Generator, bits: int, pairs: int, experts: int, **more: bool) -> Case:
    format = Format("affine", 64, bits)
    return Case.draw(rng, format, mx.float16, pairs, OUTPUTS, columns=COLUMNS, experts=experts, **more)


@each_width
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_one_token(bits, gated, rng):
    """Eight experts of 16: every selected expert's weights are read once."""
    case = draw(rng, bits, 8, 16, gated=gated)
    case.vectors = [None, None]
    ours, mlx = profile_ours(case), profile_mlx("gather_qmv_fast", case)
    assert device_bytes(ours) <= device_bytes(mlx)
    assert ours.matrix_lines <= mlx.matrix_lines
    assert ours.x_lines <= mlx.x_lines
    assert ours.threadgroup_bytes <= mlx.threadgroup_bytes
    assert ours.word_bytes == 8 / len(set(case.rhs.tolist())) * ours.word_unique


@each_width
def test_tokens_that_share_experts(bits, rng):
    """Up to eight rows share a read of the weights, which MLX's kernel reads for each."""
    case = draw(rng, bits, 24, 4, sorted_ids=True)
    ours, mlx = profile_ours(case), profile_mlx("gather_qmv_fast", case)
    runs = np.bincount(case.rhs, minlength=4)
    if bits != 3:  # codes of a lane straddle words
        assert ours.word_bytes == (-(-runs // 8)).sum() * OUTPUTS * COLUMNS * bits // 8
    assert device_bytes(ours) <= 0.5 * device_bytes(mlx)


@each_width
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_many_rows(bits, gated, rng):
    """No tile of an expert without pairs, and weights do not pass through threadgroup memory."""
    case = draw(rng, bits, 100, 5, sorted_ids=True, gated=gated)
    case.vectors = [None, None]
    case.rhs[case.rhs == 2] = 3
    ours, mlx = profile_ours(case), profile_mlx("gather_qmm_rhs", case)
    assert ours.matrix_bytes <= mlx.matrix_bytes
    assert device_bytes(ours) <= device_bytes(mlx)
    assert ours.threadgroup_bytes <= mlx.threadgroup_bytes
    assert ours.barriers <= mlx.barriers
