// Decays between the steps of a chunk, and squares of steps in threadgroup memory.
#pragma once

#include "metal/gated_delta/channels.h"

enum { kDecayStride = TileRow<float, kChunk>::kStride };

// Stores G: in row i and column j the product of g from j + 1 to i, zeros above the diagonal. A
// thread has a column. All threads call it.
METAL_FUNC void store_decays(threadgroup float* matrix,
                             const threadgroup float* gate_row,
                             uint thread_index) {
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int column = int(thread_index);
  if (column < kChunk) {
    float decay = 1.0f;
    for (int first = 0; first < kChunk; first += 4) {
      const float4 four = *reinterpret_cast<const threadgroup float4*>(gate_row + first);
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int i = first + e;
        decay = i > column ? decay * four[e] : 1.0f;
        matrix[i * kDecayStride + column] = i < column ? 0.0f : decay;
      }
    }
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

template <int kStride = kDecayStride, int kRows, int kColumns>
METAL_FUNC void store_square(threadgroup float* to,
                             const thread RegTile<float, kRows, kColumns>& tile,
                             FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kRows / 8 * (kColumns / 8); ++f) {
    const int i = f / (kColumns / 8), n = f % (kColumns / 8);
    store_fragment(to + (8 * i + place.row) * kStride + 8 * n + place.column, tile.fragments[i][n]);
  }
}

// sums[i] += the lane's share of the dot product of rows i.
METAL_FUNC void add_row_products(const thread RegTile<float, 16, kPanel>& a,
                                 const thread RegTile<float, 16, kPanel>& b,
                                 thread float (&sums)[2]) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 2; ++i) {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kPanel / 8; ++n) {
      sums[i] += metal::dot(float2(elements_of(a.fragments[i][n])),
                            float2(elements_of(b.fragments[i][n])));
    }
  }
}

// What the gradients of a chunk's steps need of each of them.
struct alignas(16) ChunkSteps {
  float gate[kChunk], rate[kChunk];              // g, beta
  float decay[kChunk], decay_after[kChunk];      // gamma, and to the chunk's end
  float minus_into[kChunk];                      // -beta gamma
  float key_scale[kChunk], query_scale[kChunk];  // of k and q
};

METAL_FUNC void load_steps(threadgroup ChunkSteps& to,
                           constant GatedDeltaParams& params,
                           const device float* rows,
                           ChunkPlace chunk,
                           uint thread_index) {
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (thread_index < kChunk) {
    const device float* const own = rows + chunk.index * chunk_facts(params) + thread_index;
    to.gate[thread_index] = own[kGate * kChunk];
    to.rate[thread_index] = own[kRate * kChunk];
    to.decay[thread_index] = own[kDecayBefore * kChunk];
    to.decay_after[thread_index] = own[kDecayAfter * kChunk];
    to.minus_into[thread_index] = -own[kRate * kChunk] * own[kDecayBefore * kChunk];
    to.key_scale[thread_index] = own[kKeyScale * kChunk];
    to.query_scale[thread_index] = own[kQueryScale * kChunk];
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// The part of d_g of a step that comes from decays from the beginning of the chunk, or to its end.
METAL_FUNC float d_gate_of_ends(const threadgroup ChunkSteps& facts,
                                const threadgroup float* decays,
                                const threadgroup float* d_begin,
                                const threadgroup float* d_end,
                                const threadgroup float* d_through,
                                int step) {
  float from_before = 0.0f, from_begin = 0.0f, through = 0.0f;
  for (int j = 0; j < step; ++j) {
    from_before += decays[(step - 1) * kDecayStride + j] * d_end[j];
  }
  for (int m = step; m < kChunk; ++m) {
    from_begin += decays[m * kDecayStride + step] * d_begin[m];
  }
  for (int i = 0; i < kChunk; ++i) {
    through += d_through[i];
  }
  const float to_end = facts.decay_after[step];
  const float before = step > 0 ? facts.decay[step - 1] : 1.0f;
  return to_end * from_before + before * (from_begin + to_end * through);
}
