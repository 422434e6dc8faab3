"""The large example of MLX's documentation of custom kernels, grid_sample with its gradient, under mx.grad: atomics,
init_value, shapes, SIMD-group sums over padded channels, several outputs."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_anvil.mslc import metal_kernel

# Bilinear sampling of x [N, H, W, C] at points [N, h, w, 2] in -1 .. 1; outside of the image there are zeros.
CORNERS = """
struct Corner {
  int index;        // of channel 0 in x, -1 outside
  float weight, dx, dy;  // and the weight's derivatives
};
inline Corner corner(float px, float py, int i, int batch, int H, int W, int C) {
  const int left = int(metal::floor(px)), top = int(metal::floor(py));
  const int x = left + (i & 1), y = top + (i >> 1);
  const float fx = px - left, fy = py - top;
  const float wx = (i & 1) ? fx : 1 - fx, wy = (i >> 1) ? fy : 1 - fy;
  const bool inside = x >= 0 && x < W && y >= 0 && y < H;
  return {inside ? ((batch * H + y) * W + x) * C : -1, wx * wy, (i & 1) ? wy : -wy, (i >> 1) ? wx : -wx};
}
"""
POINT = """
  const int H = x_shape[1], W = x_shape[2], C = x_shape[3];
  const int channels = CHANNELS;
  const int point = thread_position_in_grid.x / channels, channel = thread_position_in_grid.x % channels;
  const int batch = point / (points_shape[1] * points_shape[2]);
  const float px = ((points[2 * point] + 1) * W - 1) / 2, py = ((points[2 * point + 1] + 1) * H - 1) / 2;
"""
FORWARD = """
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    const Corner c = corner(px, py, i, batch, H, W, C);
    if (c.index >= 0) sum += c.weight * float(x[c.index + channel]);
  }
  out[point * C + channel] = T(sum);
"""
BACKWARD = """
  float dx = 0, dy = 0;
  if (channel < C) {
    const float d = cotangent[point * C + channel];
    for (int i = 0; i < 4; ++i) {
      const Corner c = corner(px, py, i, batch, H, W, C);
      if (c.index < 0) continue;
      atomic_fetch_add_explicit(&x_grad[c.index + channel], T(c.weight * d), memory_order_relaxed);
      dx += d * c.dx * x[c.index + channel];
      dy += d * c.dy * x[c.index + channel];
    }
  }
  dx = simd_sum(dx) * W / 2;
  dy = simd_sum(dy) * H / 2;
  if (thread_index_in_simdgroup == 0) {
    atomic_fetch_add_explicit(&points_grad[2 * point], dx, memory_order_relaxed);
    atomic_fetch_add_explicit(&points_grad[2 * point + 1], dy, memory_order_relaxed);
  }
"""


def grid_sample_reference(x, points):
    n, height, width, _ = x.shape
    px = ((points[..., 0] + 1) * width - 1) / 2
    py = ((points[..., 1] + 1) * height - 1) / 2
    left, top = mx.stop_gradient(mx.floor(px)), mx.stop_gradient(mx.floor(py))
    total = 0
    for i in range(4):
        column, row = left + i % 2, top + i // 2
        weight = (1 - mx.abs(px - column)) * (1 - mx.abs(py - row))
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        column = mx.clip(column, 0, width - 1).astype(mx.int32)
        row = mx.clip(row, 0, height - 1).astype(mx.int32)
        total = total + x[mx.arange(n)[:, None, None], row, column] * (weight * inside)[..., None]
    return total


def grid_sample_kernels(**options):
    forward = metal_kernel(
        "grid_sample", ["x", "points"], ["out"], POINT + FORWARD, header=CORNERS, simulate=True, **options
    )
    backward = metal_kernel(
        "grid_sample_grad",
        ["x", "points", "cotangent"],
        ["x_grad", "points_grad"],
        POINT + BACKWARD,
        header=CORNERS,
        atomic_outputs=True,
        simulate=True,
        **options,
    )

    @mx.custom_function
    def grid_sample(x, points):
        shape = (*points.shape[:3], x.shape[3])
        return forward(
            inputs=[x, points],
            template=[("T", x.dtype), ("CHANNELS", x.shape[3])],
            output_shapes=[shape],
            output_dtypes=[x.dtype],
            grid=(np.prod(shape), 1, 1),
            threadgroup=(256, 1, 1),
        )[0]

    @grid_sample.vjp
    def vjp(primals, cotangent, _):
        x, points = primals
        padded = (x.shape[3] + 31) // 32 * 32  # so that a SIMD-group sum never spans two points
        return backward(
            inputs=[x, points, cotangent],
            template=[("T", x.dtype), ("CHANNELS", padded)],
            output_shapes=[x.shape, points.shape],
            output_dtypes=[x.dtype, x.dtype],
            grid=(points.size // 2 * padded, 1, 1),
            threadgroup=(256, 1, 1),
            init_value=0,
        )

    return grid_sample


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("channels", [3, 40])
def test_grid_sample_and_its_gradient(rng, channels, checked):
    x = mx.array(rng.standard_normal((2, 5, 6, channels)).astype(np.float32))
    points = mx.array(rng.uniform(-1.3, 1.3, (2, 3, 4, 2)).astype(np.float32))
    grid_sample = grid_sample_kernels(checked=checked)
    out, expected = grid_sample(x, points), grid_sample_reference(x, points)
    assert mx.abs(out - expected).max().item() < 1e-5

    weights = mx.array(rng.standard_normal(expected.shape).astype(np.float32))
    gradients = mx.grad(lambda *a: (grid_sample(*a) * weights).sum(), argnums=(0, 1))(x, points)
    expected_gradients = mx.grad(lambda *a: (grid_sample_reference(*a) * weights).sum(), argnums=(0, 1))(x, points)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert mx.abs(wanted).max().item() > 0.1
        assert mx.abs(gradient - wanted).max().item() < 1e-4


def test_grid_sample_half(rng):
    x = mx.array(rng.standard_normal((1, 4, 4, 8)).astype(np.float16))
    points = mx.array(rng.uniform(-1, 1, (1, 5, 5, 2)).astype(np.float32))
    out = grid_sample_kernels()(x, points)
    assert out.dtype == mx.float16
    assert mx.abs(out - grid_sample_reference(x.astype(mx.float32), points)).max().item() < 2e-3
