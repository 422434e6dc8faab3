// gated_delta by chunks with a decay per channel: the gradients of q, k and g (chunk.h,
// channels.h).
//
// Kernels: gated_delta_chunk_backward_decays_<dtype>.
// Grid: x covers the panels of 32 channels of each chunk, y value heads, z batch rows and may be
// smaller than the batch. Threadgroup: 128 x 1 x 1; a thread has a channel of a block of 16 steps.
//
// Bindings: q, k, g, lengths, rows, squares, through, parts, dots, params
// Function constants: 3, 6 and 8 as in state.h. `squares`: d_P and B of
// chunk_backward_squares.metal. `through`: `dots` of chunk_backward_keys.metal. `parts` hold its W,
// Z and N, which the gradients of q, k and g replace. `dots`: gamma Z . k of each step and panel,
// for chunk_backward_gates.metal.
//
// With q and k scaled, all of one channel; a block has steps s to e, `from` and `to` are the decays
// from s to a step and from a step to e (channels.h):
//   T_q[m], T_k[m] = what step m reads from before s: of the state, W and -beta Z, and of the steps
//                    j < s, d_P[m][j] k[j] and B[m][j] k[j], with the decays up to s
//   T_o[j]         = what is read of step j after e: N, and d_P[m][j] q[m] + B[m][j] k[m]
//   d_q = from T_q, d_k = from T_k + to T_o, and products of the pairs of the block
//   d_g[i] = the decays but g[i], of all that is written before i and read at i or later: written
//   and
//            read in the block (a), before and in it (b), in and after it (c), before and after (d)
#include "metal/common/kernel.h"
#include "metal/gated_delta/channels.h"
#include "metal/gated_delta/parts.h"

// The chunk's steps, times the decay from their block's first step, or to its last.
struct alignas(16) DecayedPanel {
  float queries_from[kChunk][kChannels];
  float keys_from[kChunk][kChannels];
  float keys_to[kChunk][kChannels];
};

// What crosses a whole block, of each channel.
struct alignas(16) Crossing {
  float to_blocks[kBlocks][kBlocks][kChannels];  // the block, and the later one that reads
  float to_end[kBlocks][kChannels];              // from a block to the state after the chunk
};

// sum[i] += x times 16 adjacent numbers, the same in all lanes.
METAL_FUNC void add_multiple(thread float (&sum)[kBlock], float x, const device float* numbers) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; i += 4) {
    const float4 four = *reinterpret_cast<const device float4*>(numbers + i);
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 4; ++e) {
      sum[i + e] += x * four[e];
    }
  }
}

METAL_FUNC float dot_of_row(thread float (&x)[kBlock], const device float* numbers) {
  float sum = 0.0f;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; i += 4) {
    sum += metal::dot(float4(x[i], x[i + 1], x[i + 2], x[i + 3]),
                      *reinterpret_cast<const device float4*>(numbers + i));
  }
  return sum;
}

METAL_FUNC void scale_all(thread float (&x)[kBlock], float factor) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    x[i] *= factor;
  }
}

// The pairs of steps of one block: (a) above. `keys` and `gradients` are the thread's column of two
// tiles, whose rows are kChannels apart: registers cannot be indexed by j.
METAL_FUNC void add_pairs(const thread ChannelBlock& steps,
                          const device float* d_weights,
                          const device float* d_keys,
                          threadgroup float* keys,
                          threadgroup float* gradients,
                          thread float (&d_q)[kBlock],
                          thread float (&d_k)[kBlock],
                          thread float (&d_g)[kBlock]) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    keys[i * kChannels] = steps.k[i];
  }
  MLX_ANVIL_NO_UNROLL
  for (int j = 0; j < kBlock; ++j) {
    float decayed[kBlock];  // k[j] at each step from j on
    float key = keys[j * kChannels];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      key *= i > j ? steps.g[i] : 1.0f;
      decayed[i] = key;
    }
    float gradient = 0.0f;  // of k[j] at each step from j on
    MLX_ANVIL_UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      if (i >= j) {
        const float d_weight = d_weights[i * kChunk + j], d_key = d_keys[i * kChunk + j];
        d_q[i] += d_weight * decayed[i];
        d_k[i] += d_key * decayed[i];
        gradient += d_weight * steps.q[i] + d_key * steps.k[i];
      }
      if (i > j) {
        d_g[i] += gradient * decayed[i > 0 ? i - 1 : 0];
        gradient *= steps.g[i];
      }
    }
    gradients[j * kChannels] = gradient;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    d_k[i] += gradients[i * kChannels];
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kChunkThreads)]] void gated_delta_chunk_backward_decays(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* g [[buffer(2)]],
    const device int* lengths [[buffer(3)]],
    const device float* rows [[buffer(4)]],
    const device float* squares [[buffer(5)]],
    const device float* through [[buffer(6)]],
    device float* parts [[buffer(7)]],
    device float* dots [[buffer(8)]],
    constant GatedDeltaParams& params [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kSquare = kChunk * kChunk };
  threadgroup DecayedPanel panel;
  threadgroup BlockDecays decays;
  threadgroup Crossing crossing;
  const int key_dim = params.key_dim, panels = key_dim / kChannels;
  const int head = int(group.y), block = int(simdgroup), own = kBlock * block;
  const int channel = int(group.x) % panels * kChannels + int(lane);
  const long part_size = delta_part_size(3, key_dim);
  const long stride = params.value_heads * part_size;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace at = place_of(params, batch, head);
    const ChunkPlace chunk =
        chunk_place(params, steps_of(params, lengths, batch), batch, head, int(group.x) / panels);
    if (chunk.is_padding()) {
      continue;  // chunk_backward_keys.metal wrote zeros
    }
    const long token = long(batch) * params.length + chunk.first + own;
    device float* const part = parts + (token * params.value_heads + head) * part_size + channel;
    const device float* const d_weights = squares + chunk.index * 2 * kSquare;
    const device float* const d_keys = d_weights + kSquare;
    const device float* const facts = rows + chunk.index * chunk_facts(params) + own;
    const int count = metal::clamp(chunk.steps - own, 0, int(kBlock));  // of steps that count

    ChannelBlock steps;
    steps.load(q, k, g, at, params, chunk, own, channel);
    float from[kBlock], to[kBlock];
    steps.decays_from(from);
    steps.decays_to(to);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the batch row before
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      steps.q[i] *= facts[kQueryScale * kChunk + i];
      steps.k[i] *= facts[kKeyScale * kChunk + i];
      panel.queries_from[own + i][lane] = from[i] * steps.q[i];
      panel.keys_from[own + i][lane] = from[i] * steps.k[i];
      panel.keys_to[own + i][lane] = to[i] * steps.k[i];
    }
    decays.through[block][lane] = from[kBlock - 1];
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    // T_q and T_k, from the state on through one block after the other. What block `j` does not
    // write crosses it.
    float d_q[kBlock], d_k[kBlock];
    const float before = decays.between(0, block, int(lane));
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const float z = i < count ? part[i * stride + key_dim] : 0.0f;
      d_q[i] = i < count ? part[i * stride] : 0.0f;
      d_k[i] = -facts[kRate * kChunk + i] * z;
      const float dot = metal::simd_sum(before * from[i] * steps.k[i] * z);
      if (lane == 0) {
        dots[(chunk.index * panels + channel / kChannels) * kChunk + own + i] = dot;
      }
    }
    MLX_ANVIL_NO_UNROLL
    for (int j = 0; j < block; ++j) {
      float crosses = 0.0f;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        crosses += from[i] * (steps.q[i] * d_q[i] + steps.k[i] * d_k[i]);
      }
      crossing.to_blocks[j][block][lane] = crosses * decays.between(j + 1, block, int(lane));
      const float decay = decays.through[j][lane];
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        float of_query = 0.0f, of_key = 0.0f;
        MLX_ANVIL_NO_UNROLL
        for (int l = kBlock * j; l < kBlock * (j + 1); l += 4) {
          const float4 keys = float4(panel.keys_to[l][lane], panel.keys_to[l + 1][lane],
                                     panel.keys_to[l + 2][lane], panel.keys_to[l + 3][lane]);
          const int pair = (own + i) * kChunk + l;
          of_query += metal::dot(*reinterpret_cast<const device float4*>(d_weights + pair), keys);
          of_key += metal::dot(*reinterpret_cast<const device float4*>(d_keys + pair), keys);
        }
        d_q[i] = d_q[i] * decay + of_query;
        d_k[i] = d_k[i] * decay + of_key;
      }
    }
    // (b), and d_q and d_k from before the block.
    float d_g[kBlock];
    float read = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      read += steps.q[i] * d_q[i] + steps.k[i] * d_k[i];
      d_g[i] = (i > 0 ? from[i - 1] : 1.0f) * read;
      read *= steps.g[i];
      d_q[i] *= from[i];
      d_k[i] *= from[i];
    }

    // T_o, from the state after the chunk back.
    float of_later[kBlock];
    float to_end = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      of_later[i] = i < count ? part[i * stride + 2 * key_dim] : 0.0f;
      to_end += to[i] * steps.k[i] * of_later[i];
    }
    crossing.to_end[block][lane] = to_end;
    MLX_ANVIL_NO_UNROLL
    for (int m = kBlocks - 1; m > block; --m) {
      scale_all(of_later, decays.through[m][lane]);
      MLX_ANVIL_NO_UNROLL
      for (int l = kBlock * m; l < kBlock * (m + 1); ++l) {
        add_multiple(of_later, panel.queries_from[l][lane], d_weights + l * kChunk + own);
        add_multiple(of_later, panel.keys_from[l][lane], d_keys + l * kChunk + own);
      }
    }
    // (c), and d_k from after the block.
    float written = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      d_g[i] += to[i] * written;
      written = written * steps.g[i] + steps.k[i] * of_later[i];
      d_k[i] += to[i] * of_later[i];
    }

    // (d)
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    float crosses =
        through[(chunk.index * (key_dim / kPanel) + channel / kPanel) * kChunkDots * kChunk +
                kThroughDot * kChunk + channel % kPanel];
    for (int j = 0; j < block; ++j) {
      crosses = crosses * decays.through[j][lane] + crossing.to_end[j][lane];
    }
    crosses *= decays.between(block + 1, kBlocks, int(lane));
    for (int m = block + 1; m < kBlocks; ++m) {
      crosses += crossing.to_blocks[block][m][lane];
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      d_g[i] += (i > 0 ? from[i - 1] : 1.0f) * to[i] * crosses;
    }

    // No other thread reads the tiles any more.
    add_pairs(steps, d_weights + own * (kChunk + 1), d_keys + own * (kChunk + 1),
              &panel.keys_from[own][lane], &panel.keys_to[own][lane], d_q, d_k, d_g);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      if (i < count) {
        part[i * stride] = d_q[i];
        part[i * stride + key_dim] = d_k[i];
        part[i * stride + 2 * key_dim] = d_g[i];
      }
    }
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gated_delta_chunk_backward_decays_float32",
                 gated_delta_chunk_backward_decays<float>)
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_decays_float16",
                 gated_delta_chunk_backward_decays<half>)
MLX_ANVIL_KERNEL("gated_delta_chunk_backward_decays_bfloat16",
                 gated_delta_chunk_backward_decays<bfloat>)
