// gated_delta by chunks with a decay per channel: what a chunk needs that does not depend on the
// state (chunk.h, channels.h).
//
// Kernels: gated_delta_chunk_prepare_channels_<dtype>_d<key dim>, and _pairs_ for matrix units of
// 16 bits. Grid: x covers chunks, y value heads, z batch rows and may be smaller than the batch.
// Threadgroup: 128 x 1 x 1; a SIMD group has a block of 16 steps.
//
// Bindings: q, k, g, beta, lengths, inverse, weights, rows, products, decayed, params
// Function constants: 3, 5 to 8 as in state.h; 15: keeps `products`, for gradients.
// `inverse` and `weights` are as in chunk_prepare.metal; `rows` are ChunkRow, with decays of 1, and
// the decay of each channel through the chunk. `decayed`: 64 rows of each ChunkOperand of a chunk,
// as one plane of float32 or as high and low parts; not normalised. `products`: k[i] . k[j] with
// the decays inside, below the diagonal.
//
//   for each panel of 32 channels:
//     blocks on the diagonal: a lane has step j and half of the channels, and multiplies G[.][j] up
//     blocks below: products of matrices, of steps with the decay from their block's first step,
//     and steps with the decay to their block's last
//   multiply by the scales of q and k; (I + A)^-1 (inverse.h)
#include "metal/common/kernel.h"
#include "metal/gated_delta/channels.h"
#include "metal/gated_delta/chunk_tiles.h"
#include "metal/gated_delta/inverse.h"

using BlockSums = RegTile<float, kBlock, kBlock>;

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
  float factors[kBlock];
  steps.decays_to(factors);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    panel.gates[first + i][channel] = factors[i] * steps.k[i];
  }
  steps.decays_from(factors);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    panel.keys[first + i][channel] = factors[i] * steps.k[i];
    panel.queries[first + i][channel] *= factors[i];
  }
  decays.through[block][channel] = factors[kBlock - 1];
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

// Stores a number as the planes of a matrix.
template <int kPlanes, typename Weight>
METAL_FUNC void store_parts(device Weight* to, long plane, float x) {
  to[0] = Weight(x);
  if (kPlanes == 2) {
    to[plane] = Weight(x - float(Weight(x)));
  }
}

template <typename T, bool kPairs, int kKeyDim>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void
gated_delta_chunk_prepare_channels(const device T* q [[buffer(0)]],
                                   const device T* k [[buffer(1)]],
                                   const device T* g [[buffer(2)]],
                                   const device T* beta [[buffer(3)]],
                                   const device int* lengths [[buffer(4)]],
                                   device typename ChunkNumbers<T, kPairs>::Weight* inverse
                                   [[buffer(5)]],
                                   device typename ChunkNumbers<T, kPairs>::Weight* weights
                                   [[buffer(6)]],
                                   device float* rows [[buffer(7)]],
                                   device typename ChunkNumbers<T, kPairs>::Weight* products
                                   [[buffer(8)]],
                                   device typename ChunkNumbers<T, kPairs>::Weight* decayed
                                   [[buffer(9)]],
                                   constant GatedDeltaParams& params [[buffer(10)]],
                                   uint3 group [[threadgroup_position_in_grid]],
                                   uint3 groups [[threadgroups_per_grid]],
                                   uint thread_index [[thread_index_in_threadgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  using Numbers = ChunkNumbers<T, kPairs>;
  using Weight = typename Numbers::Weight;
  enum { kPlanes = Numbers::kPlanes, kSquare = kChunk * kChunk, kRows = kChunk * kKeyDim };
  threadgroup ChannelPanel panel;
  threadgroup BlockDecays decays;
  alignas(16) threadgroup float facts[kChunkRows][kChunk];
  threadgroup float* const matrix = &panel.queries[0][0];  // after the last panel
  const FragmentPlace place = fragment_place(lane);
  const int head = int(group.y), block = int(simdgroup), own = kBlock * block;
  const int step = own + int(lane) % kBlock;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk =
        chunk_place(params, steps_of(params, lengths, batch), batch, head, int(group.x));
    if (chunk.is_padding()) {
      continue;
    }
    device float* const facts_to = rows + chunk.index * chunk_facts(params);
    device Weight* const decayed_to =
        decayed + chunk.index * kChunkOperands * kPlanes * kRows + own * kKeyDim + lane;
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
        device Weight* const row = decayed_to + i * kKeyDim + first;
        store_parts<kPlanes>(row + kQueriesFrom * kPlanes * kRows, kRows,
                             before * panel.queries[own + i][lane]);
        store_parts<kPlanes>(row + kKeysFrom * kPlanes * kRows, kRows,
                             before * panel.keys[own + i][lane]);
        store_parts<kPlanes>(row + kKeysTo * kPlanes * kRows, kRows,
                             after * panel.gates[own + i][lane]);
      }
      if (block == 0) {
        facts_to[kChunkRows * kChunk + first + int(lane)] = decays.between(0, kBlocks, int(lane));
      }
      add_below(panel, decays, block, place, of_queries, of_keys);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }

    const bool counts = step < chunk.steps;
    const float root = metal::precise::rsqrt(squares + params.eps);
    if (lane < kBlock) {
      facts[kQueryScale][step] = normalizes && counts ? params.q_scale * root : 1.0f;
      facts[kRate][step] = counts
                               ? load_gate(beta, beta_is_float32,
                                           at.beta + (chunk.first + step) * params.beta_strides[1])
                               : 0.0f;
      facts[kGate][step] = 1.0f;
    } else {
      facts[kKeyScale][step] = normalizes && counts ? root : 1.0f;
      facts[kDecayBefore][step] = 1.0f;
      facts[kDecayAfter][step] = 1.0f;
      facts[kSkip][step] = 0.0f;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      own_queries[i] += metal::simd_shuffle_xor(own_queries[i], ushort(kBlock));
      own_keys[i] += metal::simd_shuffle_xor(own_keys[i], ushort(kBlock));
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = int(thread_index); i < kChunkRows * kChunk; i += kChunkThreads) {
      facts_to[i] = facts[i / kChunk][i % kChunk];
    }

    RegTile<float, kBlock, kChunk> square;
    threadgroup float* const own_rows = matrix + own * kDecayStride;
    store_blocks(own_rows, of_queries, own_queries, block, lane, place);
    square.load(own_rows, kDecayStride, place);
    scale_rows(square, facts[kQueryScale] + own, place);
    scale_columns(square, facts[kKeyScale], place);
    store_planes<1>(square, weights + chunk.index * kSquare, own, place);
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);

    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      own_keys[i] = i > int(lane) ? own_keys[i] : 0.0f;
    }
    store_blocks(own_rows, of_keys, own_keys, block, lane, place);
    square.load(own_rows, kDecayStride, place);
    scale_rows(square, facts[kKeyScale] + own, place);
    scale_columns(square, facts[kKeyScale], place);
    if (keeps_products) {
      store_planes<1>(square, products + chunk.index * kSquare, own, place);
    }
    scale_rows(square, facts[kRate] + own, place);
    store_square(own_rows, square, place);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    invert(matrix, simdgroup, lane);
    square.load(own_rows, kDecayStride, place);
    store_planes<kPlanes>(square, inverse + chunk.index * kPlanes * kSquare, own, place);
  }
}

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                                 \
  MLX_ANVIL_KERNEL("gated_delta_chunk_prepare_channels_" variant #dtype "_d" #dim, \
                   gated_delta_chunk_prepare_channels<T, pairs, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)
