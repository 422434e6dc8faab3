// The part of a decode that one simdgroup computes: some query rows, for some of the keys.
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/common/over_lanes.h"
#include "metal/common/tile.h"
#include "metal/common/unroll.h"
#include "metal/flash_attention/decode_load.h"

// Keys arrive in blocks. A slot is a group of lanes that share keys of a block; each lane
// multiplies kElements columns of them. Lanes then exchange partial sums until each has the score
// of one row and one key, so that masks and softmax cost one instruction for up to 32 scores.
//
// The lane of row r, slot s and the slot's step t is s * kLanes + t * kRows + r. Its key is number
// t * kSlots + s of the block. If a block has less than 32 scores, several lanes have the same.
template <int kDim, int kRows, int kSteps, int kElements>
struct DecodeLanes {
  enum {
    kLanes = kDim / kElements,
    kSlots = 32 / kLanes,
    kKeys = kSlots * kSteps,   // of a block
    kScores = kRows * kSteps,  // of a slot
  };
  static_assert(kScores <= kLanes, "a lane has one score");
  static_assert(kDim % 32 == 0, "lanes share columns evenly");

  ushort lane;

  METAL_FUNC int row() const thread { return lane % kRows; }
  METAL_FUNC int slot() const thread { return lane / kLanes; }
  METAL_FUNC int key() const thread { return lane / kRows % kSteps * kSlots + slot(); }
  METAL_FUNC int first_column() const thread { return lane % kLanes * kElements; }

  // Exchanges what lanes of a slot have of the scores: number t * kRows + r is of step t and row r.
  METAL_FUNC float exchange(thread float (&sums)[kScores]) const thread {
    // Lanes whose numbers differ in one bit give each other half of what they have.
    MLX_ANVIL_UNROLL
    for (int distance = 1; distance < kScores; distance *= 2) {
      const bool upper = lane & distance;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kScores / (2 * distance); ++i) {
        const float kept = upper ? sums[2 * i + 1] : sums[2 * i];
        const float given = upper ? sums[2 * i] : sums[2 * i + 1];
        sums[i] = kept + metal::simd_shuffle_xor(given, ushort(distance));
      }
    }
    MLX_ANVIL_UNROLL
    for (int distance = kScores; distance < kLanes; distance *= 2) {
      sums[0] += metal::simd_shuffle_xor(sums[0], ushort(distance));
    }
    return sums[0];
  }

  // The reverse: returns x of the lanes of the slot that have each score.
  METAL_FUNC void spread(float x, thread float (&of_scores)[kScores]) const thread {
    of_scores[0] = x;
    MLX_ANVIL_UNROLL
    for (int distance = 1; distance < kScores; distance *= 2) {
      const bool upper = lane & distance;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < distance; ++i) {
        const float own = of_scores[i];
        const float other = metal::simd_shuffle_xor(own, ushort(distance));
        of_scores[i] = upper ? other : own;
        of_scores[i + distance] = upper ? own : other;
      }
    }
  }

  // Each of these is over the keys of the lane's row. Lanes that differ in the bits between
  // kScores and kLanes have the same score.
  METAL_FUNC float max_over_keys(float x) const thread {
    return over_lanes<true, kLanes>(over_lanes<true, kRows, kScores>(x));
  }
  METAL_FUNC float sum_over_keys(float x) const thread {
    return over_lanes<false, kLanes>(over_lanes<false, kRows, kScores>(x));
  }
};

// A lane's columns of the output.
template <int kDim, int kRows>
struct DecodeOutput {
  enum { kOwn = kDim / 32 };
  int first_column;
  float columns[kRows][kOwn];

  METAL_FUNC void zero() thread {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int e = 0; e < kOwn; ++e) {
        columns[r][e] = 0.0f;
      }
    }
  }

  // Multiplies each row by the factor of the lanes that have its scores.
  METAL_FUNC void scale(float factor) thread {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float of_row = metal::simd_broadcast(factor, ushort(r));
      MLX_ANVIL_UNROLL
      for (int e = 0; e < kOwn; ++e) {
        columns[r][e] *= of_row;
      }
    }
  }

  METAL_FUNC void store(int r, threadgroup float* row) const thread {
    enum { kTogether = kOwn < 4 ? kOwn : 4 };
    MLX_ANVIL_UNROLL
    for (int e = 0; e < kOwn; e += kTogether) {
      metal::vec<float, kTogether> together;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        together[i] = columns[r][e + i];
      }
      *reinterpret_cast<threadgroup metal::vec<float, kTogether>*>(row + first_column + e) =
          together;
    }
  }
};

// Of values and of the output, each lane has kOwn columns, of all keys of the block.
template <typename T, int kDim, int kRows, int kSteps>
struct DecodeRows {
  enum {
    kPack = 16 / sizeof(T),
    kOwn = DecodeOutput<kDim, kRows>::kOwn,
    kElements = kOwn > kPack ? kOwn : kPack,
  };
  using Lanes = DecodeLanes<kDim, kRows, kSteps, kElements>;
  enum { kLanes = Lanes::kLanes, kSlots = Lanes::kSlots, kKeys = Lanes::kKeys };

  Lanes lanes;
  T q[kRows][kElements];
  DecodeOutput<kDim, kRows> out;
  OnlineSoftmax softmax;  // of the lane's row; the sum is of the lane's own scores

  METAL_FUNC void begin(uint lane) thread {
    lanes.lane = lane;
    softmax.clear();
    out.first_column = lane * kOwn;
    out.zero();
  }

  // Returns q . k of the lane's row and key.
  METAL_FUNC float multiply_keys(const thread T (&k)[kSteps][kElements]) const thread {
    float sums[Lanes::kScores];
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float dot = 0.0f;
        MLX_ANVIL_UNROLL
        for (int e = 0; e < kElements; ++e) {
          dot = metal::fma(static_cast<float>(q[r][e]), static_cast<float>(k[t][e]), dot);
        }
        sums[t * kRows + r] = dot;
      }
    }
    return lanes.exchange(sums);
  }

  // Adds a block. A key that the row does not see has a score of -inf.
  METAL_FUNC void add(float score, const thread T (&v)[kKeys][kOwn]) thread {
    const float factor = softmax.begin_piece(lanes.max_over_keys(score));
    const float weight = metal::fast::exp2(score - softmax.base());
    softmax.sum += weight;
    out.scale(factor);
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeys; ++n) {
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int from = n % kSlots * kLanes + n / kSlots * kRows + r;
        const float of_key = metal::simd_broadcast(weight, ushort(from));
        MLX_ANVIL_UNROLL
        for (int e = 0; e < kOwn; ++e) {
          out.columns[r][e] = metal::fma(of_key, static_cast<float>(v[n][e]), out.columns[r][e]);
        }
      }
    }
  }
};
