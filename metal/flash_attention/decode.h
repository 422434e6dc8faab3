// The part of a decode that one simdgroup computes: all its query rows, for some of the keys.
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/common/pack.h"
#include "metal/common/tile.h"
#include "metal/common/unroll.h"
#include "metal/flash_attention/scores.h"

// Unpacks what was loaded as bits.
template <typename T>
METAL_FUNC void split(metal::vec<T, 4> four, thread T* x) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 4; ++i) {
    x[i] = four[i];
  }
}
METAL_FUNC void split(uint4 vector, thread float* x) {
  split(as_type<float4>(vector), x);
}
METAL_FUNC void split(uint2 pair, thread float* x) {
  x[0] = as_type<float2>(pair).x;
  x[1] = as_type<float2>(pair).y;
}
template <typename T>
METAL_FUNC void split(uint2 four, thread T* x) {
  split(as_type<metal::vec<T, 4> >(four), x);
}
template <typename T>
METAL_FUNC void split(uint4 vector, thread T* x) {
  split(vector.xy, x);
  split(vector.zw, x + 4);
}

// Loads N contiguous elements of a row. Reads zeros outside the rows. Half a pack is entirely
// inside a row or outside, since rows are whole packs.
template <typename T, int N>
METAL_FUNC void load_columns(Rows<T> from, int row, int column, thread T* x) {
  enum { kPack = Pack<T>::kSize };
  if (rows_are_vectors && N % kPack == 0) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < N; i += kPack) {
      split(load_vector<uint4>(from, row, column + i, heads_fill_tile), x + i);
    }
  } else if (rows_are_vectors) {
    static_assert(N % 4 == 0, "whole halves of packs");
    MLX_ANVIL_UNROLL
    for (int i = 0; i < N; i += 4) {
      split(load_vector<uint2>(from, row, column + i, heads_fill_tile), x + i);
    }
  } else {
    const device T* at = from.data + row * from.row_stride;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < N; ++i) {
      const bool exists = row < from.rows && column + i < from.columns;
      x[i] = exists ? at[(column + i) * from.column_stride] : T(0);
    }
  }
}

// A slot is a group of lanes that share a key; each lane has kElements of its columns. Slots
// process their keys independently and merge once, at the end.
template <typename T, int kDim, int kRows>
struct DecodeRows {
  enum {
    kPack = 16 / sizeof(T),
    kLeast = kRows == 8 ? 4 : kPack,  // 8 rows of q and out leave registers for only 4
    kElements = kDim / 32 > kLeast ? kDim / 32 : kLeast,
    kLanes = kDim / kElements,
    kSlots = 32 / kLanes,
    // Keys of a slot whose loads are in flight together.
    kSteps = kElements * kRows <= 8 ? 4
    : kElements <= 8                ? 2
                                    : 1,
    kKeys = kSlots * kSteps,  // per simdgroup and iteration
  };

  int slot;
  int column;  // the lane's first column
  float q[kRows][kElements];
  float out[kRows][kElements];
  OnlineSoftmax softmax[kRows];

  METAL_FUNC void begin(uint lane) thread {
    slot = lane / kLanes;
    column = lane % kLanes * kElements;
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      softmax[r].clear();
      MLX_ANVIL_UNROLL
      for (int e = 0; e < kElements; ++e) {
        q[r][e] = out[r][e] = 0.0f;
      }
    }
  }

  // Computes q . k for every row, in all lanes of the slot.
  METAL_FUNC void multiply_key(const thread T* k, thread float* dots) const thread {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float dot = 0.0f;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < kElements; ++e) {
        dot = metal::fma(q[r][e], static_cast<float>(k[e]), dot);
      }
      MLX_ANVIL_UNROLL
      for (int distance = 1; distance < kLanes; distance *= 2) {
        dot += metal::simd_shuffle_xor(dot, ushort(distance));
      }
      dots[r] = dot;
    }
  }

  // Adds kSteps keys to a row. A key that the row does not see has a score of -inf.
  METAL_FUNC void add(int r,
                      const thread float (&scores)[kSteps],
                      const thread T (&v)[kSteps][kElements]) thread {
    float highest = -INFINITY;
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      highest = metal::max(highest, scores[t]);
    }
    const float factor = softmax[r].begin_piece(highest);
    scale(r, factor);
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      const float weight = metal::fast::exp2(scores[t] - softmax[r].base());
      softmax[r].sum += weight;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < kElements; ++e) {
        out[r][e] = metal::fma(weight, static_cast<float>(v[t][e]), out[r][e]);
      }
    }
  }

  // Merges all slots by a butterfly exchange. Afterwards every slot has the total.
  METAL_FUNC void join_slots() thread {
    MLX_ANVIL_UNROLL
    for (int distance = kLanes; distance < 32; distance *= 2) {
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float other = metal::simd_shuffle_xor(softmax[r].highest, ushort(distance));
        const float other_sum = metal::simd_shuffle_xor(softmax[r].sum, ushort(distance));
        const float own_factor = softmax[r].begin_piece(other);
        const float other_factor = metal::fast::exp2(other - softmax[r].base());
        softmax[r].sum = metal::fma(other_sum, other_factor, softmax[r].sum);
        MLX_ANVIL_UNROLL
        for (int e = 0; e < kElements; ++e) {
          const float other_out = metal::simd_shuffle_xor(out[r][e], ushort(distance));
          out[r][e] = metal::fma(other_out, other_factor, out[r][e] * own_factor);
        }
      }
    }
  }

  METAL_FUNC void scale(int r, float factor) thread {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < kElements; ++e) {
      out[r][e] *= factor;
    }
  }

  // Stores the lane's columns of a float32 row. The lanes of a slot store the whole row.
  METAL_FUNC void store(int r, threadgroup float* row) const thread {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < kElements; e += 4) {
      *reinterpret_cast<threadgroup float4*>(row + column + e) =
          float4(out[r][e], out[r][e + 1], out[r][e + 2], out[r][e + 3]);
    }
  }

  METAL_FUNC void add_share(int r, const threadgroup float* row, float weight) thread {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < kElements; e += 4) {
      const float4 four = *reinterpret_cast<const threadgroup float4*>(row + column + e);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 4; ++i) {
        out[r][e + i] = metal::fma(four[i], weight, out[r][e + i]);
      }
    }
  }

  template <typename U>
  METAL_FUNC void store(int r, device U* row, int columns) const thread {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < kElements; ++e) {
      if (column + e < columns) {
        row[column + e] = static_cast<U>(out[r][e]);
      }
    }
  }
};
