// kv_append: writes tokens of k and v [batch, heads, length, columns] into the rows of caches
// [pages, heads, page_size, columns], keys rotated as rope.metal does. The caches are arrays of the
// tokens' dtype, or the codes, scales and biases of an affine quantization.
//
// Kernels: kv_append_<plain|affine>_<dtype>, kv_append_copy.
// Grid: x covers packs of 8 columns of all tokens, y heads of keys and then of values, z batch rows
// and may be smaller than the batch; copy: any x. Threadgroup: 256 x 1 x 1. No alignment beyond the
// dtype's is assumed.
//
// Bindings:
//   plain:  k, v, rows, positions, freqs or turns, k_cache, v_cache, params
//   affine: k, v, rows, positions, freqs or turns, codes, scales and biases of k, then of v, params
//   copy:   from, to, params
// Function constants: 1 and 2 as in rope.metal.
//
//   plain, affine, of 8 columns:
//     row = rows[token]; drop it if the cache lacks it or a later token writes it
//     load, rotate, round to the dtype
//     plain:  store
//     affine: minimum and maximum of the group by shuffles; store 8 codes, `bits` bytes
#include "metal/common/kernel.h"
#include "metal/kv_append/kv_append.h"

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void kv_append_plain(
    const device T* k [[buffer(0)]],
    const device T* v [[buffer(1)]],
    const device long* rows [[buffer(2)]],
    const device long* positions [[buffer(3)]],
    const device ulong* turns [[buffer(4)]],
    device T* k_cache [[buffer(5)]],
    device T* v_cache [[buffer(6)]],
    constant KvAppendParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]]) {
  const AppendOperands<T> operands = {
      k, v, rows, positions, reinterpret_cast<const device float*>(turns), turns};
  const AppendPlace place = append_place(params, group, thread_in_group.x);
  for (long batch = group.z; batch < params.batch; batch += groups.z) {
    const long row = append_row(params, rows, place, batch);
    if (row < 0 || place.count == 0) {
      continue;
    }
    float x[kColumns];
    load_columns(operands, params, place, batch, x);
    device T* const out = (place.is_value ? v_cache : k_cache) +
                          row * (place.is_value ? params.columns[1] : params.columns[0]) +
                          place.first;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      if (i < place.count) {
        out[i] = T(x[i]);
      }
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void kv_append_affine(
    const device T* k [[buffer(0)]],
    const device T* v [[buffer(1)]],
    const device long* rows [[buffer(2)]],
    const device long* positions [[buffer(3)]],
    const device ulong* turns [[buffer(4)]],
    device uchar* k_codes [[buffer(5)]],
    device T* k_scales [[buffer(6)]],
    device T* k_biases [[buffer(7)]],
    device uchar* v_codes [[buffer(8)]],
    device T* v_scales [[buffer(9)]],
    device T* v_biases [[buffer(10)]],
    constant KvAppendParams& params [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]]) {
  const AppendOperands<T> operands = {
      k, v, rows, positions, reinterpret_cast<const device float*>(turns), turns};
  const AppendPlace place = append_place(params, group, thread_in_group.x);
  const int columns = place.is_value ? params.columns[1] : params.columns[0];
  const int bits = place.is_value ? params.bits[1] : params.bits[0];
  for (long batch = group.z; batch < params.batch; batch += groups.z) {
    float x[kColumns], scale, bias;
    load_columns(operands, params, place, batch, x);
    const ulong codes = quantized_columns<T>(x, params.group / kColumns, bits, scale, bias);
    const long row = append_row(params, rows, place, batch);
    if (row < 0 || place.count == 0) {
      continue;
    }
    device uchar* const out =
        (place.is_value ? v_codes : k_codes) + row * (columns / 8 * bits) + place.first / 8 * bits;
    for (int byte = 0; byte < bits; ++byte) {
      out[byte] = uchar(codes >> (8 * byte));
    }
    if (place.first % params.group == 0) {
      const long at = row * (columns / params.group) + place.first / params.group;
      (place.is_value ? v_scales : k_scales)[at] = T(scale);
      (place.is_value ? v_biases : k_biases)[at] = T(bias);
    }
  }
}

template <typename Word>
[[kernel, max_total_threads_per_threadgroup(256)]] void kv_append_copy(
    const device Word* from [[buffer(0)]],
    device Word* to [[buffer(1)]],
    constant KvCopyParams& params [[buffer(2)]],
    uint3 thread_in_grid [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  for (long i = thread_in_grid.x; i < params.bytes / long(sizeof(Word)); i += threads.x) {
    to[i] = from[i];
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T)                                     \
  MLX_ANVIL_KERNEL("kv_append_plain_" #dtype, kv_append_plain<T>) \
  MLX_ANVIL_KERNEL("kv_append_affine_" #dtype, kv_append_affine<T>)

MLX_ANVIL_KERNEL("kv_append_copy", kv_append_copy<ushort>)
INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)
