// Gradients of q and k of a chunk (chunk.h): what their kernels share.
//
// With k and q scaled; S is the state before the chunk, d_S the gradient of that after it; G d_P
// and B are those of chunk_backward_squares.metal:
//   W = d_Y S, Z = d_X S, N = U d_S
//   d_q = gamma W + (G d_P) k
//   d_k = -beta gamma Z + G[63] N + (B + B^T) k + (G d_P)^T q
// `squares` have the last products' left operands (ChunkSquare).
//
// Results: `parts` of each step, in which the gradients of q and k of part_heads value heads are
// added up; `dots`, of each panel and step, are for chunk_backward_gates.metal (ChunkDot). Per
// channel, a part has the W, Z and N of one head, for chunk_backward_decays.metal, and of `dots`
// there is the last, for each channel.
#pragma once

#include "metal/gated_delta/chunk_tiles.h"
#include "metal/gated_delta/decays.h"

METAL_FUNC int chunk_part_vectors() {
  return g_is_per_channel ? 3 : 2;
}
METAL_FUNC long chunk_part_size(constant GatedDeltaParams& params) {
  return long(chunk_part_vectors()) * params.key_dim;
}
// The part of a step of the batch row that begins at `token`.
METAL_FUNC long chunk_part(constant GatedDeltaParams& params, long token, int head) {
  return (token * params.token_parts + head / params.part_heads) * chunk_part_size(params);
}

// Stores the sums of the rows' products over the lanes.
METAL_FUNC void store_dots(thread float (&sums)[2],
                           device float* to,
                           int row,
                           FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float sum = row_sum(sums[i]);
    if (place.column == 0) {
      to[row + 8 * i + place.row] = sum;
    }
  }
}

// Stores 16 rows of a panel of a vector of the parts. `part`: of the chunk's first step.
METAL_FUNC void store_part(const thread RegTile<float, 16, kPanel>& tile,
                           device float* part,
                           constant GatedDeltaParams& params,
                           ChunkPlace chunk,
                           int row,
                           FragmentPlace place) {
  const long stride = params.token_parts * chunk_part_size(params);
  tile.store(part + row * stride, stride, chunk.exists - row, kPanel, place, /*vectors=*/true,
             /*full=*/true);
}

// Stores, for each channel of a panel, the sum of what two threads have: i and i + kPanel.
METAL_FUNC void store_sums_of_halves(float own,
                                     threadgroup float* memory,
                                     uint thread_index,
                                     device float* to) {
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (thread_index >= kPanel) {
    memory[thread_index - kPanel] = own;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (thread_index < kPanel) {
    to[thread_index] = own + memory[thread_index];
  }
}
