"""Memory accesses of the norms' Metal kernels: every byte once, no bank conflicts, one barrier for each sum of a row.
MLX's wheel has no source of its rms_norm to compare with, so the budget is absolute: a kernel that sums over the SIMD
groups of a threadgroup needs a barrier between writing and reading the partial sums, and these kernels have no
other."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.mslc.profile import LaunchProfile

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def assert_within_budget(of: LaunchProfile, read: int, written: int, barriers: int, coalescing: float = 1.0) -> None:
    """`read` and `written` are the bytes of all rows. The weight is read once more per row."""
    m = of.metrics()
    weight = sum(site.bytes for site in of.sites if site.buffer == "weight")
    assert m["device_bytes_read"] - weight == read
    assert m["device_bytes_written"] == m["device_bytes_written_unique"] == written
    assert m["coalescing"] >= coalescing
    assert m["bank_conflicts"] == 0
    assert of.barriers == barriers * of.threadgroups


@pytest.mark.parametrize(("columns", "sums_need_barriers"), [(256, False), (2048, True), (8192, True)])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_forward(norm: str, columns: int, sums_need_barriers: bool, rng: np.random.Generator):
    rows = 8
    x, residual, weight = drawn(rng, rows, columns), drawn(rng, rows, columns), drawn(rng, columns)
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(getattr(mlx_anvil, norm)(*map(mx.array, (x, weight)), residual=mx.array(residual)))
    (of,) = profiles
    sums = 2 if norm == "layer_norm" else 1
    assert_within_budget(of, 2 * x.nbytes, 2 * x.nbytes, sums * sums_need_barriers)


@pytest.mark.parametrize(("columns", "sums_need_barriers"), [(256, False), (2048, True)])
def test_backward(columns: int, sums_need_barriers: bool, rng: np.random.Generator):
    """Rows of h and of the cotangents are read once; the parts of the weight's gradient are written once for four
    rows."""
    rows, rows_per_part = 32, 4
    h, d_y, weight = drawn(rng, rows, columns), drawn(rng, rows, columns), drawn(rng, columns)
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(mx.vjp(mlx_anvil.rms_norm, [mx.array(h), mx.array(weight)], [mx.array(d_y)])[1])
    of = next(profile for profile in profiles if "backward" in profile.kernel)
    # Eight float32 of a part take a lane two stores, 32 bytes from its neighbour's: each touches twice the lines.
    parts = rows // rows_per_part * columns * np.dtype(np.float32).itemsize
    written = h.nbytes + parts
    assert_within_budget(of, 2 * h.nbytes, written, rows_per_part * sums_need_barriers, coalescing=0.9)
