// gated_delta by chunks with a decay per channel: the gradients of q, k and g (chunk.h,
// channels.h).
//
// Kernels: gated_delta_chunk_backward_decays_<dtype>, and _pairs_ for matrix units of 16 bits.
// Grid: x covers the panels of 32 channels of each chunk, y value heads, z batch rows and may be
// smaller than the batch. Threadgroup: 128 x 1 x 1; a thread has a channel of a block of 16 steps.
//
// Bindings: q, k, g, lengths, rows, squares, through, parts, dots, d_g, params
// Function constants: 3, 6 and 8 as in state.h. `squares`: d_P and B of
// chunk_backward_squares.metal. `through`: `dots` of chunk_backward_keys.metal. `parts` hold its W,
// Z and N, of which the gradients of q and k replace the first two. `dots`: gamma Z . k of each
// step and panel, for chunk_backward_gates.metal.
//
// With q and k scaled, all of one channel; a block has steps s to e, `from` and `to` are the decays
// from s to a step and from a step to e (channels.h):
//   T_q[m], T_k[m] = what step m reads from before s: of the state, W and -beta Z, and of the steps
//                    j < s, d_P[m][j] k[j] and B[m][j] k[j], with the decays up to s
//   T_o[j]         = what is read of step j after e: N, and d_P[m][j] q[m] + B[m][j] k[m]
//   d_q = from T_q, d_k = from T_k + to T_o, and products of the pairs of the block
//   d_g[i] = the decays but g[i], of all that is written before i and read at i or later: both in
//            the block (a), written before it (b), read after it (c), or both (d)
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_keys.h"

using Steps = RegTile<float, kBlock, kChannels>;  // of a block

// The chunk's steps, times the decay from their block's first step, or to its last. Then T_q, T_k
// and T_o.
struct alignas(16) DecayedPanel {
  float queries_from[kChunk][kChannelStride];
  float keys_from[kChunk][kChannelStride];
  float keys_to[kChunk][kChannelStride];
};

// What crosses a whole block, of each channel.
struct alignas(16) Crossing {
  float to_blocks[kBlocks][kBlocks][kChannels];  // the block, and the later one that reads
  float to_end[kBlocks][kChannels];              // from a block to the state after the chunk
};

METAL_FUNC Steps steps_of_tile(const threadgroup float* from, FragmentPlace place) {
  Steps steps;
  steps.load(from, kChannelStride, place);
  return steps;
}

// sums += the columns of a x b.
METAL_FUNC void add_columns(const thread Steps& a,
                            const thread Steps& b,
                            thread float2 (&sums)[kChannels / 8]) {
  MLX_ANVIL_UNROLL
  for (int n = 0; n < kChannels / 8; ++n) {
    sums[n] += elements_of(a.fragments[0][n]) * elements_of(b.fragments[0][n]) +
               elements_of(a.fragments[1][n]) * elements_of(b.fragments[1][n]);
  }
}

// Adds up what the lanes have of each column, and stores it.
METAL_FUNC void store_columns(thread float2 (&sums)[kChannels / 8],
                              threadgroup float* to,
                              FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int n = 0; n < kChannels / 8; ++n) {
    // Bits 1, 2 and 4 of a lane are its row (fragment_place).
    float2 sum = sums[n];
    sum += metal::simd_shuffle_xor(sum, ushort(2));
    sum += metal::simd_shuffle_xor(sum, ushort(4));
    sum += metal::simd_shuffle_xor(sum, ushort(16));
    if (place.row == 0) {
      *reinterpret_cast<threadgroup float2*>(to + 8 * n + place.column) = sum;
    }
  }
}

// sum += block x right, of 16 rows and columns of a square in device memory.
template <typename Weight>
METAL_FUNC void add_block(thread Steps& sum,
                          const device Weight* block,
                          const threadgroup float* right,
                          FragmentPlace place) {
  RegTile<float, kBlock, kBlock> left;
  read_rows(left, block, kChunk, place);
  sum.mma(left, SharedTile<float, kChannelStride>{right, place});
}

// The same with the block's transpose.
template <typename Weight>
METAL_FUNC void add_block_transposed(thread Steps& sum,
                                     const device Weight* block,
                                     const threadgroup float* right,
                                     FragmentPlace place) {
  RegTile<float, kBlock, kBlock> left;
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 4; ++f) {
    const device Weight* const at =
        block + (8 * (f % 2) + place.column) * kChunk + 8 * (f / 2) + place.row;
    left.fragments[f / 2][f % 2] = fragment_of<float>(float(at[0]), float(at[kChunk]));
  }
  sum.mma(left, SharedTile<float, kChannelStride>{right, place});
}

// The pairs of steps of one block: (a) above. `keys` and `gradients` are the thread's column of two
// tiles: registers cannot be indexed by j. The blocks of d_P and B are transposed.
METAL_FUNC void add_pairs(const thread ChannelBlock& steps,
                          const threadgroup float* d_weights,
                          const threadgroup float* d_keys,
                          threadgroup float* keys,
                          threadgroup float* gradients,
                          thread float (&d_q)[kBlock],
                          thread float (&d_k)[kBlock],
                          thread float (&d_g)[kBlock]) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    keys[i * kChannelStride] = steps.k[i];
  }
  MLX_ANVIL_NO_UNROLL
  for (int j = 0; j < kBlock; ++j) {
    float decayed[kBlock];  // k[j] at each step from j on; 0 before it
    float key = keys[j * kChannelStride];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      key *= i > j ? steps.g[i] : 1.0f;
      decayed[i] = i >= j ? key : 0.0f;
    }
    float gradient = 0.0f;  // of k[j] at each step from j on
    MLX_ANVIL_UNROLL
    for (int f = kBlock / 4 - 1; f >= 0; --f) {
      const float4 d_weight =
          *reinterpret_cast<const threadgroup float4*>(d_weights + j * kBlock + 4 * f);
      const float4 d_key =
          *reinterpret_cast<const threadgroup float4*>(d_keys + j * kBlock + 4 * f);
      MLX_ANVIL_UNROLL
      for (int e = 3; e >= 0; --e) {
        const int i = 4 * f + e;  // d_P and B are 0 above the diagonal
        d_q[i] += d_weight[e] * decayed[i];
        d_k[i] += d_key[e] * decayed[i];
        gradient += d_weight[e] * steps.q[i] + d_key[e] * steps.k[i];
        if (i > 0) {
          d_g[i] += gradient * decayed[i - 1];
        }
        gradient *= i > j ? steps.g[i] : 1.0f;
      }
    }
    gradients[j * kChannelStride] = gradient;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    d_k[i] += gradients[i * kChannelStride];
  }
}

// Stores the block on the diagonal of a square, transposed.
template <typename Weight>
METAL_FUNC void store_diagonal(threadgroup float* to, const device Weight* block, uint lane) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock * kBlock / 32; ++i) {
    const int at = 32 * i + int(lane);
    to[at % kBlock * kBlock + at / kBlock] = float(block[at / kBlock * kChunk + at % kBlock]);
  }
}

template <typename T, bool kPairs>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_backward_decays(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* g [[buffer(2)]],
    const device int* lengths [[buffer(3)]],
    const device float* rows [[buffer(4)]],
    const device typename ChunkNumbers<T, kPairs>::Weight* squares [[buffer(5)]],
    const device float* through [[buffer(6)]],
    device float* parts [[buffer(7)]],
    device float* dots [[buffer(8)]],
    device float* d_g [[buffer(9)]],
    constant GatedDeltaParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Weight = typename ChunkNumbers<T, kPairs>::Weight;
  enum { kSquare = kChunk * kChunk };
  threadgroup DecayedPanel panel;
  threadgroup BlockDecays decays;
  threadgroup Crossing crossing;
  const int key_dim = params.key_dim, panels = key_dim / kChannels;
  const int head = int(group.y), block = int(simdgroup), own = kBlock * block;
  const int channel = int(group.x) % panels * kChannels + int(lane);
  const FragmentPlace place = fragment_place(lane);
  const long stride = params.token_parts * chunk_part_size(params);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk =
        chunk_place(params, steps_of(params, lengths, batch), batch, head, int(group.x) / panels);
    const long token = long(batch) * params.length + chunk.first + own;
    const long gate_stride = long(params.value_heads) * key_dim;
    device float* const gates_to = d_g + (token * params.value_heads + head) * key_dim + channel;
    if (chunk.is_padding()) {  // of which the kernel of keys wrote zeros
      for (int i = 0; i < chunk.exists - own && i < kBlock; ++i) {
        gates_to[i * gate_stride] = 0.0f;
      }
      continue;
    }
    device float* const part = parts + chunk_part(params, token, head) + channel;
    const device Weight* const d_weights = squares + chunk.index * kChunkSquares * kSquare;
    const device Weight* const d_keys = d_weights + kKeysByKeys * kSquare;
    const device float* const facts = rows + chunk.index * chunk_facts(params) + own;
    const int count = metal::clamp(chunk.steps - own, 0, int(kBlock));  // of steps that count

    ChannelBlock steps;
    steps.load(q, k, g, at, params, chunk, own, channel);
    float from_first[kBlock], to_last[kBlock];
    steps.decays_from(from_first);
    steps.decays_to(to_last);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the batch row before
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      steps.q[i] *= facts[kQueryScale * kChunk + i];
      steps.k[i] *= facts[kKeyScale * kChunk + i];
      panel.queries_from[own + i][lane] = from_first[i] * steps.q[i];
      panel.keys_from[own + i][lane] = from_first[i] * steps.k[i];
      panel.keys_to[own + i][lane] = to_last[i] * steps.k[i];
    }
    decays.through[block][lane] = from_first[kBlock - 1];
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    // T_q and T_k, from the state on through one block after the other. What block j does not write
    // crosses it.
    const int first_channel = channel - int(lane);
    device float* const panel_of_part = part - int(lane);
    Steps of_queries, of_keys;
    read_rows(of_queries, panel_of_part, stride, place, count);
    read_rows(of_keys, panel_of_part + key_dim, stride, place, count);
    {
      Steps keys = steps_of_tile(panel.keys_from[own], place);
      for (int j = 0; j < block; ++j) {
        scale_columns(keys, decays.through[j], place);
      }
      float dot[2] = {};
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 2; ++i) {
        MLX_ANVIL_UNROLL
        for (int n = 0; n < kChannels / 8; ++n) {
          dot[i] +=
              metal::dot(elements_of(keys.fragments[i][n]), elements_of(of_keys.fragments[i][n]));
        }
        const float sum = row_sum(dot[i]);
        const int step = 8 * i + place.row;
        if (place.column == 0) {
          dots[(chunk.index * panels + first_channel / kChannels) * kChunk + own + step] = sum;
        }
        of_keys.scale_row(i, -facts[kRate * kChunk + step]);
      }
    }
    MLX_ANVIL_NO_UNROLL
    for (int j = 0; j < block; ++j) {
      float2 crosses[kChannels / 8] = {};
      add_columns(steps_of_tile(panel.queries_from[own], place), of_queries, crosses);
      add_columns(steps_of_tile(panel.keys_from[own], place), of_keys, crosses);
      store_columns(crosses, crossing.to_blocks[j][block], place);
      scale_columns(of_queries, decays.through[j], place);
      scale_columns(of_keys, decays.through[j], place);
      const int pairs = own * kChunk + kBlock * j;
      add_block(of_queries, d_weights + pairs, panel.keys_to[kBlock * j], place);
      add_block(of_keys, d_keys + pairs, panel.keys_to[kBlock * j], place);
    }

    // T_o, from the state after the chunk back.
    Steps of_later;
    read_rows(of_later, panel_of_part + 2 * key_dim, stride, place, count);
    {
      float2 to_end[kChannels / 8] = {};
      add_columns(steps_of_tile(panel.keys_to[own], place), of_later, to_end);
      store_columns(to_end, crossing.to_end[block], place);
    }
    MLX_ANVIL_NO_UNROLL
    for (int m = kBlocks - 1; m > block; --m) {
      scale_columns(of_later, decays.through[m], place);
      const int pairs = kBlock * m * kChunk + own;
      add_block_transposed(of_later, d_weights + pairs, panel.queries_from[kBlock * m], place);
      add_block_transposed(of_later, d_keys + pairs, panel.keys_from[kBlock * m], place);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // all have read the steps
    store_square<kChannelStride>(panel.queries_from[own], of_queries, place);
    store_square<kChannelStride>(panel.keys_from[own], of_keys, place);
    store_square<kChannelStride>(panel.keys_to[own], of_later, place);
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);

    // (b) and (c), and d_q and d_k from outside the block.
    float d_q[kBlock], d_k[kBlock], d_gate[kBlock];
    float read = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      d_q[i] = panel.queries_from[own + i][lane];
      d_k[i] = panel.keys_from[own + i][lane];
      read += steps.q[i] * d_q[i] + steps.k[i] * d_k[i];
      d_gate[i] = (i > 0 ? from_first[i - 1] : 1.0f) * read;
      read *= steps.g[i];
      d_q[i] *= from_first[i];
      d_k[i] *= from_first[i];
    }
    float written = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const float later = panel.keys_to[own + i][lane];
      d_gate[i] += to_last[i] * written;
      written = written * steps.g[i] + steps.k[i] * later;
      d_k[i] += to_last[i] * later;
    }

    // (d)
    float crosses =
        through[(chunk.index * (key_dim / kPanel) + channel / kPanel) * kChunkDots * kChunk +
                kThroughDot * kChunk + channel % kPanel];
    for (int j = 0; j < block; ++j) {
      crosses = crosses * decays.through[j][lane] + crossing.to_end[j][lane];
    }
    crosses *= decays.between(block + 1, kBlocks, int(lane));
    for (int m = block + 1; m < kBlocks; ++m) {
      crosses += crossing.to_blocks[block][m][lane] * decays.between(block + 1, m, int(lane));
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      d_gate[i] += (i > 0 ? from_first[i - 1] : 1.0f) * to_last[i] * crosses;
    }

    // The SIMD group's rows of the tiles are free now.
    threadgroup float* const diagonals = panel.queries_from[own];
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    store_diagonal(diagonals, d_weights + own * (kChunk + 1), lane);
    store_diagonal(diagonals + kBlock * kBlock, d_keys + own * (kChunk + 1), lane);
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    add_pairs(steps, diagonals, diagonals + kBlock * kBlock, &panel.keys_from[own][lane],
              &panel.keys_to[own][lane], d_q, d_k, d_gate);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      if (i < count) {
        part[i * stride] = d_q[i];
        part[i * stride + key_dim] = d_k[i];
      }
      if (own + i < chunk.exists) {
        gates_to[i * gate_stride] = i < count ? d_gate[i] : 0.0f;
      }
    }
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gated_delta_chunk_backward_decays_float32",
                 gated_delta_chunk_backward_decays<float, false>)
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_decays_float16",
                 gated_delta_chunk_backward_decays<half, false>)
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_decays_bfloat16",
                 gated_delta_chunk_backward_decays<bfloat, false>)
#ifdef __MSLC__  // Apple's GPUs have matrix units for float32
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_decays_pairs_bfloat16",
                 gated_delta_chunk_backward_decays<bfloat, true>)
#endif
