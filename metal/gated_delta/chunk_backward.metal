// gated_delta by chunks: gradients of the state and of v, a chunk before the other (chunk.h).
//
// Kernels: gated_delta_chunk_backward_<dtype>_k<key dim>, and _pairs_ for matrix units of 16 bits.
// Grid, threadgroup: as for chunk_forward.metal.
//
// Bindings: q, k, d_y, d_state_out, lengths, inverse, weights, rows, d_states, d_changes, d_v,
//           d_state, params
// Function constants: 2: the gradient of the first state is wanted; 3 as in state.h; 10, 11:
// vectors of 16 bytes (chunk.h).
//
// All transposed, as in chunk_forward.metal. d_S is stored, in `d_states`, before each chunk takes
// it, and d_X, in `d_changes`: with value_columns() rows and columns.
//   for each chunk from the last:
//     d_U = d_Y P + G[63] d_S K^T; d_X = d_U (I + A)^-1; d_V = beta d_X
//     d_S = gamma[63] d_S + (gamma d_Y) Q - (gamma d_V) K
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk.h"
#include "metal/gated_delta/chunk_tiles.h"

template <typename T, bool kPairs, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_backward(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* d_y [[buffer(2)]],
    const device float* d_state_out [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* inverse [[buffer(5)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* weights [[buffer(6)]],
    const device float* rows [[buffer(7)]],
    device float* d_states [[buffer(8)]],
    device float* d_changes [[buffer(9)]],
    device T* d_v [[buffer(10)]],
    device float* d_state [[buffer(11)]],
    constant GatedDeltaParams& params [[buffer(12)]],
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
  const long columns = value_columns(params);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const int steps = steps_of(params, lengths, batch);
    const long own_state = (at.state + row) * kKeyDim;
    const long v_stride = long(params.value_heads) * params.value_dim;
    RegTile<float, 16, kPanel> d_s[kPanels];
    load_state(d_s, d_state_out + own_state, own_rows, place);
    for (int c = chunks - 1; c >= 0; --c) {
      const ChunkPlace chunk = chunk_place(params, steps, batch, head, c);
      const long token = long(batch) * params.length + chunk.first;
      device T* const to = d_v + (token * params.value_heads + head) * params.value_dim + row;
      RegTile<float, 16, kChunk> d_x;
      if (chunk.is_padding()) {
        d_x.zero();
        store_transposed_rows(d_x, to, v_stride, chunk.exists, own_rows, place, values_are_vectors);
        continue;
      }
      store_state(d_s, d_states + (chunk.index * columns + row) * kKeyDim, 16, place);
      const Tiles tiles = {memory, place, thread_index, chunk};
      load_factors(factors, rows, chunk, thread_index);

      RegTile<float, 16, kChunk> d_out, d_u;
      const Rows<T> d_rows = {d_y + batch * params.d_y_strides[0] +
                                  chunk.first * params.d_y_strides[1] +
                                  head * params.d_y_strides[2] + row,
                              params.d_y_strides[1], 1, chunk.steps, own_rows};
      load_transposed_rows(d_out, d_rows, place, values_are_vectors);
      d_u.zero();
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        tiles.template add<true, false>(d_u, d_s[panel],
                                        tiles.load(k + at.k, params.k_strides[1], panel));
      }
      scale_columns(d_u, factors.onto, place);
      tiles.template add_square<false>(d_u, d_out, weights + chunk.index * kSquares);
      d_x.zero();
      tiles.template add_square<false>(d_x, d_u, inverse + chunk.index * kSquares);
      store_transposed_rows(d_x, d_changes + chunk.index * kChunk * columns + row, columns, kChunk,
                            16, place, false);
      scale_columns(d_x, factors.rate, place);
      store_transposed_rows(d_x, to, v_stride, chunk.exists, own_rows, place, values_are_vectors);

      scale_columns(d_out, factors.out_of, place);
      scale_columns(d_x, factors.into, place);
      d_x.negate();
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        d_s[panel].scale(factors.decay[kChunk - 1]);
        tiles.template add<false, false>(d_s[panel], d_out,
                                         tiles.load(q + at.q, params.q_strides[1], panel));
        tiles.template add<false, false>(d_s[panel], d_x,
                                         tiles.load(k + at.k, params.k_strides[1], panel));
      }
    }
    if (has_state) {
      store_state(d_s, d_state + own_state, own_rows, place);
    }
  }
}

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                         \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_" variant #dtype "_k" #dim, \
                   gated_delta_chunk_backward<T, pairs, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)
