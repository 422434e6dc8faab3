// Scores of a few rows of q with quantized keys, in integers (quantized_integers.h). For kernel
// files only (see common/simd/simd.h).
#pragma once

#include "flash_attention/simd/quantized_integers.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Rows of q as pairs of integers, in the order in which a word of codes unpacks: pair i of a word
// has its codes i and i + kPairs.
struct IntegerQueries {
  uint32_t* pairs;  // [rows][columns / 2]
  float* steps;     // [rows]
  float* sums;      // [rows][groups]: of the floating-point elements
  int64_t columns;
  int64_t groups;
};

// Returns false if an element is not finite.
inline bool to_integer_queries(Panels q, int64_t rows, int bits, const IntegerQueries& to) {
  const int64_t columns = to.columns, group = columns / to.groups;
  const int pairs = 16 / bits;
  for (int64_t r = 0; r < rows; ++r) {
    int16_t integers[kMaxHeadDim];
    u32v most = {};
    for (int64_t c = 0; c < columns; c += kLanes) {
      const u32v x = bits_as<u32v>(absolute(load_lanes(q.at(r, c / kPanel) + c % kPanel)));
      most = x > most ? x : most;
    }
    const uint32_t largest = largest_bits(most);
    if (largest >= kInfinityBits) {
      return false;
    }
    to.steps[r] = step_of(bits_as<float>(largest));
    const float inverse = inverse_of(bits_as<float>(largest));
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x = load_lanes(q.at(r, c / kPanel) + c % kPanel);
      const u16v lanes = truncate(to_integers(x, inverse));
      std::memcpy(integers + c, &lanes, sizeof(lanes));
    }
    for (int64_t g = 0; g < to.groups; ++g) {
      f32v sum = {};
      for (int64_t c = g * group; c < (g + 1) * group; c += kLanes) {
        sum += load_lanes(q.at(r, c / kPanel) + c % kPanel);
      }
      to.sums[r * to.groups + g] = lane_sum(sum);
    }
    uint32_t* const out = to.pairs + r * columns / 2;
    for (int64_t i = 0; i < columns / 2; ++i) {
      const int16_t* const word = integers + i / pairs * 2 * pairs + i % pairs;
      out[i] = static_cast<uint16_t>(word[0]) | static_cast<uint32_t>(word[pairs]) << 16;
    }
  }
  return true;
}

// Loads `count` words from `word` on of kLanes rows, one row per lane. A row past `last` is `last`.
inline void load_transposed(const CodeList& codes,
                            int64_t word,
                            int64_t row,
                            int64_t last,
                            int64_t count,
                            u32v (&x)[kLanes]) {
  if (row + kLanes - 1 <= last && count == kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      prefetch_bytes(codes.rows[row + k + codes.ahead] + word, kLanes * sizeof(uint32_t));
      x[k] = load_bits<u32v>(codes.rows[row + k] + word);
    }
  } else {
    for (int k = 0; k < kLanes; ++k) {
      x[k] = load_words_of(codes.rows[smaller(row + k, last)] + word, count);
    }
  }
  transpose(x);
}

// Like stream_scores() (stream.h). A lane has one key, so that no sum crosses lanes.
template <class Format, int kRows>
void integer_scores(const CodeList& codes,
                    const IntegerNumbers& numbers,
                    int64_t begin,
                    int64_t end,
                    float factor,
                    const IntegerQueries& q,
                    Panels s) {
  using Codes = IntegerCodes<Format>;
  constexpr int kBits = Format::kBits, kPairs = 16 / kBits;
  constexpr int kVectors = kRows > 4 ? 1 : 2;  // of keys, which share the loads of q
  const int64_t words = q.columns * kBits / 32, words_per_group = numbers.group * kBits / 32;
  const int64_t row_pairs = q.columns / 2;
  float of_step[kRows];
  for (int r = 0; r < kRows; ++r) {
    of_step[r] = q.steps[r] * factor;
  }
  for (int64_t first = begin; first < round_up(end, kPanel); first += kVectors * kLanes) {
    f32v total[kRows][kVectors] = {};
    i32v sum[kRows][kVectors] = {};
    int64_t group = 0, left = words_per_group;
    const uint32_t* pairs = q.pairs;
    for (int64_t w = 0; w < words; w += kLanes) {
      const int64_t count = smaller(words - w, kLanes);
      u32v x[kVectors][kLanes];
      for (int v = 0; v < kVectors; ++v) {
        load_transposed(codes, w, first + v * kLanes, end - 1, count, x[v]);
      }
      for (int64_t i = 0; i < count; ++i) {
        unroll<kPairs>([&](auto pair) {
          u32v integers[kVectors];
          for (int v = 0; v < kVectors; ++v) {
            integers[v] = Codes::of(x[v][i] >> (pair.value * kBits));
          }
          for (int r = 0; r < kRows; ++r) {
            const u32v y = u32v{} + pairs[r * row_pairs];
            for (int v = 0; v < kVectors; ++v) {
              sum[r][v] = add_pair_products(sum[r][v], integers[v], y);
            }
          }
          ++pairs;
        });
        if (--left != 0) {
          continue;
        }
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = group * numbers.stride + first + v * kLanes;
          const f32v scale = load_lanes(numbers.scales + at);
          const f32v bias = load_lanes(numbers.biases + at) * factor;
          for (int r = 0; r < kRows; ++r) {
            total[r][v] += __builtin_convertvector(sum[r][v], f32v) * (scale * of_step[r]) +
                           bias * q.sums[r * q.groups + group];
            sum[r][v] = i32v{};
          }
        }
        ++group;
        left = words_per_group;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t key = first + v * kLanes;
        store_lanes(s.at(r, key / kPanel) + key % kPanel, total[r][v]);
      }
    }
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
