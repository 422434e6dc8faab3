"""MLX's matrix products against NumPy: gemv and the fused steel GEMM."""

import numpy as np
import pytest

from mlx_anvil.mslc import SimulationError
from mlx_anvil.mslc.compiler import CHECKED
from tests.mslc.control.mlx_kernels import DECODE, ENCODE, assert_close, library

GEMM_PARAMS = np.dtype(
    [(name, "i4") for name in ("M", "N", "K", "lda", "ldb", "ldd", "tiles_n", "tiles_m")]
    + [(name, "i8") for name in ("batch_stride_a", "batch_stride_b", "batch_stride_d")]
    + [(name, "i4") for name in ("swizzle_log", "gemm_k_iterations_aligned", "batch_ndim", "padding")]
)
ADDMM_PARAMS = np.dtype([("ldc", "i4"), ("fdc", "i4"), ("batch_stride_c", "i8"), ("alpha", "f4"), ("beta", "f4")])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16_t"])
def test_gemv(rng, dtype, transposed):
    rows, columns = (70, 96) if transposed else (37, 259)
    tile = (1, 2, 8, 4, 4, 4) if transposed else (4, 1, 1, 32, 4, 4)
    kernels = library(["gemv.h"], [("gemv", "gemv_t" if transposed else "gemv", dtype, *tile, 0, "true")])
    matrix = ENCODE[dtype](rng.standard_normal((rows, columns)))
    length, results = (rows, columns) if transposed else (columns, rows)
    x, bias = (ENCODE[dtype](rng.standard_normal(n)) for n in (length, results))
    out = np.zeros(results, x.dtype)
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int64)
    buffers = {0: matrix, 1: x, 2: bias, 3: out, 4: length, 5: results, 6: columns, 7: 0.5, 8: -2.0, 9: 1}
    buffers |= {10: one, 11: zero, 12: zero, 13: zero, 14: 1}
    bm, bn, sm, sn, tm, tn = tile
    per_group = bn * sn * tn if transposed else bm * sm * tm
    kernels.run("gemv", buffers, (-(-results // per_group), 1, 1), (32, bn, bm))
    values = DECODE[dtype](matrix)
    product = (values.T if transposed else values) @ DECODE[dtype](x)
    assert_close(DECODE[dtype](out), 0.5 * product - 2.0 * DECODE[dtype](bias), dtype)


def test_a_barrier_in_gemv_t_that_not_all_threads_reach(rng):
    """gemv_t of MLX 0.32.4 has a barrier inside `if (out_col < out_vec_size)`, which is undefined if some threads have
    no column."""
    kernels = library(["gemv.h"], [("gemv", "gemv_t", "float", 1, 2, 8, 4, 4, 4, 0, "false")])
    matrix, x, out = (rng.standard_normal(n).astype(np.float32) for n in ((70, 83), 70, 83))
    zero = np.zeros(1, np.int64)
    buffers = {0: matrix, 1: x, 2: x, 3: out, 4: 70, 5: 83, 6: 83, 7: 1.0, 8: 0.0, 9: 1}
    buffers |= {10: np.ones(1, np.int32), 11: zero, 12: zero, 13: zero, 14: 1}
    with pytest.raises(SimulationError, match="barrier divergence") as error:
        kernels.run("gemv", buffers, (3, 1, 1), (32, 2, 1))
    assert error.value.findings[0].file.endswith("gemv.h")


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 32), (45, 70, 41)])
@pytest.mark.parametrize("transposed", ["nn", "nt", "tn"])
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16_t"])
def test_steel_gemm_fused(rng, dtype, transposed, m, n, k):
    check_steel_gemm(rng, dtype, transposed, m, n, k)


def test_a_read_beyond_c_in_steel_gemm(rng):
    """apply_epilogue_safe of MLX 0.32.4 checks columns but not rows, so it reads past the end of C."""
    with pytest.raises(SimulationError, match="buffer 'C'") as error:
        check_steel_gemm(rng, "float", "nn", 45, 70, 41, options=CHECKED, spare_rows=0)
    assert {finding.kind for finding in error.value.findings} == {"device out of bounds"}
    assert error.value.findings[0].file.endswith("steel/gemm/mma.h")


def check_steel_gemm(rng, dtype, transposed, m, n, k, options=None, spare_rows=64):
    block_m, block_n, block_k, batch = 32, 32, 16, 2
    constants = {10: False, 100: True, 110: True, 200: m % block_m == 0, 201: n % block_n == 0, 202: k % block_k == 0}
    flags = ["true" if t == "t" else "false" for t in transposed]
    kernels = library(
        ["steel/utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"],
        [("gemm", "gemm", dtype, block_m, block_n, block_k, 2, 2, *flags)],
        constants,
        options,
    )
    a = ENCODE[dtype](rng.standard_normal((batch, k, m) if transposed[0] == "t" else (batch, m, k)))
    b = ENCODE[dtype](rng.standard_normal((batch, n, k) if transposed[1] == "t" else (batch, k, n)))
    rows = ENCODE[dtype](rng.standard_normal((batch * m + spare_rows, n)))
    c = rows[: batch * m].reshape(batch, m, n)
    out = np.zeros_like(c)
    tiles_n, tiles_m = -(-n // block_n), -(-m // block_m)
    params = np.zeros(1, GEMM_PARAMS)
    sizes = (m, n, k, a.shape[2], b.shape[2], n, tiles_n, tiles_m)
    params[0] = (*sizes, m * k, n * k, m * n, 0, k // block_k, 1, 0)
    addmm = np.zeros(1, ADDMM_PARAMS)
    addmm[0] = (n, 1, m * n, 0.5, -1.5)
    kernels.run("gemm", {0: a, 1: b, 2: rows, 3: out, 4: params, 5: addmm}, (tiles_n, tiles_m, batch), (32, 2, 2))
    left, right = (DECODE[dtype](x) for x in (a, b))
    left = left.swapaxes(1, 2) if transposed[0] == "t" else left
    right = right.swapaxes(1, 2) if transposed[1] == "t" else right
    assert_close(DECODE[dtype](out), 0.5 * left @ right - 1.5 * DECODE[dtype](c), dtype)
