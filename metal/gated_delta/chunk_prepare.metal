// gated_delta and ssd_scan by chunks: what a chunk needs that does not depend on the state
// (chunk.h).
//
// Kernels: gated_delta_chunk_prepare_<dtype>_d<key dim>, and _pairs_ for matrix units of 16 bits.
// Grid: x covers chunks from first_chunk on, y value heads, z batch rows and may be smaller than
// the batch. Threadgroup: 128 x 1 x 1; a SIMD group has 16 steps. Threadgroup memory 0: a square of
// float32; with pairs also all tiles of q and k, whose rows are vectors.
//
// Bindings: q, k, g, beta, lengths, skip, inverse, weights, rows, products, params
// Function constants: 3, 5 to 7, 10 and 11 as in state.h; 13: vectors of 16 bytes (chunk.h);
// 15: keeps `products`, q k^T and k k^T, for gradients.
// `inverse` and `weights` are 64 x 64 a chunk: (I + A)^-1, with pairs the high parts, then the low
// ones; and P. Without a correction there is no inverse. `rows`: 7 x 64 numbers a chunk (ChunkRow).
//
//   for each panel of 64 columns: products of q and k with k^T, and sums of squares
//   G[.][j] by thread j: a running product; multiply
//   (I + A)^-1 (inverse.h)
#include "metal/common/kernel.h"
#include "metal/common/resident.h"
#include "metal/gated_delta/chunk_tiles.h"
#include "metal/gated_delta/inverse.h"

template <typename T, bool kPairs, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_prepare(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* g [[buffer(2)]],
    const device T* beta [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device float* skip [[buffer(5)]],
    device typename ChunkNumbers<T, kPairs>::Weight* inverse [[buffer(6)]],
    device typename ChunkNumbers<T, kPairs>::Weight* weights [[buffer(7)]],
    device float* rows [[buffer(8)]],
    device typename ChunkNumbers<T, kPairs>::Weight* products [[buffer(9)]],
    constant GatedDeltaParams& params [[buffer(10)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Numbers = ChunkNumbers<T, kPairs>;
  using Weight = typename Numbers::Weight;
  enum { kStride = TileRow<T, kPanel>::kStride, kSquare = kChunk * kChunk };
  enum { kPanels = kKeyDim / kPanel, kTile = kChunk * kStride };
  alignas(16) threadgroup float facts[kChunkRows][kChunk];
  threadgroup float* const matrix = reinterpret_cast<threadgroup float*>(memory);
  threadgroup T* const tiles = reinterpret_cast<threadgroup T*>(memory);
  if (kPairs) {
    keep_resident<4, 10>(corrects);
  }
  const FragmentPlace place = fragment_place(lane);
  const int head = int(group.y), own = 16 * int(simdgroup);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk = chunk_place(params, steps_of(params, lengths, batch), batch, head,
                                         params.first_chunk + int(group.x));
    if (chunk.is_padding()) {
      continue;
    }
    const Rows<T> queries = {q + at.q, params.q_strides[1], 1, 0, kKeyDim};
    const Rows<T> keys = {k + at.k, params.k_strides[1], 1, 0, kKeyDim};
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the batch row before
    if (kPairs) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 2 * kPanels; ++i) {
        TileShare<T, kChunk, kPanel, kChunkThreads>::start_copies(
            tiles + i * kTile, chunk_rows(i % 2 == 0 ? queries : keys, chunk, i / 2), thread_index);
      }
      end_copies();
    }
    if (thread_index < kChunk) {
      const int step = int(thread_index);
      const long t = chunk.first + step;
      const bool counts = step < chunk.steps;
      facts[kGate][step] =
          counts ? load_gate(g, g_is_float32, at.g + t * params.g_strides[1]) : 1.0f;
      facts[kSkip][step] = has_skip && counts ? skip[at.skip + t * params.skip_strides[1]] : 0.0f;
      facts[kRate][step] =
          counts ? load_gate(beta, beta_is_float32, at.beta + t * params.beta_strides[1]) : 0.0f;
    }

    RegTile<float, 16, kChunk> kk, qk;
    kk.zero();
    qk.zero();
    float q_squares[2] = {}, k_squares[2] = {};
    if (kPairs) {
      wait_for_copies<0>();
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    for (int panel = 0; panel < kPanels; ++panel) {
      RegTile<T, 16, kPanel> left;
      threadgroup T* const of_queries = kPairs ? tiles + 2 * panel * kTile : tiles;
      threadgroup T* const of_keys = kPairs ? of_queries + kTile : tiles;
      if (!kPairs) {
        load_tile<T>(matrix, chunk_rows(queries, chunk, panel), keys_are_vectors, thread_index);
      }
      left.load(of_queries + own * kStride, kStride, place);
      if (!kPairs) {
        load_tile<T>(matrix, chunk_rows(keys, chunk, panel), keys_are_vectors, thread_index);
      }
      const TransposedTile<T, kStride> right = {of_keys, place};
      add_squares(left, q_squares);
      qk.mma(left, right);
      left.load(of_keys + own * kStride, kStride, place);
      add_squares(left, k_squares);
      if (corrects) {
        kk.mma(left, right);
      }
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float of_q = row_sum(q_squares[i]), of_k = row_sum(k_squares[i]);
      if (place.column == 0) {
        const int step = own + 8 * i + place.row;
        const bool scales = normalizes && step < chunk.steps;
        facts[kQueryScale][step] =
            scales ? params.q_scale * metal::precise::rsqrt(of_q + params.eps) : 1.0f;
        facts[kKeyScale][step] = scales ? metal::precise::rsqrt(of_k + params.eps) : 1.0f;
      }
    }
    store_decays(matrix, facts[kGate], thread_index);
    if (thread_index < kChunk) {
      facts[kDecayAfter][thread_index] = matrix[(kChunk - 1) * kDecayStride + thread_index];
    } else if (thread_index == kChunk) {
      float decay = 1.0f;
      for (int i = 0; i < kChunk; ++i) {
        decay *= facts[kGate][i];
        facts[kDecayBefore][i] = decay;
      }
    }
    RegTile<float, 16, kChunk> decays;
    decays.load(matrix + own * kDecayStride, kDecayStride, place);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    MLX_ANVIL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = own + 8 * i + place.row;
      const float of_query = facts[kQueryScale][row], of_key = facts[kKeyScale][row];
      const float rate = facts[kRate][row];
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kChunk / 8; ++n) {
        const int column = 8 * n + place.column;
        const float2 scale = float2(facts[kKeyScale][column], facts[kKeyScale][column + 1]);
        const float2 decay = elements_of(decays.fragments[i][n]);
        const float2 queries = elements_of(qk.fragments[i][n]) * scale * of_query;
        const float2 keys = elements_of(kk.fragments[i][n]) * scale * of_key;
        if (keeps_products) {
          device Weight* const to = products + chunk.index * 2 * kSquare + row * kChunk + column;
          store_pair(to, 0, 2, queries, /*vectors=*/true, /*full=*/true);
          store_pair(to + kSquare, 0, 2, keys, /*vectors=*/true, /*full=*/true);
        }
        const float2 weight = queries * decay, change = keys * decay * rate;
        qk.fragments[i][n] = fragment_of<float>(weight);
        kk.fragments[i][n] =
            fragment_of<float>(column < row ? change.x : 0.0f, column + 1 < row ? change.y : 0.0f);
      }
    }
    store_planes<1>(qk, weights + chunk.index * kSquare, own, place);
    if (corrects) {
      store_square(matrix + own * kDecayStride, kk, place);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      invert<T, kPairs>(matrix, simdgroup, lane);

      qk.load(matrix + own * kDecayStride, kDecayStride, place);
      store_planes<Numbers::kPlanes>(qk, inverse + chunk.index * Numbers::kPlanes * kSquare, own,
                                     place);
    }
    device float* const facts_to = rows + chunk.index * kChunkRows * kChunk;
    for (int i = int(thread_index); i < kChunkRows * kChunk; i += kChunkThreads) {
      facts_to[i] = facts[i / kChunk][i % kChunk];
    }
  }
}

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                        \
  MLX_ANVIL_KERNEL("gated_delta_chunk_prepare_" variant #dtype "_d" #dim, \
                   gated_delta_chunk_prepare<T, pairs, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)
