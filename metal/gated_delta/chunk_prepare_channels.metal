// gated_delta by chunks with a decay per channel: what a chunk needs that does not depend on the
// state (chunk.h, channels.h).
//
// Kernels: gated_delta_chunk_prepare_channels_<dtype>_d<key dim>; those for matrix units of 16 bits
// are in chunk_prepare_channels_pairs.metal.
// Grid: x covers chunks from first_chunk on, y value heads, z batch rows and may be smaller than
// the batch. Threadgroup: 128 x 1 x 1; a SIMD group has a block of 16 steps.
//
// Bindings: q, k, g, beta, lengths, inverse, weights, rows, products, decayed, params
// Function constants: 3, 5 to 8 as in state.h; 15: keeps `products`, for gradients.
// `inverse` and `weights` are as in chunk_prepare.metal; `rows` are ChunkRow, with decays of 1, and
// the decay of each channel through the chunk. `decayed`: 64 rows of each ChunkOperand of a chunk;
// not normalised. `products`: k[i] . k[j] with the decays inside, below the diagonal.
//
//   for each panel of 32 channels:
//     blocks on the diagonal: a lane has step j and half of the channels, and multiplies G[.][j] up
//     blocks below: products of matrices, of steps with the decay from their block's first step,
//     and steps with the decay to their block's last
//   multiply by the scales of q and k; (I + A)^-1 (inverse.h)
#include "metal/common/kernel.h"
#include "metal/gated_delta/channel_squares.h"

// A panel of the chunk in threadgroup memory.
struct alignas(16) ChannelPanel {
  float queries[kChunk][kChannelStride];
  float keys[kChunk][kChannelStride];
  float gates[kChunk][kChannelStride];
};

// Adds the products of steps [j, 16) of a block with step j, over 16 channels. What it adds for
// steps before j means nothing.
METAL_FUNC void add_diagonal(const threadgroup ChannelPanel& panel,
                             int first,
                             int j,
                             int channel,
                             thread float (&of_queries)[kBlock],
                             thread float (&of_keys)[kBlock]) {
  MLX_ANVIL_NO_UNROLL
  for (int c = channel; c < channel + kChannels / 2; c += 4) {
    float4 key = *reinterpret_cast<const threadgroup float4*>(&panel.keys[first + j][c]);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      if (i % 4 == 0) {  // loads stay near their use, or they take all registers
        metal::simdgroup_barrier(metal::mem_flags::mem_none);
      }
      const float4 gate = *reinterpret_cast<const threadgroup float4*>(&panel.gates[first + i][c]);
      key *= i > j ? gate : float4(1.0f);
      of_queries[i] += metal::dot(
          *reinterpret_cast<const threadgroup float4*>(&panel.queries[first + i][c]), key);
      of_keys[i] +=
          metal::dot(*reinterpret_cast<const threadgroup float4*>(&panel.keys[first + i][c]), key);
    }
  }
}

METAL_FUNC float squares_of(const threadgroup float* row) {
  float sum = 0.0f;
  MLX_ANVIL_UNROLL
  for (int c = 0; c < kChannels; c += 4) {
    const float4 four = *reinterpret_cast<const threadgroup float4*>(row + c);
    sum += metal::dot(four, four);
  }
  return sum;
}

// Multiplies a channel of a block's steps by their decays: q and k from the block's first step, and
// in the place of the gates k to the block's last step.
METAL_FUNC void apply_decays(threadgroup ChannelPanel& panel,
                             threadgroup BlockDecays& decays,
                             int block,
                             int channel) {
  const int first = kBlock * block;
  ChannelBlock steps;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    steps.k[i] = panel.keys[first + i][channel];
    steps.g[i] = panel.gates[first + i][channel];
  }
  float own_decays[kBlock];
  steps.decays_to(own_decays);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    panel.gates[first + i][channel] = own_decays[i] * steps.k[i];
  }
  steps.decays_from(own_decays);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    panel.keys[first + i][channel] = own_decays[i] * steps.k[i];
    panel.queries[first + i][channel] *= own_decays[i];
  }
  decays.through[block][channel] = own_decays[kBlock - 1];
}

// Adds the products of a block's queries and keys with the keys of all blocks before it.
METAL_FUNC void add_below(const threadgroup ChannelPanel& panel,
                          const threadgroup BlockDecays& decays,
                          int block,
                          FragmentPlace place,
                          thread BlockSums (&of_queries)[kBlocks - 1],
                          thread BlockSums (&of_keys)[kBlocks - 1]) {
  RegTile<float, kBlock, kChannels> queries, keys;
  queries.load(panel.queries[kBlock * block], kChannelStride, place);
  keys.load(panel.keys[kBlock * block], kChannelStride, place);
  MLX_ANVIL_UNROLL
  for (int j = kBlocks - 2; j >= 0; --j) {
    if (j < block) {
      // The keys with the decay to their block's end are in the place of the gates.
      const TransposedTile<float, kChannelStride> right = {panel.gates[kBlock * j], place};
      of_queries[j].mma(queries, right);
      of_keys[j].mma(keys, right);
      scale_columns(queries, decays.through[j], place);
      scale_columns(keys, decays.through[j], place);
    }
  }
}

// Stores a SIMD group's rows of a square, zeros right of the diagonal.
METAL_FUNC void store_blocks(threadgroup float* rows,
                             thread BlockSums (&below)[kBlocks - 1],
                             thread float (&diagonal)[kBlock],
                             int block,
                             uint lane,
                             FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int j = 0; j < kBlocks - 1; ++j) {
    // Blocks right of that on the diagonal are zeros, one place further.
    store_square(rows + kBlock * (j < block ? j : j + 1), below[j], place);
  }
  if (lane < kBlock) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      rows[i * kDecayStride + kBlock * block + int(lane)] = i >= int(lane) ? diagonal[i] : 0.0f;
    }
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
}

template <typename T, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void
gated_delta_chunk_prepare_channels(const device T* q [[buffer(0)]],
                                   const device T* k [[buffer(1)]],
                                   const device T* g [[buffer(2)]],
                                   const device T* beta [[buffer(3)]],
                                   const device int* lengths [[buffer(4)]],
                                   device float* inverse [[buffer(5)]],
                                   device float* weights [[buffer(6)]],
                                   device float* rows [[buffer(7)]],
                                   device float* products [[buffer(8)]],
                                   device float* decayed [[buffer(9)]],
                                   constant GatedDeltaParams& params [[buffer(10)]],
                                   uint3 group [[threadgroup_position_in_grid]],
                                   uint3 groups [[threadgroups_per_grid]],
                                   uint thread_index [[thread_index_in_threadgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  enum { kSquare = kChunk * kChunk, kRows = kChunk * kKeyDim };
  threadgroup ChannelPanel panel;
  threadgroup BlockDecays decays;
  alignas(16) threadgroup float facts[kChunkRows][kChunk];
  threadgroup float* const matrix = &panel.queries[0][0];  // after the last panel
  const FragmentPlace place = fragment_place(lane);
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
    device float* const decayed_to =
        decayed + chunk.index * kChunkOperands * kRows + own * kKeyDim + lane;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the batch row before

    BlockSums of_queries[kBlocks - 1], of_keys[kBlocks - 1];
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kBlocks - 1; ++j) {
      of_queries[j].zero();
      of_keys[j].zero();
    }
    float own_queries[kBlock] = {}, own_keys[kBlock] = {};  // of the diagonal
    float squares = 0.0f;  // of a step's q, or k in the second half of the lanes
    MLX_ANVIL_NO_UNROLL
    for (int first = 0; first < kKeyDim; first += kChannels) {
      {
        ChannelBlock steps;
        steps.load(q, k, g, at, params, chunk, own, first + int(lane));
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kBlock; ++i) {
          panel.queries[own + i][lane] = steps.q[i];
          panel.keys[own + i][lane] = steps.k[i];
          panel.gates[own + i][lane] = steps.g[i];
        }
      }
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      add_diagonal(panel, own, int(lane) % kBlock, int(lane) / kBlock * (kChannels / 2),
                   own_queries, own_keys);
      squares += lane < kBlock ? squares_of(panel.queries[step]) : squares_of(panel.keys[step]);
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      apply_decays(panel, decays, block, int(lane));
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);

      const float before = decays.between(0, block, int(lane));
      const float after = decays.between(block + 1, kBlocks, int(lane));
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        device float* const row = decayed_to + i * kKeyDim + first;
        row[kQueriesFrom * kRows] = before * panel.queries[own + i][lane];
        row[kKeysFrom * kRows] = before * panel.keys[own + i][lane];
        row[kKeysTo * kRows] = after * panel.gates[own + i][lane];
      }
      if (block == 0) {
        facts_to[kChunkRows * kChunk + first + int(lane)] = decays.between(0, kBlocks, int(lane));
      }
      add_below(panel, decays, block, place, of_queries, of_keys);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }

    store_facts(facts, params, beta, at, chunk, step, lane, squares);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      own_queries[i] += metal::simd_shuffle_xor(own_queries[i], ushort(kBlock));
      own_keys[i] += metal::simd_shuffle_xor(own_keys[i], ushort(kBlock));
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = int(thread_index); i < kChunkRows * kChunk; i += kChunkThreads) {
      facts_to[i] = facts[i / kChunk][i % kChunk];
    }

    threadgroup float* const own_rows = matrix + own * kDecayStride;
    store_blocks(own_rows, of_queries, own_queries, block, lane, place);
    store_weights(own_rows, facts, own, weights + chunk.index * kSquare, place);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      own_keys[i] = i > int(lane) ? own_keys[i] : 0.0f;
    }
    store_blocks(own_rows, of_keys, own_keys, block, lane, place);
    store_inverse<false>(matrix, facts, own, products + chunk.index * kSquare,
                         inverse + chunk.index * kSquare, simdgroup, lane);
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T, dim)                                         \
  MLX_ANVIL_KERNEL("gated_delta_chunk_prepare_channels_" #dtype "_d" #dim, \
                   gated_delta_chunk_prepare_channels<T, dim>)

INSTANTIATE(float32, float, 64)
INSTANTIATE(float16, half, 64)
INSTANTIATE(bfloat16, bfloat, 64)
INSTANTIATE(float32, float, 128)
INSTANTIATE(float16, half, 128)
INSTANTIATE(bfloat16, bfloat, 128)
