// gated_delta and ssd_scan by chunks: gradients of 64 columns of q and k, for each value head
// (chunk_keys.h).
//
// Kernels: gated_delta_chunk_backward_keys_<dtype>_d<key dim>, and _pairs_ for matrix units of 16
// bits.
// Grid: x covers the panels of 64 columns of each chunk, y value heads, z batch rows and may be
// smaller than the batch. Threadgroup: 128 x 1 x 1; a SIMD group has 16 steps.
//
// Bindings: q, k, d_y, lengths, rows, states, changes, d_states, d_changes, squares, parts, dots,
//           params
// Function constants: 3, 8, 10 as in state.h; 13, 14: vectors of 16 bytes (chunk.h).
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_keys.h"
#include "metal/gated_delta/chunk_loads.h"

template <typename Weight>
METAL_FUNC float dot_of_four(const device Weight* a, const device Weight* b) {
  using Vector4 = metal::vec<Weight, 4>;
  const Vector4 left = *reinterpret_cast<const device Vector4*>(a);
  const Vector4 right = *reinterpret_cast<const device Vector4*>(b);
  return metal::dot(floats_of<Weight>(left), floats_of<Weight>(right));
}

// The gradients of the decays of a panel's channels through the chunk: sums over the rows of
// S d_S. Two threads share a channel.
template <typename Weight>
METAL_FUNC void store_through(const device Weight* s,
                              const device Weight* d_s,
                              int rows,
                              int stride,
                              threadgroup float* memory,
                              uint thread_index,
                              device float* to) {
  const int channel = int(thread_index) % kPanel, half_of_rows = int(thread_index) / kPanel;
  float through = 0.0f;
  for (int row = half_of_rows; row < rows; row += 2) {
    through += float(s[row * stride + channel]) * float(d_s[row * stride + channel]);
  }
  store_sums_of_halves(through, memory, thread_index, to);
}

template <typename T, bool kPairs, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_backward_keys(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* d_y [[buffer(2)]],
    const device int* lengths [[buffer(3)]],
    const device float* rows [[buffer(4)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* states [[buffer(5)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* changes [[buffer(6)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* d_states [[buffer(7)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* d_changes [[buffer(8)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* squares [[buffer(9)]],
    device float* parts [[buffer(10)]],
    device float* dots [[buffer(11)]],
    constant GatedDeltaParams& params [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Loads = ChunkLoads<T, kPairs>;
  using Weight = typename Loads::Weight;
  using Square = RegTile<float, 16, kChunk>;
  enum { kPanels = kKeyDim / kPanel, kSquare = kChunk * kChunk };
  alignas(16) threadgroup float memory[Loads::kMemory];
  threadgroup ChunkSteps facts;
  const FragmentPlace place = fragment_place(lane);
  const int head = int(group.y), own = 16 * int(simdgroup);
  const int panel = int(group.x) % kPanels, column = panel * kPanel;
  const long columns = value_columns(params);
  const int panels_of_values = int(columns) / kPanel;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk =
        chunk_place(params, steps_of(params, lengths, batch), batch, head, int(group.x) / kPanels);
    const long token = long(batch) * params.length + chunk.first;
    device float* const part = parts + chunk_part(params, token, head) + column;
    Square sum, d_key, left;
    sum.zero();
    d_key.zero();
    if (chunk.is_padding()) {
      for (int i = 0; i < chunk_part_vectors(); ++i) {
        store_part(sum, part + i * kKeyDim, params, chunk, own, place);
      }
      continue;
    }
    const Loads loads = {memory, place, thread_index, chunk};
    const Rows<T> d_rows = rows_of_d_y(params, d_y, batch, head);
    const device Weight* const u_rows = changes + (chunk.index * kChunk + own) * columns;
    const device Weight* const x_rows = d_changes + (chunk.index * kChunk + own) * columns;
    const device Weight* const s_rows = states + chunk.index * columns * kKeyDim + column;
    const device Weight* const d_s_rows = d_states + chunk.index * columns * kKeyDim + column;
    const device Weight* const of_pairs =
        squares + chunk.index * kChunkSquares * kSquare + own * kChunk;
    device float* const dots_to = dots + (chunk.index * kPanels + panel) * kChunkDots * kChunk;
    load_steps(facts, params, rows, chunk, thread_index);

    MLX_ANVIL_NO_UNROLL
    for (int i = 0; i < panels_of_values; ++i) {
      read_tile(left, loads.values(d_rows, i), own, place);
      add_product<kPairs, false, true>(
          sum, left, loads.numbers(s_rows + i * kPanel * kKeyDim, kKeyDim), place);
    }
    float of_query[2] = {}, of_key[2] = {}, of_end[2] = {};
    if (!g_is_per_channel) {
      read_tile(left, loads.keys(q + at.q, params.q_strides[1], panel), own, place);
      add_row_products(sum, left, of_query);
      store_dots(of_query, dots_to + kQueryDot * kChunk, own, place);
      scale_rows(sum, facts.decay + own, place);
      read_rows(left, of_pairs + kQueriesByKeys * kSquare, kChunk, place);
      add_product<kPairs, false, true>(sum, left, loads.keys(k + at.k, params.k_strides[1], panel),
                                       place);
    }
    clear_rows_from(sum, chunk.steps - own, place);
    store_part(sum, part, params, chunk, own, place);

    sum.zero();
    MLX_ANVIL_NO_UNROLL
    for (int i = 0; i < panels_of_values; ++i) {
      if (corrects) {
        read_rows(left, x_rows + i * kPanel, columns, place);
        add_product<kPairs, false, true>(
            sum, left, loads.numbers(s_rows + i * kPanel * kKeyDim, kKeyDim), place);
      }
      read_rows(left, u_rows + i * kPanel, columns, place);
      add_product<kPairs, false, true>(
          d_key, left, loads.numbers(d_s_rows + i * kPanel * kKeyDim, kKeyDim), place);
    }
    if (g_is_per_channel) {
      clear_rows_from(sum, chunk.steps - own, place);
      store_part(sum, part + kKeyDim, params, chunk, own, place);
      clear_rows_from(d_key, chunk.steps - own, place);
      store_part(d_key, part + 2 * kKeyDim, params, chunk, own, place);
      store_through(s_rows, d_s_rows, int(columns), kKeyDim, memory, thread_index,
                    dots_to + kThroughDot * kChunk);
      continue;
    }
    const threadgroup T* const keys = loads.keys(k + at.k, params.k_strides[1], panel);
    read_tile(left, keys, own, place);
    add_row_products(sum, left, of_key);
    add_row_products(d_key, left, of_end);
    store_dots(of_key, dots_to + kKeyDot * kChunk, own, place);
    store_dots(of_end, dots_to + kEndDot * kChunk, own, place);
    scale_rows(d_key, facts.decay_after + own, place);
    if (corrects) {
      scale_rows(sum, facts.minus_into + own, place);
      d_key.add(sum);
      read_rows(left, of_pairs + kKeysByKeys * kSquare, kChunk, place);
      add_product<kPairs, false, true>(d_key, left, keys, place);
    }
    read_rows(left, of_pairs + kKeysByQueries * kSquare, kChunk, place);
    add_product<kPairs, false, true>(d_key, left, loads.keys(q + at.q, params.q_strides[1], panel),
                                     place);
    clear_rows_from(d_key, chunk.steps - own, place);
    store_part(d_key, part + kKeyDim, params, chunk, own, place);

    // A part of each thread, and of each SIMD group.
    float through = 0.0f;
    for (int i = int(thread_index); i < int(columns) * kPanel / 4; i += kChunkThreads) {
      const int at_pack = i / (kPanel / 4) * kKeyDim + 4 * (i % (kPanel / 4));
      through += dot_of_four(s_rows + at_pack, d_s_rows + at_pack);
    }
    through = metal::simd_sum(through);
    if (lane < 16) {
      dots_to[kThroughDot * kChunk + own + lane] = lane == 0 ? through : 0.0f;
    }
  }
}

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                              \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_keys_" variant #dtype "_d" #dim, \
                   gated_delta_chunk_backward_keys<T, pairs, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)
