// gated_delta and ssd_scan by chunks: what the gradients of a chunk's steps need of all its pairs
// of steps (chunk.h), from what chunk_forward.metal and chunk_backward.metal kept.
//
// Kernels: gated_delta_chunk_backward_squares_<dtype>_d<key dim>, and _pairs_ for matrix units of
// 16 bits. Grid: x covers chunks, y value heads, z batch rows and may be smaller than the batch.
// Threadgroup: 128 x 1 x 1; a SIMD group has 16 steps. Threadgroup memory 0: a square of float32;
// with pairs, whose rows are vectors, the tiles of two panels of 64 columns, which are copied
// ahead.
//
// Bindings: v, d_y, lengths, rows, products, changes, d_changes, squares, sums, params
// Function constants: 3, 8, 10, 11 as in state.h; 14: vectors of 16 bytes (chunk.h).
// `products` are q k^T and k k^T of the chunk; per channel the second alone, with G inside.
// Results: `squares` (ChunkSquare), of G d_P and B below, and `sums` of each step (ChunkSum). Per
// channel G is 1 here, and there is no d_g: chunk_backward_decays.metal has both.
//
//   d_P = d_Y U^T, d_A = -d_X U^T, B = beta G d_A below the diagonal
//   D = d_P (q . k) + beta d_A (k . k) below the diagonal: the gradient of G
//   d_g[i] = sum over j < i <= m of G[m][i] D[m][j] G[i - 1][j]
//   d_beta[i] = d_X[i] . v[i] + sum over j of G d_A (k[i] . k[j]);  d_skip[i] = d_Y[i] . v[i]
// chunk_backward_gates.metal adds what comes from the states.
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_loads.h"
#include "metal/gated_delta/decays.h"

template <typename U>
METAL_FUNC float2 read_pair(const device U* from) {
  return floats_of_pair(*reinterpret_cast<const device Pair<U>*>(from));
}

template <typename T>
struct TilesOfPairs {
  using Share = TileShare<T, kChunk, kPanel, kChunkThreads>;

  threadgroup T* memory;
  uint thread_index;

  METAL_FUNC threadgroup T* tile(int panel, ValueTile i) const thread {
    return memory + (panel % 2 * kValueTiles + i) * kChunk * int(Share::kStride);
  }
  // Starts the copies of a panel, if there is one.
  template <typename Weight>
  METAL_FUNC void start(int panel,
                        int panels,
                        ChunkPlace chunk,
                        Rows<T> v,
                        Rows<T> d_y,
                        const device Weight* u,
                        const device Weight* d_x,
                        long columns) const thread {
    if (panel < panels) {
      const int column = panel * kPanel;
      Share::start_copies(tile(panel, kTileOfV), chunk_rows(v, chunk, panel), thread_index);
      Share::start_copies(tile(panel, kTileOfDY), chunk_rows(d_y, chunk, panel), thread_index);
      Share::start_copies(tile(panel, kTileOfU), kept_rows(u + column, columns), thread_index);
      Share::start_copies(tile(panel, kTileOfDX), kept_rows(d_x + column, columns), thread_index);
    }
    end_copies();
  }

 private:
  // Only pairs get here, whose matrices are of T.
  template <typename Weight>
  METAL_FUNC static Rows<T> kept_rows(const device Weight* from, long stride) {
    return {reinterpret_cast<const device T*>(from), stride, 1, kChunk, kPanel};
  }
};

// Stores 16 rows of a square, times their factors, as columns.
template <typename Weight>
METAL_FUNC void store_transposed_square(thread RegTile<float, 16, kChunk> rows,
                                        const threadgroup float* factors,
                                        device Weight* to,
                                        FragmentPlace place) {
  scale_rows(rows, factors, place);
  store_transposed_rows(rows, to, kChunk, kChunk, 16, place, /*vectors=*/true);
}

template <typename T, bool kPairs, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void
gated_delta_chunk_backward_squares(
    const device T* v [[buffer(0)]],
    const device T* d_y [[buffer(1)]],
    const device int* lengths [[buffer(2)]],
    const device float* rows [[buffer(3)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* products [[buffer(4)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* changes [[buffer(5)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* d_changes [[buffer(6)]],
    device typename ChunkNumbers<T, kPairs>::Weight* squares [[buffer(7)]],
    device float* sums [[buffer(8)]],
    constant GatedDeltaParams& params [[buffer(9)]],
    threadgroup uint4* tiles [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Loads = ChunkLoads<T, kPairs>;
  using Weight = typename Loads::Weight;
  enum { kSquare = kChunk * kChunk };
  threadgroup float* const memory = reinterpret_cast<threadgroup float*>(tiles);
  threadgroup ChunkSteps facts;
  const FragmentPlace place = fragment_place(lane);
  const int head = int(group.y), own = 16 * int(simdgroup);
  const long columns = value_columns(params);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk =
        chunk_place(params, steps_of(params, lengths, batch), batch, head, int(group.x));
    if (chunk.is_padding()) {
      continue;
    }
    const Loads loads = {memory, place, thread_index, chunk};
    const TilesOfPairs<T> ahead = {reinterpret_cast<threadgroup T*>(tiles), thread_index};
    const Rows<T> d_rows = rows_of_d_y(params, d_y, batch, head);
    const Rows<T> v_rows = {v + at.v, params.v_strides[1], 1, params.length, params.value_dim};
    const device Weight* const u_rows = changes + chunk.index * kChunk * columns;
    const device Weight* const x_rows = d_changes + chunk.index * kChunk * columns;
    load_steps(facts, params, rows, chunk, thread_index);

    RegTile<float, 16, kChunk> weights, changed, left;
    weights.zero();
    changed.zero();
    float d_rate[2] = {}, d_skip[2] = {};
    const int panels = int(columns) / kPanel;
    if (kPairs) {
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < 2; ++panel) {
        ahead.start(panel, panels, chunk, v_rows, d_rows, u_rows, x_rows, columns);
      }
    }
    MLX_ANVIL_NO_UNROLL
    for (int panel = 0; panel < panels; ++panel) {
      RegTile<float, 16, kPanel> values;
      const threadgroup Weight* u;
      if (kPairs) {
        wait_for_copies<1>();
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        read_tile(values, ahead.tile(panel, kTileOfV), own, place);
        read_tile(left, ahead.tile(panel, kTileOfDY), own, place);
        u = reinterpret_cast<const threadgroup Weight*>(ahead.tile(panel, kTileOfU));
      } else {
        read_tile(values, loads.values(v_rows, panel), own, place);
        read_tile(left, loads.values(d_rows, panel), own, place);
        u = loads.numbers(u_rows + panel * kPanel, columns);
      }
      if (has_skip) {
        add_row_products(left, values, d_skip);
      }
      add_product<kPairs, true, true>(weights, left, u, place);
      if (kPairs) {
        read_tile(left, ahead.tile(panel, kTileOfDX), own, place);
      } else {
        read_rows(left, x_rows + own * columns + panel * kPanel, columns, place);
      }
      add_row_products(left, values, d_rate);
      if (corrects) {
        add_product<kPairs, true, true>(changed, left, u, place);
      }
      if (kPairs) {
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        ahead.start(panel + 2, panels, chunk, v_rows, d_rows, u_rows, x_rows, columns);
      }
    }

    if (!g_is_per_channel) {
      store_decays(memory, facts.gate, thread_index);
      read_tile_transposed(left, memory, own, place);
    }
    const int products_of_queries = g_is_per_channel ? 0 : int(kSquare);
    const device Weight* const all_products =
        products + chunk.index * (kSquare + products_of_queries);
    device Weight* const to = squares + chunk.index * kChunkSquares * kSquare;
    RegTile<float, 16, kChunk> by_keys;  // G d_P
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = own + 8 * i + place.row;
      const float rate = facts.rate[row];
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kChunk / 8; ++n) {
        const int column = 8 * n + place.column, at_pair = row * kChunk + column;
        const device Weight* const of_pair = all_products + at_pair;
        const float2 keys = read_pair(of_pair + products_of_queries);
        float2 decay = float2(1.0f);
        if (!g_is_per_channel) {
          decay =
              *reinterpret_cast<const threadgroup float2*>(memory + row * kDecayStride + column);
        }
        const float2 below = float2(column < row ? 1.0f : 0.0f, column + 1 < row ? 1.0f : 0.0f);
        const float2 up_to = float2(column <= row ? 1.0f : 0.0f, column + 1 <= row ? 1.0f : 0.0f);
        const float2 d_weight = elements_of(weights.fragments[i][n]);
        const float2 d_change = -below * elements_of(changed.fragments[i][n]);
        const float2 of_rate = d_change * decay * keys;
        d_rate[i] += of_rate.x + of_rate.y;
        by_keys.fragments[i][n] = fragment_of<float>(up_to * d_weight * decay);
        changed.fragments[i][n] = fragment_of<float>(d_change * decay * rate);
        if (!g_is_per_channel) {
          const float2 queries = read_pair(of_pair);
          weights.fragments[i][n] =
              fragment_of<float>(below * d_weight * queries + d_change * rate * keys);
        }
      }
    }
    device float* const sums_to = sums + chunk.index * kChunkSums * kChunk;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = own + 8 * i + place.row;
      const float of_rate = row_sum(d_rate[i]), of_skip = row_sum(d_skip[i]);
      if (place.column == 0) {
        sums_to[kRateSum * kChunk + row] = of_rate;
        sums_to[kSkipSum * kChunk + row] = of_skip;
      }
    }
    if (g_is_per_channel) {
      store_planes<1>(by_keys, to + kQueriesByKeys * kSquare, own, place);
      store_planes<1>(changed, to + kKeysByKeys * kSquare, own, place);
      continue;
    }
    store_transposed_square(by_keys, facts.query_scale + own, to + kKeysByQueries * kSquare + own,
                            place);
    scale_columns(by_keys, facts.key_scale, place);
    store_planes<1>(by_keys, to + kQueriesByKeys * kSquare, own, place);
    if (corrects) {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      store_square(memory + own * kDecayStride, changed, place);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      read_tile_transposed(by_keys, memory, own, place);
      changed.add(by_keys);
      scale_columns(changed, facts.key_scale, place);
      store_planes<1>(changed, to + kKeysByKeys * kSquare, own, place);
    }

    // G^T D, whose row i is summed up with row i - 1 of G.
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    store_square(memory + own * kDecayStride, weights, place);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    changed.zero();
    changed.mma(left, SharedTile<float, kDecayStride>{memory, place});
    store_decays(memory, facts.gate, thread_index);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = own + 8 * i + place.row;
      const threadgroup float* const before = memory + metal::max(row - 1, 0) * kDecayStride;
      float d_gate = 0.0f;
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kChunk / 8; ++n) {
        const int column = 8 * n + place.column;
        const float2 pair = elements_of(changed.fragments[i][n]);
        d_gate += column < row ? pair.x * before[column] : 0.0f;
        d_gate += column + 1 < row ? pair.y * before[column + 1] : 0.0f;
      }
      d_gate = row_sum(d_gate);
      if (place.column == 0) {
        sums_to[kGateSum * kChunk + row] = d_gate;
      }
    }
  }
}

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                                 \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_squares_" variant #dtype "_d" #dim, \
                   gated_delta_chunk_backward_squares<T, pairs, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)
