// What the attention backward's kernels share that multiply for four SIMD groups at once
// (metal/common/group_product.h): the tiles of passing rows, and P and dS of a pair.
#pragma once

#include "metal/common/group_product.h"
#include "metal/flash_attention/ragged.h"

// Tiles of two operands in threadgroup memory. Two are copied while one is multiplied; the last
// products of the one before may still run, so there are four places.
template <typename T, int kTileRows, int kFirstColumns, int kSecondColumns, int kThreads>
struct PassingTiles {
  using First = SwizzledTile<T, kTileRows, kFirstColumns>;
  using Second = SwizzledTile<T, kTileRows, kSecondColumns>;
  enum { kPlaces = 4, kSize = First::kSize + Second::kSize };

  threadgroup T* memory;
  uint thread_index;
  int place;       // of the tile to multiply
  int next_place;  // of the tile to copy

  METAL_FUNC void begin(threadgroup T* at, uint index) thread {
    memory = at;
    thread_index = index;
    place = kPlaces - 1;
    next_place = 0;
  }

  METAL_FUNC threadgroup T* end() const thread { return memory + kPlaces * kSize; }
  METAL_FUNC const threadgroup T* first() const thread { return memory + place * kSize; }
  METAL_FUNC const threadgroup T* second() const thread { return first() + First::kSize; }

  // Call with all threads. Afterwards they see the next tile.
  METAL_FUNC void wait() thread {
    wait_for_tiles<1>();
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    place = (place + 1) % kPlaces;
  }

  // Starts to copy a tile. Call with all threads, twice before the first wait() and then once after
  // each, when the products of the tile before the last have been waited for. No branch.
  METAL_FUNC void copy(Rows<T> next_first, Rows<T> next_second) thread {
    threadgroup T* to = memory + next_place * kSize;
    First::template start_copies<kThreads>(to, next_first, thread_index);
    Second::template start_copies<kThreads>(to + First::kSize, next_second, thread_index);
    end_copies();
    next_place = (next_place + 1) % kPlaces;
  }
};

// What is subtracted from a score in P = 2^(S - lse), negated: -inf for a query that does not exist
// or sees nothing.
METAL_FUNC float negated_lse(float natural, bool exists) {
  return exists && natural != -INFINITY ? natural * -M_LOG2E_F : -INFINITY;
}

// P of the product q . k, without softcap.
METAL_FUNC float weight_of(float product, float score_scale, float negated_lse) {
  return metal::fast::exp2(metal::fma(product, score_scale, negated_lse));
}

// P, and dS times the slope of the softcap.
template <typename T>
METAL_FUNC float2 capped_gradient(constant AttentionParams& params,
                                  float product,
                                  float d_weight,
                                  float negated_lse,
                                  float delta) {
  const CappedScore<T> capped(params, product);
  const float weight = metal::fast::exp2(capped.score + negated_lse);
  return float2(weight, weight * (d_weight - delta) * capped.slope());
}
