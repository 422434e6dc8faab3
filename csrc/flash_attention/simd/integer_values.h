// Weighted sums of quantized values for a few rows, in integers (quantized_integers.h). For kernel
// files only (see common/simd/simd.h).
#pragma once

#include "flash_attention/simd/quantized_integers.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Scratch memory of integer_values().
struct IntegerWeights {
  uint32_t* pairs;  // [rows][kBlockKeys / 2][groups], of adjacent keys; then kLanes words
  float* steps;     // [rows][groups], then kLanes
  float* biases;    // [rows][groups][kLanes]: sums of weight * bias
  float* sums;      // [rows][columns], in the order in which words unpack
  float* block;     // [rows][groups][kBlockKeys]: the weights
};

// Lane l of the result is the largest lane of x[l].
template <int kBit = kLanes / 2>
inline u32v lane_maxima(u32v (&x)[kLanes]) {
  for (int i = 0; i < kBit; ++i) {
    exchange<kBit>(x[i], x[i + kBit], std::make_integer_sequence<int, kLanes>());
    x[i] = x[i] > x[i + kBit] ? x[i] : x[i + kBit];
  }
  if constexpr (kBit > 1) {
    return lane_maxima<kBit / 2>(x);
  } else {
    return x[0];
  }
}

// Multiplies the weights of keys [first, last) by the scales of a group. Returns the largest
// magnitudes, as bits.
inline u32v scaled_weights(const IntegerNumbers& numbers,
                           int64_t group,
                           int64_t first,
                           int64_t last,
                           const float* p,  // of the block, in panels of `panel_step`
                           int64_t panel_step,
                           float* bias_sum,
                           float* to) {
  f32v bias = load_lanes(bias_sum);
  u32v most = {};
  for (int64_t at = 0; at < kBlockKeys; at += kLanes) {
    const int64_t key = first + at, number = group * numbers.stride + key;
    if (key >= last) {
      store_lanes(to + at, f32v{});
      continue;
    }
    f32v weight = load_lanes(p + at / kPanel * panel_step + at % kPanel);
    f32v scale = load_lanes(numbers.scales + number);
    f32v of_bias = load_lanes(numbers.biases + number);
    if (last - key < kLanes) {
      const i32v seen = lanes_seen({key, last}, key);
      weight = seen != 0 ? weight : f32v{};
      scale = seen != 0 ? scale : f32v{};
      of_bias = seen != 0 ? of_bias : f32v{};
    }
    bias += weight * of_bias;
    weight *= scale;
    store_lanes(to + at, weight);
    const u32v magnitude = bits_as<u32v>(absolute(weight));
    most = magnitude > most ? magnitude : most;
  }
  store_lanes(bias_sum, bias);
  return most;
}

template <int kFirst, int... kLane>
inline u32v every_second(u32v a, u32v b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, 2 * kLane + kFirst...);
}

// Result 0 has every other lane of a and of b, from the lower halves; result 1 from the upper ones.
template <int kFirst, int... kLane>
inline u32v interleaved(u32v a, u32v b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kFirst * kLanes / 2 + kLane / 2 + kLane % 2 * kLanes)...);
}

// Stores the integers of a block's weights as pairs of adjacent keys, of one row. Pairs form in
// registers: stores of halves could not be read as a whole vector before they are done.
inline void store_pairs(const float* weights, const float* inverses, int64_t groups, uint32_t* to) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  const auto pairs_of = [&](int64_t group, int first) {
    const float* const from = weights + group * kBlockKeys + first;
    const u32v a = to_integers(load_lanes(from), inverses[group]);
    const u32v b = to_integers(load_lanes(from + kLanes), inverses[group]);
    return (every_second<0>(a, b, kAll) & 0xffffu) | every_second<1>(a, b, kAll) << 16;
  };
  for (int first = 0; first < kBlockKeys; first += 2 * kLanes) {
    uint32_t* const out = to + first / 2 * groups;
    if (groups == 2) {
      const u32v a = pairs_of(0, first), b = pairs_of(1, first);
      const u32v low = interleaved<0>(a, b, kAll), high = interleaved<1>(a, b, kAll);
      std::memcpy(out, &low, sizeof(low));
      std::memcpy(out + kLanes, &high, sizeof(high));
      continue;
    }
    for (int64_t group = 0; group < groups; ++group) {
      const u32v pairs = pairs_of(group, first);
      if (groups == 1) {
        std::memcpy(out, &pairs, sizeof(pairs));
        continue;
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        out[lane * groups + group] = pairs[lane];
      }
    }
  }
}

// Converts the weights of keys [first, last) to integers. Returns false if one is not finite.
template <int kRows>
bool to_integer_weights(const IntegerNumbers& numbers,
                        int64_t first,
                        int64_t last,
                        Panels p,
                        const IntegerWeights& to) {
  const int64_t groups = numbers.groups, count = kRows * groups;
  uint32_t worst = 0;
  alignas(64) float inverses[kRows * kMaxHeadDim / 16 + kLanes];
  for (int64_t begin = 0; begin < count; begin += kLanes) {
    const int64_t end = smaller(count, begin + kLanes);
    u32v most[kLanes];
    for (int64_t i = end - begin; i < kLanes; ++i) {
      most[i] = u32v{};
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / groups, group = i - row * groups;
      most[i - begin] =
          scaled_weights(numbers, group, first, last, p.at(row, first / kPanel) + first % kPanel,
                         p.rows * kPanel, to.biases + i * kLanes, to.block + i * kBlockKeys);
    }
    const u32v largest = lane_maxima(most);
    const uint32_t most_of_all = largest_bits(largest);
    worst = most_of_all > worst ? most_of_all : worst;
    const f32v x = bits_as<f32v>(largest);
    // Of less, the inverse may overflow.
    store_lanes(inverses + begin, x < splat(1e-30f) ? f32v{} : kMostInteger / x);
    store_columns(to.steps, begin, count, x / kMostInteger);
  }
  for (int row = 0; row < kRows; ++row) {
    store_pairs(to.block + row * groups * kBlockKeys, inverses + row * groups, groups,
                to.pairs + row * (kBlockKeys / 2) * groups);
  }
  return worst < kInfinityBits;
}

// Weights of several groups, as lookup() takes them. At most kGroups of them are looked up.
template <int kGroups>
inline u32v load_weights(const uint32_t* from) {
  if constexpr (kGroups <= 2) {
    uint64_t two;
    std::memcpy(&two, from, sizeof(two));
    typedef uint64_t u64v __attribute__((vector_size(4 * kLanes)));
    return bits_as<u32v>(u64v{} + two);
  } else {
    return load_bits<u32v>(from);
  }
}

// A vector of words of each of some rows: words [word, word + kLanes) of `words`.
struct WordColumn {
  CodeList codes;
  int64_t word, words;
  int64_t first_group;
  u32v group_of_lane;
};

// Adds the weighted codes of keys [first, last) to sums of a column of words, [rows][kLanes * codes
// per word], for code positions [kFirst, kFirst + kCount) of a word. `pairs` and `steps` are those
// of the first row.
template <class Format, int kRows, int kFirst, int kCount, int kGroups>
MLX_ANVIL_UNROLLED void weighted_words(const WordColumn& column,
                                       int64_t first,
                                       int64_t last,
                                       int64_t groups,
                                       const uint32_t* pairs,
                                       const float* steps,
                                       float* sums,
                                       int64_t row_sums) {
  using Codes = IntegerCodes<Format>;
  constexpr int kBits = Format::kBits, kHalf = 16 / kBits;
  i32v sum[kRows][kCount] = {};
  const auto add = [&](u32v a, u32v b) {
    u32v weight[kRows];
    for (int r = 0; r < kRows; ++r) {
      weight[r] = bits_as<u32v>(
          lookup(bits_as<f32v>(load_weights<kGroups>(pairs + r * (kBlockKeys / 2) * groups)),
                 column.group_of_lane));
    }
    u32v low = {}, high = {};  // the lower halves of both words, and the upper ones
    if constexpr (kFirst < kHalf) {
      low = (a & 0xffffu) | (b << 16);
    }
    if constexpr (kFirst + kCount > kHalf) {
      high = (a >> 16) | (b & 0xffff0000u);
    }
    unroll<kCount>([&](auto i) {
      constexpr int kCode = kFirst + i.value;
      const u32v half = kCode < kHalf ? low : high;
      const u32v integers = Codes::of(half >> (kCode % kHalf * kBits));
      for (int r = 0; r < kRows; ++r) {
        sum[r][i.value] = add_pair_products(sum[r][i.value], integers, weight[r]);
      }
    });
    pairs += groups;
  };
  const uint32_t* const* const rows = column.codes.rows;
  const int64_t count = column.words - column.word;
  int64_t key = first;
  if (count >= kLanes) {
    for (; key + 2 <= last; key += 2) {
      if constexpr (kFirst == 0) {
        for (const int64_t next : {key + column.codes.ahead, key + 1 + column.codes.ahead}) {
          prefetch_bytes(rows[next] + column.word, kLanes * sizeof(uint32_t));
        }
      }
      add(load_bits<u32v>(rows[key] + column.word), load_bits<u32v>(rows[key + 1] + column.word));
    }
  }
  for (; key < last; key += 2) {
    const int64_t next = key + 1 < last ? key + 1 : key;  // of weight 0
    add(load_words_of(rows[key] + column.word, count),
        load_words_of(rows[next] + column.word, count));
  }
  for (int r = 0; r < kRows; ++r) {
    const f32v step = lookup(load_lanes(steps + r * groups), column.group_of_lane);
    for (int i = 0; i < kCount; ++i) {
      float* const to = sums + r * row_sums + (kFirst + i) * kLanes;
      store_lanes(to, load_lanes(to) + __builtin_convertvector(sum[r][i], f32v) * step);
    }
  }
}

// Like stream_values() (stream.h). Returns false, and leaves `out` alone, if a weight is not
// finite.
template <class Format, int kRows>
bool integer_values(const CodeList& codes,
                    const IntegerNumbers& numbers,
                    int64_t begin,
                    int64_t end,
                    Panels p,
                    const float* factors,
                    const IntegerWeights& weights,
                    Panels out) {
  constexpr int kBits = Format::kBits, kCodes = 32 / kBits;
  constexpr int kTogether = kRows < 4 ? kRows : 4;
  constexpr int kMost = kRegisters / 2 / kTogether;
  constexpr int kCount = kCodes < kMost ? kCodes : kMost;
  const int64_t groups = numbers.groups, words_per_group = numbers.group * kBits / 32;
  const int64_t words = groups * words_per_group;
  const int64_t padded = round_up(words, kLanes) * kCodes;  // columns of whole vectors of words
  std::memset(weights.sums, 0, kRows * padded * sizeof(float));
  std::memset(weights.biases, 0, kRows * numbers.groups * sizeof(f32v));
  for (int64_t first = begin; first < end; first += kBlockKeys) {
    const int64_t last = end - first < kBlockKeys ? end : first + kBlockKeys;
    if (!to_integer_weights<kRows>(numbers, first, last, p, weights)) {
      return false;
    }
    for (int64_t word = 0; word < words; word += kLanes) {
      WordColumn column = {codes, word, words, word / words_per_group, {}};
      const int shift = __builtin_ctzll(static_cast<uint64_t>(words_per_group));
      const i32v words_of_group =
          lane_index() + static_cast<int32_t>(word - column.first_group * words_per_group);
      column.group_of_lane = bits_as<u32v>(words_of_group) >> shift;
      for (int row = 0; row < kRows; row += kTogether) {
        const int64_t at = row * groups + column.first_group;
        const auto add = [&](auto part, auto most_groups) {
          weighted_words<Format, kTogether, part.value * kCount, kCount, most_groups.value>(
              column, first, last, groups,
              weights.pairs + row * (kBlockKeys / 2) * groups + column.first_group,
              weights.steps + at, weights.sums + row * padded + word * kCodes, padded);
        };
        unroll<kCodes / kCount>([&](auto part) {
          words_per_group * 2 >= kLanes ? add(part, std::integral_constant<int, 2>())
                                        : add(part, std::integral_constant<int, kLanes>());
        });
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float in_order[kMaxHeadDim + kLanes * kCodes];
    for (int64_t word = 0; word < words; word += kLanes) {
      const float* const sums = weights.sums + r * padded + word * kCodes;
      float* const to = in_order + word * kCodes;
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < kCodes; ++i) {
          to[lane * kCodes + i] = sums[i * kLanes + lane];
        }
      }
    }
    for (int64_t g = 0; g < groups; ++g) {
      const float bias = lane_sum(load_lanes(weights.biases + (r * groups + g) * kLanes));
      for (int64_t c = g * numbers.group; c < (g + 1) * numbers.group; c += kLanes) {
        float* const to = out.at(r, c / kPanel) + c % kPanel;
        store_lanes(to, load_lanes(to) * factors[r] + (load_lanes(in_order + c) + bias));
      }
    }
  }
  return true;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
