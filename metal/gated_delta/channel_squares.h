// With a decay per channel: from sums over channels to the squares of a chunk (chunk.h). What the
// kernels share that prepare chunks.
#pragma once

#include "metal/gated_delta/channels.h"
#include "metal/gated_delta/chunk_tiles.h"
#include "metal/gated_delta/inverse.h"

using BlockSums = RegTile<float, kBlock, kBlock>;

// The numbers of a step, but its decays, which are 1. `squares`: the sum over its q, or, for the
// second half of the lanes, over its k. 16 lanes have all steps of a block.
template <typename T>
METAL_FUNC void store_facts(threadgroup float (&facts)[kChunkRows][kChunk],
                            constant GatedDeltaParams& params,
                            const device T* beta,
                            HeadPlace at,
                            ChunkPlace chunk,
                            int step,
                            uint lane,
                            float squares) {
  const bool counts = step < chunk.steps;
  const float root = metal::precise::rsqrt(squares + params.eps);
  if (lane < kBlock) {
    facts[kQueryScale][step] = normalizes && counts ? params.q_scale * root : 1.0f;
    facts[kRate][step] = counts ? load_gate(beta, beta_is_float32,
                                            at.beta + (chunk.first + step) * params.beta_strides[1])
                                : 0.0f;
    facts[kGate][step] = 1.0f;
  } else {
    facts[kKeyScale][step] = normalizes && counts ? root : 1.0f;
    facts[kDecayBefore][step] = 1.0f;
    facts[kDecayAfter][step] = 1.0f;
    facts[kSkip][step] = 0.0f;
  }
}

// P, from a SIMD group's rows of the sums over q and k.
template <typename Weight>
METAL_FUNC void store_weights(const threadgroup float* own_rows,
                              const threadgroup float (&facts)[kChunkRows][kChunk],
                              int own,
                              device Weight* to,
                              FragmentPlace place) {
  RegTile<float, kBlock, kChunk> square;
  square.load(own_rows, kDecayStride, place);
  scale_rows(square, facts[kQueryScale] + own, place);
  scale_columns(square, facts[kKeyScale], place);
  store_planes<1>(square, to, own, place);
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// (I + A)^-1, from the sums over k and k below the diagonal. All threads call it.
template <bool kPairs, typename Weight>
METAL_FUNC void store_inverse(threadgroup float* matrix,
                              const threadgroup float (&facts)[kChunkRows][kChunk],
                              int own,
                              device Weight* products,
                              device Weight* inverse,
                              uint simdgroup,
                              uint lane) {
  const FragmentPlace place = fragment_place(lane);
  threadgroup float* const own_rows = matrix + own * kDecayStride;
  RegTile<float, kBlock, kChunk> square;
  square.load(own_rows, kDecayStride, place);
  scale_rows(square, facts[kKeyScale] + own, place);
  scale_columns(square, facts[kKeyScale], place);
  if (keeps_products) {
    store_planes<1>(square, products, own, place);
  }
  scale_rows(square, facts[kRate] + own, place);
  store_square(own_rows, square, place);
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  invert<Weight, kPairs>(matrix, simdgroup, lane);
  square.load(own_rows, kDecayStride, place);
  store_planes<kPairs ? 2 : 1>(square, inverse, own, place);
}
