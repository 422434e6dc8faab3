"""Known findings of checked mode in MLX's kernels, recorded here so that a change on either side is noticed."""

import numpy as np
import pytest

from mlx_anvil.mslc import CHECKED, Library, SimulationError
from tests.mslc.control import mlx_kernels


def test_gemv_with_several_simd_groups_a_row_waits_in_a_divergent_barrier(rng):
    """GEMVKernel (BN > 1) puts a threadgroup_barrier inside `if (thrN == 0)`: one lane of each SIMD group waits, the
    others go on to the end. It also orders no memory (mem_none), although threadgroup memory is exchanged there."""
    rows, columns = 8, 512
    source = mlx_kernels.source(["gemv.h"], [("gemv", "gemv", "float", 1, 8, 1, 32, 4, 4, 0, "false")])
    kernels = Library(source, [mlx_kernels.include_dir()], defines={"MLX_METAL_JIT": 1}, options=CHECKED)
    matrix, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, columns), columns))
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int64)
    buffers = {0: matrix, 1: x, 2: x, 3: np.zeros(rows, np.float32), 4: columns, 5: rows, 6: columns, 7: 1.0, 8: 0.0}
    buffers |= {9: 1, 10: one, 11: zero, 12: zero, 13: zero, 14: 1}
    with pytest.raises(SimulationError) as caught:
        kernels.run("gemv", buffers, (rows // 4, 1, 1), (32, 8, 1))
    assert {finding.kind for finding in caught.value.findings} == {"barrier divergence"}
