// gated_delta and ssd_scan by chunks: y and the states, one chunk after another (chunk.h). The
// kernel of chunk_forward.metal and chunk_forward_group.metal.
//
// Grid: x covers blocks of 64 rows of the state, y value heads, z batch rows and may be smaller
// than the batch. Threadgroup: 128 x 1 x 1; a SIMD group has 16 rows, and reads tiles with others.
// Threadgroup memory 0: the numbers of a chunk's steps and a tile of float32; with pairs, all tiles
// of a chunk or two, and twice those numbers (chunk_walk_ahead.h).
//
// Bindings: q, k, v, state, lengths, inverse, weights, rows, y, state_out, states, changes, params.
// Per channel, q and k are `decayed` of chunk_prepare_channels.metal.
// Function constants: 2, 3, 10, 11 as in state.h; 9: only keeps, for the backward, the state before
// each chunk, in `states`, and U, in `changes`, with value_columns() rows and columns; 13, 14:
// vectors of 16 bytes (chunk.h).
//
// Everything is transposed, so that rows of the state are rows of the left operands:
//   for each chunk from first_chunk to end_chunk:
//     X = beta (V^T - gamma S K^T), U = X ((I + A)^-1)^T
//     Y = gamma S Q^T + U P^T; store Y^T
//     S = gamma[63] S + (G[63] U) K
// Per channel the decays are in Q and K.
#pragma once

#include "metal/gated_delta/chunk_walk_ahead.h"

template <typename T, bool kPairs, bool kPerChannel, bool kGroups, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_forward(
    const device typename ChunkSource<T, kPairs, kPerChannel, kKeyDim>::Key* q [[buffer(0)]],
    const device typename ChunkSource<T, kPairs, kPerChannel, kKeyDim>::Key* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device float* state [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* inverse [[buffer(5)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* weights [[buffer(6)]],
    const device float* rows [[buffer(7)]],
    device T* y [[buffer(8)]],
    device float* state_out [[buffer(9)]],
    device typename ChunkNumbers<T, kPairs>::Weight* states [[buffer(10)]],
    device typename ChunkNumbers<T, kPairs>::Weight* changes [[buffer(11)]],
    constant GatedDeltaParams& params [[buffer(12)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kPanels = kKeyDim / kPanel, kPlanes = ChunkNumbers<T, kPairs>::kPlanes };
  const FragmentPlace place = fragment_place(lane);
  const int head = int(group.y), first_row = int(group.x) * kChunkValues;
  const int own = 16 * int(simdgroup), row = first_row + own;
  const int own_rows = metal::clamp(params.value_dim - row, 0, 16);
  const long y_stride = long(params.value_heads) * params.value_dim;
  ChunkWalk<T, kPairs, kPerChannel, kGroups, /*kBackward=*/false, kKeyDim> walk;
  walk.memory = reinterpret_cast<threadgroup float*>(memory);
  walk.thread_index = thread_index;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const int steps = steps_of(params, lengths, batch);
    const int chunks = metal::min(chunks_of(steps), params.end_chunk);
    walk.source = ChunkSource<T, kPairs, kPerChannel, kKeyDim>{
        {kPerChannel ? q : q + at.q, params.q_strides[1], 1, steps, kKeyDim},
        {kPerChannel ? k : k + at.k, params.k_strides[1], 1, steps, kKeyDim},
        {v + at.v + first_row, params.v_strides[1], 1, steps, params.value_dim - first_row},
        inverse,
        weights,
        rows};
    RegTile<float, 16, kPanel> s[kPanels];
    load_state(s, state + (at.state + row) * kKeyDim, has_state ? own_rows : 0, place);
    const int first_chunk = params.first_chunk;
    walk.start(chunk_place(params, steps, batch, head, first_chunk), first_chunk < chunks,
               !keeps_states);
    for (int c = first_chunk; c < params.end_chunk; ++c) {
      const ChunkPlace chunk = chunk_place(params, steps, batch, head, c);
      const long token = long(batch) * params.length + chunk.first;
      device T* const to = y + (token * params.value_heads + head) * params.value_dim + row;
      RegTile<float, 16, kChunk> u, x;
      x.zero();
      if (chunk.is_padding()) {
        if (!keeps_states) {
          store_transposed_rows(x, to, y_stride, chunk.exists, own_rows, place, values_are_vectors);
        }
        continue;
      }
      if (keeps_states) {
        store_state(s, states + (chunk.index * value_columns(params) + row) * kKeyDim, 16, place);
      }
      walk.begin(chunk, chunk_place(params, steps, batch, head, c + 1), c + 1 < chunks);
      if (corrects) {
        MLX_ANVIL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          add_keys<kKeysFrom, true, false>(walk, x, s[panel], panel, place);
        }
        finish_products<kGroups>(x);
        scale_columns(x, walk.facts(kDecayBefore), walk.facts(kKeyScale), place);
        x.negate();
      }
      walk.template arrive<1>();
      read_tile_transposed(u, walk.values(), own, place);
      x.add(u);
      scale_columns(x, walk.facts(kRate), place);
      if (corrects) {
        u.zero();
        add_product<kPairs, true, false>(u, x, walk.inverse(0), place);
        if (kPlanes == 2) {
          add_product<kPairs, true, true>(u, x, walk.inverse(1), place);
        }
        finish_products<kGroups>(u);
      } else {
        u = x;
      }
      walk.template arrive<2>();
      if (keeps_states) {
        const long columns = value_columns(params);
        store_transposed_rows(u, changes + chunk.index * kChunk * columns + row, columns, kChunk,
                              16, place, /*vectors=*/true);
      } else {
        x.zero();
        MLX_ANVIL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          add_keys<kQueriesFrom, true, true>(walk, x, s[panel], panel, place);
        }
        finish_products<kGroups>(x);
        scale_columns(x, walk.facts(kDecayBefore), walk.facts(kQueryScale), place);
        add_product<kPairs, true, true>(x, u, walk.weights(), place);
        finish_products<kGroups>(x);
        if (has_skip) {
          RegTile<float, 16, kChunk> skipped;
          read_tile_transposed(skipped, walk.values(), own, place);
          scale_columns(skipped, walk.facts(kSkip), place);
          x.add(skipped);
        }
      }
      scale_columns(u, walk.facts(kDecayAfter), walk.facts(kKeyScale), place);
      walk.template arrive<3>();
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        decay_state<kPerChannel>(walk, s[panel], panel, place);
        add_keys<kKeysTo, false, false>(walk, s[panel], u, panel, place);
      }
      if (!keeps_states) {
        clear_columns_from(x, chunk.steps, place);
        store_transposed_rows(x, to, y_stride, chunk.exists, own_rows, place, values_are_vectors);
      }
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        finish_products<kGroups>(s[panel]);
      }
    }
    if (!keeps_states) {
      store_state(s, state_out + (at.state + row) * kKeyDim, own_rows, place);
    }
  }
}
