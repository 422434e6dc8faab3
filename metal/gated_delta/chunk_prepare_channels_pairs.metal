// gated_delta by chunks with a decay per channel: chunk_prepare_channels.metal for matrix units of
// 16 bits, which multiply more of each square.
//
// Kernels: gated_delta_chunk_prepare_channels_pairs_bfloat16_d<key dim>.
// Grid, threadgroup, bindings and function constants: as there. `decayed`: 64 rows of each
// ChunkOperand as high and low parts; of queries there are no low parts.
//
// A block of 16 steps is halved twice. What the second half of 16, or 8, steps reads of the first
// is a product: of q and k with the decay from the second half's first step, and k with the decay
// to the first half's last step. Of runs of 4 steps the decays of the pairs are multiplied up. A
// lane has two channels in half of a block, and lanes add up after the last panel.
//
//   for each panel of 32 channels:
//     pairs of steps in runs of 4; halves of 8; halves of 16; blocks below the diagonal
//   multiply by the scales of q and k; (I + A)^-1 (inverse.h)
// k has 16 bits in products with k, and 8 in those with q, whose sums P are rounded anyway.
#include "metal/common/kernel.h"
#include "metal/gated_delta/channel_squares.h"
#include "metal/gated_delta/half_steps.h"

// Rows and columns of the pairs, as 4 * row + column.
constant constexpr uchar kPlaceOfPair[kPairsOfRun] = {0,  4,  5, 8, 9, 10, 12, 13,
                                                      14, 15, 4, 8, 9, 12, 13, 14};

template <typename T>
struct alignas(16) ChannelPlanes {
  enum { kStride = TileRow<T, kChannels>::kStride };
  T queries[kChunk][kStride];
  T keys[2][kChunk][kStride];  // high and low parts
  T keys_to[2][kChunk][kStride];
};

template <typename T>
METAL_FUNC void store_pair_at(threadgroup T* to, Pair<T> pair) {
  *reinterpret_cast<threadgroup Pair<T>*>(to) = pair;
}
template <typename T>
METAL_FUNC void store_pair_at(device T* to, Pair<T> pair) {
  *reinterpret_cast<device Pair<T>*>(to) = pair;
}

// Sums over a panel's channels of a block's rows with kColumns / 8 columns of fragments.
template <typename T>
struct BlockProducts {
  enum { kStride = ChannelPlanes<T>::kStride };
  using Right = TransposedTile<T, kStride>;
  using Rows16 = RegTile<T, kBlock, kChannels>;

  FragmentPlace place;

  METAL_FUNC Rows16 rows(const threadgroup T* from) const thread {
    Rows16 tile;
    tile.load(from, kStride, place);
    return tile;
  }
  // sum += (high + low) x the rows' transpose.
  template <int kColumns>
  METAL_FUNC void add_keys(thread RegTile<float, kBlock, kColumns>& sum,
                           const thread Rows16& high,
                           const thread Rows16& low,
                           const threadgroup T* right_high,
                           const threadgroup T* right_low) const thread {
    sum.mma(high, Right{right_high, place});
    sum.mma(low, Right{right_high, place});
    sum.mma(high, Right{right_low, place});
  }
};

// The sum over all channels of a block's squared rows, of q or k.
template <typename T, int kKeyDim>
METAL_FUNC void store_square_sums(Rows<T> rows, threadgroup float* to, FragmentPlace place) {
  float sums[2] = {};
  MLX_ANVIL_NO_UNROLL
  for (int first = 0; first < kKeyDim; first += kPanel) {
    RegTile<T, kBlock, kPanel> tile;
    tile.load(rows, first, place, /*vectors=*/true, /*full=*/true);
    add_squares(tile, sums);
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float sum = row_sum(sums[i]);
    if (place.column == 0) {
      to[8 * i + place.row] = sum;
    }
  }
}

// The block on the diagonal, but for the pairs in runs.
METAL_FUNC void store_diagonal_block(threadgroup float* to,
                                     const thread BlockSums& of_eights,
                                     const thread RegTile<float, kBlock, 8>& of_sixteen,
                                     FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 4; ++f) {
    const int i = f / 2, n = f % 2;
    float2 own = float2(0.0f);
    if (i == n) {
      own = place.row >= kRun && place.column < kRun ? elements_of(of_eights.fragments[i][n]) : own;
    } else if (i > n) {
      own = elements_of(of_sixteen.fragments[1][0]);
    }
    store_fragment(to + (8 * i + place.row) * kDecayStride + 8 * n + place.column,
                   fragment_of<float>(own));
  }
}

// Stores a SIMD group's rows of a square. `pairs`: the lane's two of the pairs in runs, of which
// those of q or of k are stored.
METAL_FUNC void store_rows_of_square(threadgroup float* rows,
                                     thread BlockSums (&below)[kBlocks - 1],
                                     const thread BlockSums& of_eights,
                                     const thread RegTile<float, kBlock, 8>& of_sixteen,
                                     const thread float (&pairs)[kOwnPairs],
                                     bool of_queries,
                                     int block,
                                     uint lane,
                                     FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int j = 0; j < kBlocks - 1; ++j) {
    // Blocks right of that on the diagonal are zeros, one place further.
    store_square(rows + kBlock * (j < block ? j : j + 1), below[j], place);
  }
  threadgroup float* const diagonal = rows + kBlock * block;
  store_diagonal_block(diagonal, of_eights, of_sixteen, place);
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  threadgroup float* const own = diagonal + int(lane) / 8 * kRun * (kDecayStride + 1);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int pair = 2 * (int(lane) % 8) + i, at = kPlaceOfPair[pair];
    if ((pair < kQueryPairs) == of_queries) {
      own[at / kRun * kDecayStride + at % kRun] = pairs[i];
    }
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
}

template <typename T, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void
gated_delta_chunk_prepare_channels_pairs(const device T* q [[buffer(0)]],
                                         const device T* k [[buffer(1)]],
                                         const device T* g [[buffer(2)]],
                                         const device T* beta [[buffer(3)]],
                                         const device int* lengths [[buffer(4)]],
                                         device T* inverse [[buffer(5)]],
                                         device T* weights [[buffer(6)]],
                                         device float* rows [[buffer(7)]],
                                         device T* products [[buffer(8)]],
                                         device T* decayed [[buffer(9)]],
                                         constant GatedDeltaParams& params [[buffer(10)]],
                                         uint3 group [[threadgroup_position_in_grid]],
                                         uint3 groups [[threadgroups_per_grid]],
                                         uint thread_index [[thread_index_in_threadgroup]],
                                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                                         uint lane [[thread_index_in_simdgroup]]) {
  enum { kPlanes = 2, kSquare = kChunk * kChunk, kRows = kChunk * kKeyDim };
  enum { kStride = ChannelPlanes<T>::kStride };
  threadgroup ChannelPlanes<T> planes;
  threadgroup BlockDecays decays;
  alignas(16) threadgroup float facts[kChunkRows][kChunk];
  // After the last panel.
  threadgroup float* const matrix = reinterpret_cast<threadgroup float*>(&planes.queries[0][0]);
  const FragmentPlace place = fragment_place(lane);
  const BlockProducts<T> block_products = {place};
  const int head = int(group.y), block = int(simdgroup), own = kBlock * block;
  const int step = own + int(lane) % kBlock;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk = chunk_place(params, steps_of(params, lengths, batch), batch, head,
                                         params.first_chunk + int(group.x));
    if (chunk.is_padding()) {
      continue;
    }
    device float* const facts_to = rows + chunk.index * chunk_facts(params);
    device T* const decayed_to =
        decayed + chunk.index * kChunkOperands * kPlanes * kRows + own * kKeyDim;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the batch row before
    if (normalizes) {
      const long first = chunk.first + own;
      const int count = chunk.steps - own;
      if (count > 0) {
        store_square_sums<T, kKeyDim>(
            {q + at.q + first * params.q_strides[1], params.q_strides[1], 1, count, kKeyDim},
            facts[kQueryScale] + own, place);
        store_square_sums<T, kKeyDim>(
            {k + at.k + first * params.k_strides[1], params.k_strides[1], 1, count, kKeyDim},
            facts[kKeyScale] + own, place);
      }
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    const float squares = !normalizes || step >= chunk.steps ? 0.0f
                          : lane < kBlock                    ? facts[kQueryScale][step]
                                                             : facts[kKeyScale][step];
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    store_facts(facts, params, beta, at, chunk, step, lane, squares);

    BlockSums queries_below[kBlocks - 1], keys_below[kBlocks - 1], query_eights, key_eights;
    RegTile<float, kBlock, 8> query_sixteen, key_sixteen;
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kBlocks - 1; ++j) {
      queries_below[j].zero();
      keys_below[j].zero();
    }
    query_eights.zero();
    key_eights.zero();
    query_sixteen.zero();
    key_sixteen.zero();
    float pairs[kOwnPairs] = {};
    const int own_half = kHalf * (int(lane) / 16), channels = 2 * (int(lane) % 16);
    const long first_step = chunk.first + own + own_half;
    MLX_ANVIL_NO_UNROLL
    for (int first = 0; first < kKeyDim; first += kChannels) {
      const int channel = first + channels;
      HalfSteps steps;
      steps.load(q + at.q + first_step * params.q_strides[1] + channel,
                 k + at.k + first_step * params.k_strides[1] + channel, g,
                 at.g + first_step * params.g_strides[1] + channel, params,
                 chunk.steps - own - own_half);
      steps.add_pairs_to(pairs);
      steps.begin_runs();

      threadgroup T* const own_queries = &planes.queries[own + own_half][channels];
      threadgroup T* const own_keys = &planes.keys[0][own + own_half][channels];
      threadgroup T* const own_rest = &planes.keys[1][own + own_half][channels];
      const threadgroup T* const query_rows = planes.queries[own];
      const threadgroup T *const high = planes.keys[0][own], *const low = planes.keys[1][own];
      const typename BlockProducts<T>::Right keys = {high, place};

      // Steps of the first half are read as columns, and those of the second half as rows.
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const TwoParts<T> key((i < kRun ? steps.to_last[i] : steps.from_first[i]) * steps.k[i]);
        store_pair_at(own_queries + i * kStride,
                      TwoParts<T>(steps.from_first[i] * steps.q[i]).high);
        store_pair_at(own_keys + i * kStride, key.high);
        store_pair_at(own_rest + i * kStride, key.low);
      }
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      query_eights.mma(block_products.rows(query_rows), keys);
      block_products.add_keys(key_eights, block_products.rows(high), block_products.rows(low), high,
                              low);
      steps.join_runs();
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const TwoParts<T> key((own_half == 0 ? steps.to_last[i] : steps.from_first[i]) *
                              steps.k[i]);
        store_pair_at(own_queries + i * kStride,
                      TwoParts<T>(steps.from_first[i] * steps.q[i]).high);
        store_pair_at(own_keys + i * kStride, key.high);
        store_pair_at(own_rest + i * kStride, key.low);
      }
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      query_sixteen.mma(block_products.rows(query_rows), keys);
      block_products.add_keys(key_sixteen, block_products.rows(high), block_products.rows(low),
                              high, low);
      steps.join_halves(lane);
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);

      // Blocks of 16, and what the walks read.
      if (own_half > 0) {
        *reinterpret_cast<threadgroup float2*>(&decays.through[block][channels]) =
            steps.from_first[kHalf - 1];
      }
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const TwoParts<T> key_from(steps.from_first[i] * steps.k[i]),
            key_to(steps.to_last[i] * steps.k[i]);
        store_pair_at(own_queries + i * kStride,
                      TwoParts<T>(steps.from_first[i] * steps.q[i]).high);
        store_pair_at(own_keys + i * kStride, key_from.high);
        store_pair_at(own_rest + i * kStride, key_from.low);
        store_pair_at(&planes.keys_to[0][own + own_half + i][channels], key_to.high);
        store_pair_at(&planes.keys_to[1][own + own_half + i][channels], key_to.low);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      const float2 before = decays.between_two(0, block, channels);
      const float2 after = decays.between_two(block + 1, kBlocks, channels);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const float2 from = before * steps.from_first[i];
        const TwoParts<T> key_from(from * steps.k[i]),
            key_to(after * steps.to_last[i] * steps.k[i]);
        device T* const row = decayed_to + (own_half + i) * kKeyDim + channel;
        store_pair_at(row + kQueriesFrom * kPlanes * kRows, TwoParts<T>(from * steps.q[i]).high);
        store_pair_at(row + kKeysFrom * kPlanes * kRows, key_from.high);
        store_pair_at(row + (kKeysFrom * kPlanes + 1) * kRows, key_from.low);
        store_pair_at(row + kKeysTo * kPlanes * kRows, key_to.high);
        store_pair_at(row + (kKeysTo * kPlanes + 1) * kRows, key_to.low);
      }
      if (block == 0) {
        facts_to[kChunkRows * kChunk + first + int(lane)] = decays.between(0, kBlocks, int(lane));
      }
      {
        typename BlockProducts<T>::Rows16 queries = block_products.rows(query_rows);
        typename BlockProducts<T>::Rows16 keys = block_products.rows(high);
        typename BlockProducts<T>::Rows16 rest = block_products.rows(low);
        MLX_ANVIL_UNROLL
        for (int j = kBlocks - 2; j >= 0; --j) {
          if (j < block) {
            const threadgroup T* const right = planes.keys_to[0][kBlock * j];
            queries_below[j].mma(queries, typename BlockProducts<T>::Right{right, place});
            block_products.add_keys(keys_below[j], keys, rest, right,
                                    planes.keys_to[1][kBlock * j]);
            RegTile<float, kBlock, kChannels> scaled = queries.template to<float>();
            scale_columns(scaled, decays.through[j], place);
            queries = scaled.template to<T>();
            scaled = keys.template to<float>();
            scaled.add(rest.template to<float>());
            scale_columns(scaled, decays.through[j], place);
            keys = scaled.template to<T>();
            rest = low_parts(scaled, keys);
          }
        }
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }

    LaneSums<kOwnPairs>::add(pairs, lane);
    for (int i = int(thread_index); i < kChunkRows * kChunk; i += kChunkThreads) {
      facts_to[i] = facts[i / kChunk][i % kChunk];
    }
    threadgroup float* const own_rows = matrix + own * kDecayStride;
    store_rows_of_square(own_rows, queries_below, query_eights, query_sixteen, pairs,
                         /*of_queries=*/true, block, lane, place);
    store_weights(own_rows, facts, own, weights + chunk.index * kSquare, place);
    store_rows_of_square(own_rows, keys_below, key_eights, key_sixteen, pairs,
                         /*of_queries=*/false, block, lane, place);
    store_inverse<true>(matrix, facts, own, products + chunk.index * kSquare,
                        inverse + chunk.index * kPlanes * kSquare, simdgroup, lane);
  }
}

// ---- kernels

#ifdef __MSLC__  // Apple's GPUs have matrix units for float32
MLX_ANVIL_KERNEL("gated_delta_chunk_prepare_channels_pairs_bfloat16_d64",
                 gated_delta_chunk_prepare_channels_pairs<bfloat, 64>)
MLX_ANVIL_KERNEL("gated_delta_chunk_prepare_channels_pairs_bfloat16_d128",
                 gated_delta_chunk_prepare_channels_pairs<bfloat, 128>)
#endif
