// flash_attention, forward for more than eight queries. Formulas and tiling: forward.h.
//
// Kernels: flash_attention_forward_<dtype>_d<head_dim>[_<v_head_dim>]; smaller heads run in the
// next larger one. Bindings: q, k, v, mask, sinks, out, lse, params; an absent one may be any
// buffer. Grid: blocks of queries, query heads, batch. Threadgroup: 128 x 1 x 1. Function constants
// 0 to 5; constant 0 says what is assumed of alignment (scores.h).
#include "metal/flash_attention/forward.h"

template <typename T, int kHeadDim, int kVHeadDim, int kKeys, int kFragmentRows>
[[kernel, max_total_threads_per_threadgroup(kAttentionThreads)]] void flash_attention_forward(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device void* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    device T* out [[buffer(5)]],
    device float* lse [[buffer(6)]],
    constant AttentionParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Forward = AttentionForward<T, kHeadDim, kVHeadDim, kKeys, kFragmentRows>;
  using KTile = typename Forward::KTile;
  using VTile = typename Forward::VTile;
  threadgroup T k_tile[KTile::kSize];
  threadgroup T v_tile[VTile::kSize];

  const int head = group.y, batch = group.z;
  const int kv_head = head / (params.q_heads / params.kv_heads);
  // The last rows of a causal call see the most keys: they start first.
  const int first = (groups.x - 1 - group.x) * Forward::kGroupRows;
  const int row = first + simdgroup * Forward::kRows;
  const int last_of_group = metal::min(first + Forward::kGroupRows, params.q_len) - 1;
  const int last = metal::min(row + Forward::kRows, params.q_len) - 1;
  const DeviceMatrix<T> keys =
      head_rows(k, params.k_strides, batch, kv_head, params.kv_len, params.head_dim);
  const DeviceMatrix<T> values =
      head_rows(v, params.v_strides, batch, kv_head, params.kv_len, params.v_head_dim);
  const MaskView<T> mask_view(mask, params, batch, head);

  Forward forward(params, fragment_place(lane), row);
  forward.start(
      head_rows(q, params.q_strides, batch, head, params.q_len, params.head_dim),
      has_sinks ? sinks[batch * params.sinks_strides[0] + head * params.sinks_strides[1]] : 0.0f);
  const Range visited = keys_of_any(params, first, last_of_group);
  const Range seen = row <= last ? keys_of_any(params, row, last) : Range{0, 0};
  const Range seen_by_all = keys_of_all(params, row, last);
  for (int key = visited.begin / kKeys * kKeys; key < visited.end; key += kKeys) {
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the last tile has been used
    KTile::template stage<kAttentionThreads>(k_tile, keys, key, thread_index, vector_loads);
    VTile::template stage<kAttentionThreads>(v_tile, values, key, thread_index, vector_loads);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (!seen.meets(key, kKeys)) {
      continue;
    }
    forward.multiply_keys(k_tile);
    forward.finish_scores(mask_view, key, !seen_by_all.contains(key, kKeys));
    forward.take_exponentials();
    forward.add_values(v_tile);
  }
  forward.store(out + batch * params.out_strides[0] + head * params.out_strides[1],
                lse + (static_cast<long>(batch) * params.q_heads + head) * params.q_len);
}

// Rows per SIMD group and keys per tile. Sixteen rows halve what every SIMD group reads from
// threadgroup memory; they take head_dim / 2 registers of a thread for the result and half of that
// (float: as many) for q, so heads from 192 up have eight. Both tiles fit the 32 KB of a
// threadgroup.
#define INSTANTIATE(dtype, T, tile, head_dim, v_head_dim, keys, fragment_rows)               \
  template [[host_name("flash_attention_forward_" #dtype "_" #tile)]]                        \
  [[kernel]] decltype(flash_attention_forward<T, head_dim, v_head_dim, keys, fragment_rows>) \
      flash_attention_forward<T, head_dim, v_head_dim, keys, fragment_rows>;

#define INSTANTIATE_16_BIT(dtype, T)               \
  INSTANTIATE(dtype, T, d32, 32, 32, 32, 2)        \
  INSTANTIATE(dtype, T, d64, 64, 64, 32, 2)        \
  INSTANTIATE(dtype, T, d72, 72, 72, 32, 2)        \
  INSTANTIATE(dtype, T, d80, 80, 80, 32, 2)        \
  INSTANTIATE(dtype, T, d96, 96, 96, 32, 2)        \
  INSTANTIATE(dtype, T, d128, 128, 128, 32, 2)     \
  INSTANTIATE(dtype, T, d192_128, 192, 128, 32, 1) \
  INSTANTIATE(dtype, T, d192, 192, 192, 32, 1)     \
  INSTANTIATE(dtype, T, d256, 256, 256, 16, 1)

INSTANTIATE_16_BIT(float16, half)
INSTANTIATE_16_BIT(bfloat16, bfloat)
INSTANTIATE(float32, float, d32, 32, 32, 32, 2)
INSTANTIATE(float32, float, d64, 64, 64, 32, 2)
INSTANTIATE(float32, float, d72, 72, 72, 16, 2)
INSTANTIATE(float32, float, d80, 80, 80, 16, 2)
INSTANTIATE(float32, float, d96, 96, 96, 16, 2)
INSTANTIATE(float32, float, d128, 128, 128, 16, 2)
INSTANTIATE(float32, float, d192_128, 192, 128, 16, 1)
INSTANTIATE(float32, float, d192, 192, 192, 16, 1)
INSTANTIATE(float32, float, d256, 256, 256, 8, 1)

#undef INSTANTIATE
#undef INSTANTIATE_16_BIT
