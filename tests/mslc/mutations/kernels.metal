// Small kernels for bugs that the library's own kernels leave no room for.
#include <metal_stdlib>
using namespace metal;

// counts[v] = how often v occurs in x. Grid: threadgroups of any size; threadgroup: 64.
kernel void histogram(const device uint* x [[buffer(0)]],
                      device atomic_uint* counts [[buffer(1)]],
                      constant uint& size [[buffer(2)]],
                      uint group [[threadgroup_position_in_grid]],
                      uint groups [[threadgroups_per_grid]],
                      uint lid [[thread_position_in_threadgroup]]) {
  threadgroup atomic_uint local_counts[16];
  if (lid < 16) {
    atomic_store_explicit(&local_counts[lid], 0, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = group * 64 + lid; i < size; i += groups * 64) {
    atomic_fetch_add_explicit(&local_counts[x[i]], 1, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lid < 16) {
    const uint count = atomic_load_explicit(&local_counts[lid], memory_order_relaxed);
    atomic_fetch_add_explicit(&counts[lid], count, memory_order_relaxed);
  }
}

// out [columns, rows] = x [rows, columns] transposed. One 16 x 16 tile a threadgroup of 16 x 16.
kernel void transpose(const device half* x [[buffer(0)]],
                      device half* out [[buffer(1)]],
                      constant uint2& shape [[buffer(2)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint2 lid [[thread_position_in_threadgroup]]) {
  threadgroup half tile[16][17];
  const uint row = group.y * 16 + lid.y;
  const uint column = group.x * 16 + lid.x;
  if (row < shape.x && column < shape.y) {
    tile[lid.y][lid.x] = x[row * shape.y + column];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint out_row = group.x * 16 + lid.y;
  const uint out_column = group.y * 16 + lid.x;
  if (out_row < shape.y && out_column < shape.x) {
    out[out_row * shape.x + out_column] = tile[lid.x][lid.y];
  }
}

// out [8, 8] = a [8, depth] b [depth, 8]. One SIMD group; depth need not be a multiple of 8.
kernel void product(const device float* a [[buffer(0)]],
                    const device float* b [[buffer(1)]],
                    device float* out [[buffer(2)]],
                    constant uint& depth [[buffer(3)]],
                    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float left[64];
  threadgroup float right[64];
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k = 0; k < depth; k += 8) {
    for (uint i = lane; i < 64; i += 32) {
      const uint row = i / 8;
      const uint column = i % 8;
      left[i] = k + column < depth ? a[row * depth + k + column] : 0.0f;
      right[i] = k + row < depth ? b[(k + row) * 8 + column] : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 x, y;
    simdgroup_load(x, left);
    simdgroup_load(y, right);
    simdgroup_multiply_accumulate(sum, x, y, sum);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  simdgroup_store(sum, out);
}
