"""What the norms' Metal kernels ask of memory: every byte once, no bank conflicts, one barrier for each sum of a row.

MLX's wheel does not bring the source of its rms_norm, so the budget is in numbers: a kernel that sums over the SIMD groups
of a threadgroup needs a barrier between writing the shares and reading them, and these have no other.
"""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from metal_profile import profile
from mlx_anvil.mslc.profile import LaunchProfile

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

# metal/norm/params.h
ROWS = np.dtype([("strides", "i8", 4), ("column_stride", "i8"), ("extents", "u4", 4), ("axes", "u4"), ("unused", "u4")])
PARAMS = np.dtype(
    [(name, ROWS) for name in ("x", "residual", "gate", "weight", "bias", "d_y", "d_h")]
    + [(name, "u4") for name in ("rows", "rows_per_group", "parts_per_group", "rows_per_part", "columns")]
    + [("eps", "f4"), ("weight_offset", "f4"), ("unused", "u4")]
)


def dense_params(rows: int, columns: int, rows_per_part: int = 1) -> np.ndarray:
    params = np.zeros(1, PARAMS)
    for name in ("x", "residual", "gate", "weight", "bias", "d_y", "d_h"):
        of_rows = name not in ("weight", "bias")
        params[name]["strides"][0, 0] = columns if of_rows else 0
        params[name]["extents"][0, 0] = rows if of_rows else 1
        params[name]["axes"] = params[name]["column_stride"] = 1
    params["rows"] = params["rows_per_group"] = rows
    params["columns"], params["eps"] = columns, 1e-5
    params["rows_per_part"], params["parts_per_group"] = rows_per_part, -(-rows // rows_per_part)
    return params


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def assert_within_budget(of: LaunchProfile, read: int, written: int, barriers: int, coalescing: float = 1.0) -> None:
    """`read` and `written`: bytes of all rows, beside which a weight is read once for every row."""
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
    with mx.stream(mx.cpu), mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        expected = getattr(mlx_anvil, norm)(*map(mx.array, (x, weight)), residual=mx.array(residual))
        mx.eval(expected)
    (event,) = trace.events
    y, h = np.zeros_like(x), np.zeros_like(x)
    of = profile("norm", event, [x, residual, x, weight, x, y, h, dense_params(rows, columns)])
    assert np.array_equal(y, np.array(expected[0])), "what was profiled did not do the work"
    sums = 2 if norm == "layer_norm" else 1
    assert_within_budget(of, 2 * x.nbytes, 2 * x.nbytes, sums * sums_need_barriers)


@pytest.mark.parametrize(("columns", "sums_need_barriers"), [(256, False), (2048, True)])
def test_backward(columns: int, sums_need_barriers: bool, rng: np.random.Generator):
    """Rows of h and of the cotangents once; the parts of the weight's gradient once for four rows."""
    rows, rows_per_part = 32, 4
    h, d_y, weight = drawn(rng, rows, columns), drawn(rng, rows, columns), drawn(rng, columns)
    with mx.stream(mx.cpu), mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        expected = mx.vjp(mlx_anvil.rms_norm, [mx.array(h), mx.array(weight)], [mx.array(d_y)])[1]
        mx.eval(expected)
    event = next(event for event in trace.events if "backward" in event.kernel)
    d_x, parts = np.zeros_like(h), np.zeros((rows // rows_per_part, columns), np.float32)
    params = dense_params(rows, columns, rows_per_part)
    of = profile("norm", event, [h, h, weight, d_y, h, d_x, d_x, parts, d_x, params])
    assert np.array_equal(d_x, np.array(expected[0])), "what was profiled did not do the work"
    # Eight float32 of a part take a lane two stores, 32 bytes from its neighbour's: each touches twice the lines.
    written = h.nbytes + parts.nbytes
    assert_within_budget(of, 2 * h.nbytes, written, rows_per_part * sums_need_barriers, coalescing=0.9)
