// gated_delta and ssd_scan by chunks: gradients of 64 columns of q and k, for the value heads that
// share a part (chunk_keys.h), with products of four SIMD groups (metal/common/group_product.h).
//
// Kernels: gated_delta_chunk_backward_keys_group_bfloat16_d<key dim>.
// Grid: x covers the panels of 64 columns of each chunk, y runs of part_heads value heads, z batch
// rows and may be smaller than the batch. Threadgroup: 128 x 1 x 1; a SIMD group has 16 steps.
// Threadgroup memory 0: the tiles of two stages, and of q and k.
//
// Bindings and function constants: as for chunk_backward_keys.metal; rows are vectors.
//
// A head has a stage for each panel of 64 columns of v, and one for the pairs of steps (there is
// none per channel):
//   for each stage: wait for its tiles; start the copies of the stage after the next one
//     panel:  W += d_Y S, Z += d_X S, N += U d_S
//     pairs:  d_q += gamma W + (G d_P) k
//             d_k += -beta gamma Z + G[63] N + (B + B^T) k + (G d_P)^T q
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_keys.h"

template <typename T, int kKeyDim>
struct KeyStages {
  using Tile = SwizzledTile<T, kChunk, kPanel>;
  using Left = SwizzledRows<T, kChunk, kPanel>;
  using Right = SwizzledOperand<T, kChunk, kPanel>;
  enum { kSquare = kChunk * kChunk };

  const device T *d_y, *states, *changes, *d_states, *d_changes, *squares;
  threadgroup T* memory;
  ChunkPlace chunk;  // of the first head
  long columns;      // of changes
  int column;        // of q and k
  int panels;        // of values
  int heads;
  FragmentPlace place;
  uint thread_index, simdgroup;

  METAL_FUNC int per_head() const thread { return panels + (g_is_per_channel ? 0 : 1); }
  METAL_FUNC threadgroup T* tile(int stage, int i) const thread {
    return memory + (stage % 2 * kStageTiles + i) * Tile::kSize;
  }
  METAL_FUNC threadgroup T* of_keys(int i) const thread {
    return memory + (2 * kStageTiles + i) * Tile::kSize;
  }
  METAL_FUNC Left left(const threadgroup T* data) const thread {
    return {data, 0, int(simdgroup), place};
  }
  METAL_FUNC Right right(const threadgroup T* data) const thread { return {data, place}; }

  METAL_FUNC void copy(threadgroup T* to, Rows<T> from) const thread {
    Tile::template start_copies<kChunkThreads>(to, from, thread_index);
  }
  METAL_FUNC void copy_square(int stage,
                              int tile_of_stage,
                              ChunkSquare square,
                              long index) const thread {
    copy(tile(stage, tile_of_stage),
         {squares + (index * kChunkSquares + square) * kSquare, kChunk, 1, kChunk, kChunk});
  }

  // Starts the copies of a stage, if there is one. `all_d_y`: rows of the first head's gradient of
  // y, `head_stride` from those of the next.
  METAL_FUNC void start(int stage, Rows<T> all_d_y, long head_stride, int chunks) const thread {
    const int head = stage / per_head(), i = stage % per_head();
    if (head < heads) {
      const long index = chunk.index + long(head) * chunks;
      if (i < panels) {
        all_d_y.data += head * head_stride;
        const long steps = index * kChunk * columns + i * kPanel;
        const long rows = (index * columns + i * kPanel) * kKeyDim + column;
        copy(tile(stage, kOfDY), chunk_rows(all_d_y, chunk, i));
        copy(tile(stage, kOfS), {states + rows, kKeyDim, 1, kPanel, kPanel});
        if (corrects) {
          copy(tile(stage, kOfDX), {d_changes + steps, columns, 1, kChunk, kPanel});
        }
        copy(tile(stage, kOfU), {changes + steps, columns, 1, kChunk, kPanel});
        copy(tile(stage, kOfDS), {d_states + rows, kKeyDim, 1, kPanel, kPanel});
      } else {
        copy_square(stage, 0, kQueriesByKeys, index);
        if (corrects) {
          copy_square(stage, 1, kKeysByKeys, index);
        }
        copy_square(stage, 2, kKeysByQueries, index);
      }
    }
    end_copies();
  }
};

// The thread's share of the sum over a tile's S d_S.
template <typename T>
METAL_FUNC float dot_of_tiles(const threadgroup T* a, const threadgroup T* b, uint thread_index) {
  using Vector4 = metal::vec<T, 4>;
  float sum = 0.0f;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kPanel * kPanel / (4 * kChunkThreads); ++i) {
    const int at = 4 * (int(thread_index) + i * kChunkThreads);
    sum += metal::dot(floats_of<T>(*reinterpret_cast<const threadgroup Vector4*>(a + at)),
                      floats_of<T>(*reinterpret_cast<const threadgroup Vector4*>(b + at)));
  }
  return sum;
}

// The thread's share of that over the rows of a channel. Two threads share a channel.
template <typename T>
METAL_FUNC float dot_of_columns(const threadgroup T* a, const threadgroup T* b, uint thread_index) {
  using Tile = SwizzledTile<T, kChunk, kPanel>;
  const int channel = int(thread_index) % kPanel, first = int(thread_index) / kPanel;
  float sum = 0.0f;
  MLX_ANVIL_UNROLL
  for (int row = 0; row < kPanel; row += 2) {
    const int at = Tile::unit_at(row + first, channel / 8 * 8) + channel % 8;
    sum += float(a[at]) * float(b[at]);
  }
  return sum;
}

// to += the rows of `from`, times their factors.
METAL_FUNC void add_scaled_rows(thread RegTile<float, 16, kPanel>& to,
                                const thread RegTile<float, 16, kPanel>& from,
                                const thread float (&factors)[2]) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 2 * kPanel / 8; ++f) {
    const int i = f / (kPanel / 8), n = f % (kPanel / 8);
    to.fragments[i][n] = fragment_of<float>(elements_of(to.fragments[i][n]) +
                                            elements_of(from.fragments[i][n]) * factors[i]);
  }
}

template <typename T, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void
gated_delta_chunk_backward_keys_group(const device T* q [[buffer(0)]],
                                      const device T* k [[buffer(1)]],
                                      const device T* d_y [[buffer(2)]],
                                      const device int* lengths [[buffer(3)]],
                                      const device float* rows [[buffer(4)]],
                                      const device T* states [[buffer(5)]],
                                      const device T* changes [[buffer(6)]],
                                      const device T* d_states [[buffer(7)]],
                                      const device T* d_changes [[buffer(8)]],
                                      const device T* squares [[buffer(9)]],
                                      device float* parts [[buffer(10)]],
                                      device float* dots [[buffer(11)]],
                                      constant GatedDeltaParams& params [[buffer(12)]],
                                      threadgroup uint4* memory [[threadgroup(0)]],
                                      uint3 group [[threadgroup_position_in_grid]],
                                      uint3 groups [[threadgroups_per_grid]],
                                      uint thread_index [[thread_index_in_threadgroup]],
                                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                                      uint lane [[thread_index_in_simdgroup]]) {
  using Stages = KeyStages<T, kKeyDim>;
  using Square = RegTile<float, 16, kPanel>;
  enum { kPanels = kKeyDim / kPanel };
  const FragmentPlace place = fragment_place(lane);
  const int first_head = int(group.y) * params.part_heads, own = 16 * int(simdgroup);
  const int panel = int(group.x) % kPanels, column = panel * kPanel;
  const long columns = value_columns(params);
  const int chunks = chunks_of(params.length);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, first_head);
    const ChunkPlace chunk = chunk_place(params, steps_of(params, lengths, batch), batch,
                                         first_head, int(group.x) / kPanels);
    const long token = long(batch) * params.length + chunk.first;
    device float* const part = parts + chunk_part(params, token, first_head) + column;
    Square d_query, d_key, w, z, n;
    d_query.zero();
    d_key.zero();
    if (chunk.is_padding()) {
      for (int i = 0; i < chunk_part_vectors(); ++i) {
        store_part(d_query, part + i * kKeyDim, params, chunk, own, place);
      }
      continue;
    }
    const Stages stages = {d_y,
                           states,
                           changes,
                           d_states,
                           d_changes,
                           squares,
                           reinterpret_cast<threadgroup T*>(memory),
                           chunk,
                           columns,
                           column,
                           int(columns) / kPanel,
                           params.part_heads,
                           place,
                           thread_index,
                           simdgroup};
    const Rows<T> d_rows = rows_of_d_y(params, d_y, batch, first_head);
    const long d_y_stride = params.d_y_strides[2];
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the batch row before
    if (!g_is_per_channel) {
      stages.copy(stages.of_keys(0),
                  chunk_rows<T>({q + at.q, params.q_strides[1], 1, 0, kKeyDim}, chunk, panel));
      stages.copy(stages.of_keys(1),
                  chunk_rows<T>({k + at.k, params.k_strides[1], 1, 0, kKeyDim}, chunk, panel));
    }
    stages.start(0, d_rows, d_y_stride, chunks);
    stages.start(1, d_rows, d_y_stride, chunks);
    int stage = 0;
    MLX_ANVIL_NO_UNROLL
    for (int head = 0; head < params.part_heads; ++head) {
      const long index = chunk.index + long(head) * chunks;
      device float* const dots_to = dots + (index * kPanels + panel) * kChunkDots * kChunk;
      w.zero();
      z.zero();
      n.zero();
      float through = 0.0f;
      MLX_ANVIL_NO_UNROLL
      for (int i = 0; i < stages.panels; ++i) {
        wait_for_tiles<1>();
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        const threadgroup T* const s = stages.tile(stage, kOfS);
        const threadgroup T* const d_s = stages.tile(stage, kOfDS);
        start_product(w, stages.left(stages.tile(stage, kOfDY)), stages.right(s), true);
        if (corrects) {
          start_product(z, stages.left(stages.tile(stage, kOfDX)), stages.right(s), true);
        }
        start_product(n, stages.left(stages.tile(stage, kOfU)), stages.right(d_s), true);
        through += g_is_per_channel ? dot_of_columns(s, d_s, thread_index)
                                    : dot_of_tiles(s, d_s, thread_index);
        wait_for_products<0>(w);
        wait_for_products<0>(z);
        wait_for_products<0>(n);
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        stages.start(stage + 2, d_rows, d_y_stride, chunks);
        ++stage;
      }
      if (g_is_per_channel) {
        clear_rows_from(w, chunk.steps - own, place);
        clear_rows_from(z, chunk.steps - own, place);
        clear_rows_from(n, chunk.steps - own, place);
        store_part(w, part, params, chunk, own, place);
        store_part(z, part + kKeyDim, params, chunk, own, place);
        store_part(n, part + 2 * kKeyDim, params, chunk, own, place);
        store_sums_of_halves(through, reinterpret_cast<threadgroup float*>(stages.of_keys(0)),
                             thread_index, dots_to + kThroughDot * kChunk);
        continue;
      }
      const device float* const facts = rows + index * kChunkRows * kChunk + own + place.row;
      float decay[2], after[2], into[2];
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 2; ++i) {
        decay[i] = facts[kDecayBefore * kChunk + 8 * i];
        after[i] = facts[kDecayAfter * kChunk + 8 * i];
        into[i] = -facts[kRate * kChunk + 8 * i] * decay[i];
      }
      wait_for_tiles<1>();
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      add_scaled_rows(d_query, w, decay);
      add_scaled_rows(d_key, n, after);
      if (corrects) {
        add_scaled_rows(d_key, z, into);
      }
      const threadgroup T *queries = stages.of_keys(0), *keys = stages.of_keys(1);
      start_product(d_query, stages.left(stages.tile(stage, 0)), stages.right(keys), true);
      if (corrects) {
        start_product(d_key, stages.left(stages.tile(stage, 1)), stages.right(keys), true);
      }
      start_product(d_key, stages.left(stages.tile(stage, 2)), stages.right(queries), true);

      Square own_rows;
      float of_query[2] = {}, of_key[2] = {}, of_end[2] = {};
      read_tile(own_rows, GroupTile<T>{queries}, own, place);
      add_row_products(w, own_rows, of_query);
      read_tile(own_rows, GroupTile<T>{keys}, own, place);
      add_row_products(z, own_rows, of_key);
      add_row_products(n, own_rows, of_end);
      store_dots(of_query, dots_to + kQueryDot * kChunk, own, place);
      store_dots(of_key, dots_to + kKeyDot * kChunk, own, place);
      store_dots(of_end, dots_to + kEndDot * kChunk, own, place);
      through = metal::simd_sum(through);  // a part of each SIMD group
      if (lane < 16) {
        dots_to[kThroughDot * kChunk + own + lane] = lane == 0 ? through : 0.0f;
      }
      wait_for_products<0>(d_query);
      wait_for_products<0>(d_key);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      stages.start(stage + 2, d_rows, d_y_stride, chunks);
      ++stage;
    }
    wait_for_copies<0>();
    if (!g_is_per_channel) {
      clear_rows_from(d_query, chunk.steps - own, place);
      clear_rows_from(d_key, chunk.steps - own, place);
      store_part(d_query, part, params, chunk, own, place);
      store_part(d_key, part + kKeyDim, params, chunk, own, place);
    }
  }
}

// ---- kernels

#ifdef __MSLC__  // Apple's GPUs never launch these
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_keys_group_bfloat16_d64",
                 gated_delta_chunk_backward_keys_group<bfloat, 64>)
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_keys_group_bfloat16_d128",
                 gated_delta_chunk_backward_keys_group<bfloat, 128>)
#endif
