// gated_delta and ssd_scan by chunks: gradients of the state and of v, from the last chunk to the
// first (chunk.h). The kernel of chunk_backward.metal and chunk_backward_group.metal.
//
// Grid, threadgroup and its memory: as for chunk_forward.h.
//
// Bindings: q, k, d_y, d_state_out, lengths, inverse, weights, rows, d_states, d_changes, d_v,
//           d_state, params. Per channel, q and k are `decayed` of chunk_prepare_channels.metal.
// Function constants: 2: the gradient of the first state is wanted; 3, 10, 11 as in state.h;
// 13, 14: vectors of 16 bytes (chunk.h).
//
// All transposed, as in chunk_forward.h. d_S is stored, in `d_states`, before each chunk takes
// it, and d_X, in `d_changes`: with value_columns() rows and columns.
//   for each chunk from the last:
//     d_U = d_Y P + G[63] d_S K^T; d_X = d_U (I + A)^-1; d_V = beta d_X + skip d_Y
//     d_S = gamma[63] d_S + (gamma d_Y) Q - (beta gamma d_X) K
// Per channel the decays are in Q and K.
#pragma once

#include "metal/gated_delta/chunk_walk_ahead.h"

template <typename T, bool kPairs, bool kPerChannel, bool kGroups, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_backward(
    const device typename ChunkSource<T, kPairs, kPerChannel, kKeyDim>::Key* q [[buffer(0)]],
    const device typename ChunkSource<T, kPairs, kPerChannel, kKeyDim>::Key* k [[buffer(1)]],
    const device T* d_y [[buffer(2)]],
    const device float* d_state_out [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* inverse [[buffer(5)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* weights [[buffer(6)]],
    const device float* rows [[buffer(7)]],
    device typename ChunkNumbers<T, kPairs>::Weight* d_states [[buffer(8)]],
    device typename ChunkNumbers<T, kPairs>::Weight* d_changes [[buffer(9)]],
    device T* d_v [[buffer(10)]],
    device float* d_state [[buffer(11)]],
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
  const long columns = value_columns(params);
  const long v_stride = long(params.value_heads) * params.value_dim;
  ChunkWalk<T, kPairs, kPerChannel, kGroups, /*kBackward=*/true, kKeyDim> walk;
  walk.memory = reinterpret_cast<threadgroup float*>(memory);
  walk.thread_index = thread_index;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const int steps = steps_of(params, lengths, batch), chunks = chunks_of(steps);
    const Rows<T> d_rows = rows_of_d_y(params, d_y, batch, head);
    walk.source = ChunkSource<T, kPairs, kPerChannel, kKeyDim>{
        {kPerChannel ? q : q + at.q, params.q_strides[1], 1, steps, kKeyDim},
        {kPerChannel ? k : k + at.k, params.k_strides[1], 1, steps, kKeyDim},
        {d_rows.data + first_row, d_rows.row_stride, 1, steps, params.value_dim - first_row},
        inverse,
        weights,
        rows};
    RegTile<float, 16, kPanel> d_s[kPanels];
    load_state(d_s, d_state_out + (at.state + row) * kKeyDim, own_rows, place);
    walk.start(chunk_place(params, steps, batch, head, chunks - 1), chunks > 0, true);
    for (int c = chunks_of(params.length) - 1; c >= 0; --c) {
      const ChunkPlace chunk = chunk_place(params, steps, batch, head, c);
      const long token = long(batch) * params.length + chunk.first;
      device T* const to = d_v + (token * params.value_heads + head) * params.value_dim + row;
      RegTile<float, 16, kChunk> d_x, d_u;
      RegTile<T, 16, kChunk> d_out;  // of half the registers
      d_x.zero();
      if (chunk.is_padding()) {
        store_transposed_rows(d_x, to, v_stride, chunk.exists, own_rows, place, values_are_vectors);
        continue;
      }
      store_state(d_s, d_states + (chunk.index * columns + row) * kKeyDim, 16, place);
      walk.begin(chunk, chunk_place(params, steps, batch, head, c - 1), c > 0);
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        add_keys<kKeysTo, true, true>(walk, d_x, d_s[panel], panel, place);
      }
      if (kPerChannel) {
        finish_products<kGroups>(d_x);  // these tiles make room
      }
      walk.template arrive<1>();
      read_tile_transposed(d_out, walk.values(), own, place);
      d_u.zero();
      add_product<kPairs, false, true>(d_u, d_out.template to<float>(), walk.weights(), place);
      finish_products<kGroups>(d_x);
      scale_columns(d_x, walk.facts(kDecayAfter), walk.facts(kKeyScale), place);
      finish_products<kGroups>(d_u);
      d_u.add(d_x);
      if (corrects) {
        d_x.zero();
        add_product<kPairs, false, true>(d_x, d_u, walk.inverse(0), place);
        if (kPlanes == 2) {
          add_product<kPairs, false, true>(d_x, d_u, walk.inverse(1), place);
        }
        finish_products<kGroups>(d_x);
      } else {
        d_x = d_u;
      }
      store_transposed_rows(d_x, d_changes + chunk.index * kChunk * columns + row, columns, kChunk,
                            16, place, /*vectors=*/true);
      scale_columns(d_x, walk.facts(kRate), place);
      d_u = d_x;
      if (has_skip) {
        RegTile<float, 16, kChunk> skipped = d_out.template to<float>();
        scale_columns(skipped, walk.facts(kSkip), place);
        d_u.add(skipped);
      }
      clear_columns_from(d_u, chunk.steps, place);
      store_transposed_rows(d_u, to, v_stride, chunk.exists, own_rows, place, values_are_vectors);

      d_u = d_out.template to<float>();
      scale_columns(d_u, walk.facts(kDecayBefore), walk.facts(kQueryScale), place);
      scale_columns(d_x, walk.facts(kDecayBefore), walk.facts(kKeyScale), place);
      d_x.negate();
      walk.template arrive<2>();
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        decay_state<kPerChannel>(walk, d_s[panel], panel, place);
        add_keys<kQueriesFrom, false, true>(walk, d_s[panel], d_u, panel, place);
      }
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels && kPerChannel; ++panel) {
        finish_products<kGroups>(d_s[panel]);  // likewise
      }
      walk.template arrive<3>();
      if (corrects) {
        MLX_ANVIL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          add_keys<kKeysFrom, false, true>(walk, d_s[panel], d_x, panel, place);
        }
      }
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        finish_products<kGroups>(d_s[panel]);
      }
    }
    if (has_state) {
      store_state(d_s, d_state + (at.state + row) * kKeyDim, own_rows, place);
    }
  }
}
