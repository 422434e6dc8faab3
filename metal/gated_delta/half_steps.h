// A decay per channel, by a lane with two channels in half of a block of 16 steps, and sums over
// lanes: for chunk_prepare_channels_pairs.metal.
#pragma once

#include "metal/gated_delta/channels.h"

enum { kRun = 4, kHalf = kBlock / 2 };  // steps whose pairs are added one by one, and of a lane
// Pairs of a run: those of q, then those of k below the diagonal.
enum { kQueryPairs = kRun * (kRun + 1) / 2, kPairsOfRun = 16, kOwnPairs = 2 * kPairsOfRun };

// Two channels of the half of a block. Steps that do not count have q = k = 0 and g = 1.
struct HalfSteps {
  float2 q[kHalf], k[kHalf], g[kHalf];
  // In runs of steps: the decays from the run's first step to each, and from each to its last.
  float2 from_first[kHalf], to_last[kHalf];

  // `count`: steps that count. Addresses are those of the first step.
  template <typename T>
  METAL_FUNC void load(const device T* q_at,
                       const device T* k_at,
                       const device T* gates,
                       long g_at,
                       constant GatedDeltaParams& params,
                       int count) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const bool counts = i < count;
      q[i] = counts ? floats_of_pair(*reinterpret_cast<const device Pair<T>*>(q_at)) : float2(0.0f);
      k[i] = counts ? floats_of_pair(*reinterpret_cast<const device Pair<T>*>(k_at)) : float2(0.0f);
      g[i] = float2(1.0f);
      if (counts && g_is_float32) {
        g[i] = *reinterpret_cast<const device float2*>(
            reinterpret_cast<const device float*>(gates) + g_at);
      } else if (counts) {
        g[i] = floats_of_pair(*reinterpret_cast<const device Pair<T>*>(gates + g_at));
      }
      q_at += params.q_strides[1];
      k_at += params.k_strides[1];
      g_at += params.g_strides[1];
    }
  }

  METAL_FUNC void begin_runs() thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      from_first[i] = i % kRun == 0 ? g[i] : from_first[i - 1] * g[i];
    }
    MLX_ANVIL_UNROLL
    for (int i = kHalf - 1; i >= 0; --i) {
      to_last[i] = i % kRun == kRun - 1 ? float2(1.0f) : to_last[i + 1] * g[i + 1];
    }
  }
  // Joins the two runs of the half.
  METAL_FUNC void join_runs() thread {
    const float2 before = from_first[kRun - 1], after = from_first[kHalf - 1];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRun; ++i) {
      to_last[i] *= after;
      from_first[kRun + i] *= before;
    }
  }
  // Joins the halves, which lanes with and without bit 4 have.
  METAL_FUNC void join_halves(uint lane) thread {
    const float2 other = metal::simd_shuffle_xor(from_first[kHalf - 1], ushort(16));
    const bool is_first = lane < 16;
    const float2 of_from = is_first ? float2(1.0f) : other, of_to = is_first ? other : float2(1.0f);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      from_first[i] *= of_from;
      to_last[i] *= of_to;
    }
  }

  // Adds the pairs of steps in runs.
  METAL_FUNC void add_pairs_to(thread float (&sums)[kOwnPairs]) const thread {
    MLX_ANVIL_UNROLL
    for (int first = 0; first < kHalf; first += kRun) {
      MLX_ANVIL_UNROLL
      for (int j = 0; j < kRun; ++j) {
        float2 key = k[first + j];
        MLX_ANVIL_UNROLL
        for (int i = j; i < kRun; ++i) {
          const int place = first / kRun * kPairsOfRun;
          key = i > j ? key * g[first + i] : key;
          sums[place + i * (i + 1) / 2 + j] += metal::dot(q[first + i], key);
          if (i > j) {
            sums[place + kQueryPairs + i * (i - 1) / 2 + j] += metal::dot(k[first + i], key);
          }
        }
      }
    }
  }
};

// Adds up sums over 16 lanes. Lane l gets those of 2 l and 2 l + 1, in the first two places.
template <int kCount>
struct LaneSums {
  template <typename Sums>
  METAL_FUNC static void add(thread Sums& sums, uint lane) {
    enum { kKept = kCount / 2, kLanes = kCount / 4 };
    const bool is_second = (int(lane) & kLanes) != 0;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kKept; ++i) {
      const float other = is_second ? sums[i] : sums[kKept + i];
      const float own = is_second ? sums[kKept + i] : sums[i];
      sums[i] = own + metal::simd_shuffle_xor(other, ushort(kLanes));
    }
    LaneSums<kKept>::add(sums, lane);
  }
};
template <>
struct LaneSums<2> {
  template <typename Sums>
  METAL_FUNC static void add(thread Sums&, uint) {}
};

// A lane's numbers as parts whose sum has 16 bits.
template <typename T>
struct TwoParts {
  Pair<T> high, low;

  METAL_FUNC explicit TwoParts(float2 x) {
    high = elements_of(fragment_of<T>(x));
    low = elements_of(fragment_of<T>(x - floats_of_pair(high)));
  }
};
