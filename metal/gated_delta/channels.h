// A decay per channel inside a chunk: blocks of 16 steps.
//
// The decay between steps i and j of one block is multiplied up. That between steps of blocks I > J
// is a product of three: from I's first step to i, through the blocks between, and from j + 1 to
// J's last step. None is divided, so that g may be 0.
//
// A thread has one of 32 channels in one of the chunk's four blocks, that of its SIMD group.
#pragma once

#include "metal/gated_delta/chunk.h"

enum { kBlocks = kChunk / kBlock };
enum { kChannelStride = TileRow<float, kChannels>::kStride };  // of a panel in threadgroup memory

// Numbers of a chunk in `rows`: ChunkRow and, per channel, the decay through the chunk.
METAL_FUNC long chunk_facts(constant GatedDeltaParams& params) {
  return kChunkRows * kChunk + (g_is_per_channel ? params.key_dim : 0);
}

// The steps of a thread's channel and block. Steps that do not count have q = k = 0 and g = 1.
struct ChannelBlock {
  float q[kBlock], k[kBlock], g[kBlock];

  template <typename T>
  METAL_FUNC void load(const device T* queries,
                       const device T* keys,
                       const device T* gates,
                       HeadPlace at,
                       constant GatedDeltaParams& params,
                       ChunkPlace chunk,
                       int first,
                       int channel) thread {
    const long t = chunk.first + first;
    const device T* q_at = queries + at.q + t * params.q_strides[1] + channel;
    const device T* k_at = keys + at.k + t * params.k_strides[1] + channel;
    long g_at = at.g + t * params.g_strides[1] + channel;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const bool counts = first + i < chunk.steps;
      q[i] = counts ? float(*q_at) : 0.0f;
      k[i] = counts ? float(*k_at) : 0.0f;
      g[i] = counts ? load_gate(gates, g_is_float32, g_at) : 1.0f;
      q_at += params.q_strides[1];
      k_at += params.k_strides[1];
      g_at += params.g_strides[1];
    }
  }

  // Decays from the block's first step to each, that step's included.
  METAL_FUNC void decays_from(thread float (&decays)[kBlock]) const thread {
    float decay = 1.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      decay *= g[i];
      decays[i] = decay;
    }
  }

  // Decays from each step to the block's last; its own is not included.
  METAL_FUNC void decays_to(thread float (&decays)[kBlock]) const thread {
    float decay = 1.0f;
    MLX_ANVIL_UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      decays[i] = decay;
      decay *= g[i];
    }
  }
};

// The decays through whole blocks, of each channel, in threadgroup memory.
struct alignas(16) BlockDecays {
  float through[kBlocks][kChannels];

  // The product over blocks [first, last).
  METAL_FUNC float between(int first, int last, int channel) const threadgroup {
    float decay = 1.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const float own = through[i][channel];
      decay *= first <= i && i < last ? own : 1.0f;
    }
    return decay;
  }
  // The same of two adjacent channels.
  METAL_FUNC float2 between_two(int first, int last, int channel) const threadgroup {
    return float2(between(first, last, channel), between(first, last, channel + 1));
  }
};
