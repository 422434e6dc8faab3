// The rows of moe_permute: copies the row of each token to the places of its pairs.
//   rows[inverse[t, j]] = x[t]
//
// Kernels: moe_spread_<dtype>.
// Bindings: see params.h.
// Grid: (blocks of packs of 16 bytes, tokens or fewer). Threadgroup: 32 to 256.
// Function constant 0: rows are whole, aligned packs. No other alignment is assumed.
//
//   for each token: load a pack; store it for each pair
#include "metal/common/kernel.h"
#include "metal/moe/rows.h"

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_spread(
    const device T* x [[buffer(0)]],
    const device int* inverse [[buffer(1)]],
    device T* rows [[buffer(2)]],
    constant MoeRowParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  enum { kSize = Pack<T>::kSize };
  const uint column = (group.x * threads.x + thread_in_group.x) * kSize;
  if (column >= params.columns) {
    return;
  }
  const int count = metal::min(int(kSize), int(params.columns - column));
  for (uint token = group.y; token < params.tokens; token += groups.y) {
    const uint batch = batch_of(token, params);
    const long pair = static_cast<long>(token) * params.chosen;
    // Elements are moved as they are, so that NaN keeps its bits.
    const device T* const from = x + static_cast<long>(token) * params.columns + column;
    if (packs_are_aligned) {
      const auto pack = Pack<T>::read(from);
      for (uint j = 0; j < params.chosen; ++j) {
        device T* const to = rows + row_of_pair(inverse, pair + j, batch, params) * params.columns;
        *reinterpret_cast<device typename Pack<T>::Raw*>(to + column) = pack;
      }
    } else {
      for (uint j = 0; j < params.chosen; ++j) {
        device T* const to = rows + row_of_pair(inverse, pair + j, batch, params) * params.columns;
        for (int i = 0; i < count; ++i) {
          to[column + i] = from[i];
        }
      }
    }
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T) MLX_ANVIL_KERNEL("moe_spread_" #dtype, moe_spread<T>)

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)
