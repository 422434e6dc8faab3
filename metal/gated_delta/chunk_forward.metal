// gated_delta by chunks: y and the states, a chunk after the other (chunk.h).
//
// Kernels: gated_delta_chunk_forward_<dtype>_k<key dim>, and _pairs_ for matrix units of 16 bits.
// Grid: x covers blocks of 64 rows of the state, y value heads, z batch rows and may be smaller
// than the batch. Threadgroup: 128 x 1 x 1; a SIMD group has 16 rows, and reads tiles with others.
//
// Bindings: q, k, v, state, lengths, inverse, weights, rows, y, state_out, changes, params
// Function constants: 2, 3 as in state.h; 9: only keeps, for the backward, the state before each
// chunk, in `state_out`, and U, in `changes`, with value_columns() rows and columns; 10, 11:
// vectors of 16 bytes (chunk.h).
//
// Everything is transposed, so that rows of the state are rows of the left operands:
//   for each chunk:
//     X = beta (V^T - gamma S K^T), U = X ((I + A)^-1)^T
//     Y = gamma S Q^T + U P^T; store Y^T
//     S = gamma[63] S + (G[63] U) K
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk.h"
#include "metal/gated_delta/chunk_tiles.h"

constant bool keeps_states [[function_constant(9)]];

template <typename T, bool kPairs, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_forward(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device float* state [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* inverse [[buffer(5)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* weights [[buffer(6)]],
    const device float* rows [[buffer(7)]],
    device T* y [[buffer(8)]],
    device float* state_out [[buffer(9)]],
    device float* changes [[buffer(10)]],
    constant GatedDeltaParams& params [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Tiles = ChunkTiles<T, kPairs>;
  enum { kPanels = kKeyDim / kPanel, kSquares = Tiles::kPlanes * kChunk * kChunk };
  alignas(16) threadgroup float memory[Tiles::kMemory];
  threadgroup ChunkFactors factors;
  const FragmentPlace place = fragment_place(lane);
  const int head = int(group.y);
  const int row = int(group.x) * kChunkValues + 16 * int(simdgroup);
  const int own_rows = metal::clamp(params.value_dim - row, 0, 16);
  const int chunks = (params.length + kChunk - 1) / kChunk;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const int steps = steps_of(params, lengths, batch);
    const long own_state = (at.state + row) * kKeyDim;
    const long y_stride = long(params.value_heads) * params.value_dim;
    RegTile<float, 16, kPanel> s[kPanels];
    load_state(s, state + own_state, has_state ? own_rows : 0, place);
    for (int c = 0; c < chunks; ++c) {
      const ChunkPlace chunk = chunk_place(params, steps, batch, head, c);
      const long token = long(batch) * params.length + chunk.first;
      const long result = (token * params.value_heads + head) * params.value_dim + row;
      RegTile<float, 16, kChunk> u;
      if (keeps_states) {
        const long own = chunk.index * value_columns(params) + row;
        store_state(s, state_out + own * kKeyDim, 16, place);
      }
      if (chunk.is_padding()) {
        u.zero();
        if (!keeps_states) {
          store_transposed_rows(u, y + result, y_stride, chunk.exists, own_rows, place,
                                values_are_vectors);
        }
        continue;
      }
      const Tiles tiles = {memory, place, thread_index, chunk};
      load_factors(factors, rows, chunk, thread_index);
      RegTile<float, 16, kChunk> x;
      x.zero();
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        tiles.template add<true, false>(x, s[panel],
                                        tiles.load(k + at.k, params.k_strides[1], panel));
      }
      scale_columns(x, factors.into, place);
      const Rows<T> values = {v + at.v + chunk.first * params.v_strides[1] + row,
                              params.v_strides[1], 1, chunk.steps, own_rows};
      load_transposed_rows(u, values, place, values_are_vectors);
      x.negate();
      x.add(u);
      scale_columns(x, factors.rate, place);
      u.zero();
      tiles.template add_square<true>(u, x, inverse + chunk.index * kSquares);
      if (keeps_states) {
        const long own = chunk.index * kChunk * value_columns(params);
        store_transposed_rows(u, changes + own + row, value_columns(params), kChunk, 16, place,
                              false);
      } else {
        x.zero();
        MLX_ANVIL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          tiles.template add<true, true>(x, s[panel],
                                         tiles.load(q + at.q, params.q_strides[1], panel));
        }
        scale_columns(x, factors.out_of, place);
        tiles.template add<true, true>(x, u, tiles.load_square(weights + chunk.index * kSquares));
        store_transposed_rows(x, y + result, y_stride, chunk.exists, own_rows, place,
                              values_are_vectors);
      }
      scale_columns(u, factors.onto, place);
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        s[panel].scale(factors.decay[kChunk - 1]);
        tiles.template add<false, false>(s[panel], u,
                                         tiles.load(k + at.k, params.k_strides[1], panel));
      }
    }
    if (!keeps_states) {
      store_state(s, state_out + own_state, own_rows, place);
    }
  }
}

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                        \
  MLX_ANVIL_KERNEL("gated_delta_chunk_forward_" variant #dtype "_k" #dim, \
                   gated_delta_chunk_forward<T, pairs, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)
