// A barrier, a SIMD-group reduction, a divergent loop of reductions, a matrix product and a
// transcendental function.
#include <metal_stdlib>
using namespace metal;

kernel void mixed(const device float* in [[buffer(0)]],
                  device float* out [[buffer(1)]],
                  threadgroup float* shared [[threadgroup(0)]],
                  uint group [[threadgroup_position_in_grid]],
                  uint size [[threads_per_threadgroup]],
                  uint t [[thread_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]]) {
  const float x = in[group * size + t];
  shared[t] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float result = shared[size - 1 - t] + simd_sum(x);
  for (uint i = 0; i < lane % 3; ++i) result += simd_sum(0.0f);
  simdgroup_float8x8 ones = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), product;
  simdgroup_multiply(product, ones, simdgroup_float8x8(1.0f));
  out[group * size + t] = result + exp(x) + product.thread_elements()[lane & 1];
}
