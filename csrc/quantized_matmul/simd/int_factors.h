// The second operand of int_plain_gemv.cpp and arm_plain.cpp: rows of x times scales, as integers.
// For kernel files only, and only on machines that multiply bytes.
#pragma once

#include <numeric>
#include <type_traits>

#include "quantized_matmul/simd/int_parts.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int kBandRows = 128, kQuads = kBandRows / 4;

// Reads scales or biases of the band's rows, with zeros past the last. Not inlined: every kernel
// calls this one copy.
[[gnu::noinline]] inline void read_band(const QuantizedPlainGemvArgs& args,
                                        const void* numbers,
                                        int64_t n,
                                        int64_t rows,
                                        int64_t group,
                                        f32v (&to)[kBandRows]) {
  const int64_t groups = args.matrix.columns / args.matrix.format.group;
  const int64_t total = args.matrix.outputs * groups;
  with_scales(args.matrix, numbers, [&](const auto* from, auto widen) {
    int64_t at = (args.first + n) * groups + group;
    for (int64_t r = 0; r < rows; ++r, at += groups) {
      __builtin_prefetch(from + at + kBandRows * groups, 0, 2);
      to[r] = widen_some(from + at, total - at, widen);
    }
  });
  std::memset(to + rows, 0, (kBandRows - rows) * sizeof(f32v));
}

// Factors of a band of rows of w: x times scales in byte pieces. A lane is a group; lanes past the
// strip's groups are undefined. kByGroups keeps one vector of groups per word, else words are
// transposed to one row per group.
template <int kPieces, int kRows, bool kByGroups>
class BandFactors {
 public:
  // Reads rows [n, n + rows) and the groups from `group` on, for codes relative to `offset`. Each
  // factor is normalised below 1 by a separate power of two, so that small scales lose no
  // precision. Returns false if a value is not finite.
  [[gnu::noinline]] bool read(
      const QuantizedPlainGemvArgs& args, int64_t n, int64_t rows, int64_t group, int32_t offset) {
    f32v scales[kBandRows];
    read_band(args, args.matrix.weights.scales, n, rows, group, scales);
    Largest scale, x_of_lane[kVectorsOfX];
    for (const f32v& of_groups : scales) {
      scale.add(of_groups);
    }
    alignas(64) float x[kBandRows * kRows];  // row m of x has elements m, m + kRows and so on
    std::memcpy(x, args.x + n * kRows, rows * kRows * sizeof(float));
    std::memset(x + rows * kRows, 0, (kBandRows - rows) * kRows * sizeof(float));
    for (int i = 0; i < kBandRows * kRows; i += kLanes) {
      x_of_lane[i / kLanes % kVectorsOfX].add(load_lanes(x + i));
    }
    bool finite = scale.finite();
    for (const Largest& of_vector : x_of_lane) {
      finite &= of_vector.finite();
    }
    if (!finite) {
      return false;
    }
    f32v shifts[kRows] = {};
    if (args.matrix.weights.biases) {
      f32v biases[kBandRows];
      read_band(args, args.matrix.weights.biases, n, rows, group, biases);
      for (int r = 0; r < kBandRows; ++r) {
        biases[r] += scales[r] * static_cast<float>(offset);
      }
      for (int m = 0; m < kRows; ++m) {
        shifts[m] = sum_of_products(biases, x + m);
      }
    }

    float largest[kRows] = {};
    for (int i = 0; i < kVectorsOfX * kLanes; ++i) {
      float& most = largest[i % kRows];
      const float of_lane = x_of_lane[i / kLanes].value()[i % kLanes];
      most = of_lane > most ? of_lane : most;
    }
    f32v x_exponent[kVectorsOfX];
    for (int v = 0; v < kVectorsOfX; ++v) {
      for (int lane = 0; lane < kLanes; ++lane) {
        x_exponent[v][lane] = largest[(v * kLanes + lane) % kRows];
      }
      x_exponent[v] = exponent_above(x_exponent[v]);
    }
    for (int i = 0; i < kBandRows * kRows; i += kLanes) {
      const f32v exponent = x_exponent[i / kLanes % kVectorsOfX];
      store_lanes(x + i, times_power(load_lanes(x + i), -exponent) * kScale);
    }
    const f32v scale_exponent = exponent_above(scale.value());
    for (int m = 0; m < kRows; ++m) {
      store_lanes(exponents_[m], scale_exponent + x_exponent[m / kLanes][m % kLanes]);
      store_lanes(shifts_[m], shifts[m]);
    }
    quantize(x, scales, -scale_exponent);
    return true;
  }

  // Bytes of X for four rows.
  const int32_t& word(int64_t group, int64_t quad, int m, int piece) const {
    return words_.rows[group][(quad * kRows + m) * kPieces + piece];
  }
  u32v words(int64_t quad, int m, int piece) const {
    return words_.vectors[(quad * kRows + m) * kPieces + piece];
  }
  // x times scale ~= X * 2^exponent / kScale.
  f32v exponents(int m) const { return load_lanes(exponents_[m]); }
  float exponent(int m, int64_t group) const { return exponents_[m][group]; }
  i32v sums(int m) const { return load_bits<i32v>(sums_[m]); }
  int32_t sum(int m, int64_t group) const { return sums_[m][group]; }
  // Sum of x times biases, plus the correction for the offset of codes.
  f32v shifts(int m) const { return load_lanes(shifts_[m]); }
  float shift(int m, int64_t group) const { return shifts_[m][group]; }

  // Bounds X, so that its highest byte does not overflow by the carry from negative lower bytes.
  static constexpr float kScale = kPieces == 2 ? 127 << 8 : 127 << 16;

 private:
  // Vectors with an element of every row of x.
  static constexpr int kVectorsOfX = kRows > kLanes ? kRows / kLanes : 1;

  // Sums over all rows. Four independent sums hide the latency of the additions.
  static f32v sum_of_products(const f32v (&numbers)[kBandRows], const float* x) {
    f32v sums[4] = {};
    for (int r = 0; r < kBandRows; r += 4) {
      unroll<4>([&](auto s) { sums[s.value] += numbers[r + s.value] * x[(r + s.value) * kRows]; });
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // Quantises X with scales times 2^exponent. Without kByGroups, transposes from one vector per
  // word to one row per group, kAtOnce quads at a time, which fill whole squares of words.
  void quantize(const float* x, const f32v (&scales)[kBandRows], f32v exponent) {
    constexpr int kOfQuad = kRows * kPieces;
    constexpr int kAtOnce = kLanes / std::gcd(kLanes, kOfQuad);
    i32v sums[kRows] = {};
    for (int quad = 0; quad < kQuads; quad += kAtOnce) {
      u32v words[kAtOnce * kOfQuad];
      for (int q = 0; q < kAtOnce; ++q) {
        const int row = 4 * (quad + q);
        f32v of_quad[4];
        unroll<4>([&](auto r) { of_quad[r.value] = times_power(scales[row + r.value], exponent); });
        for (int m = 0; m < kRows; ++m) {
          sums[m] += quantize_quad(x + row * kRows + m, of_quad, words + (q * kRows + m) * kPieces);
        }
      }
      if constexpr (kByGroups) {
        std::memcpy(words_.vectors + quad * kOfQuad, words, sizeof(words));
      } else {
        for (int first = 0; first < kAtOnce * kOfQuad; first += kLanes) {
          u32v square[kLanes];
          std::memcpy(square, words + first, sizeof(square));
          transpose(square);
          for (int group = 0; group < kLanes; ++group) {
            std::memcpy(words_.rows[group] + quad * kOfQuad + first, &square[group], sizeof(u32v));
          }
        }
      }
    }
    std::memcpy(sums_, sums, sizeof(sums));
  }

  // Packs four rows of X into one word per piece. Returns the sum of X.
  static i32v quantize_quad(const float* x, const f32v* scales, u32v* pieces) {
    i32v sum{};
    u32v numbers[4];
    for (int r = 0; r < 4; ++r) {
      const i32v number = rounded(scales[r] * x[r * kRows]);
      sum += number;
      // With this bias, every byte but the highest is its piece with the top bit flipped.
      numbers[r] = bits_as<u32v>(number) + (kPieces == 2 ? 0x80u : 0x8080u);
    }
    const u32v low02 = (numbers[0] & 0xffffu) | (numbers[2] << 16);
    const u32v low13 = (numbers[1] & 0xffffu) | (numbers[3] << 16);
    pieces[0] = even_bytes(low02, low13) ^ 0x80808080u;
    pieces[1] = odd_bytes(low02, low13);
    if constexpr (kPieces == 3) {
      const u32v high02 = (numbers[0] >> 16) | (numbers[2] & 0xffff0000u);
      const u32v high13 = (numbers[1] >> 16) | (numbers[3] & 0xffff0000u);
      pieces[1] ^= 0x80808080u;
      pieces[2] = even_bytes(high02, high13);
    }
    return sum;
  }
  static u32v even_bytes(u32v a, u32v b) { return (a & 0x00ff00ffu) | ((b << 8) & 0xff00ff00u); }
  static u32v odd_bytes(u32v a, u32v b) { return ((a >> 8) & 0x00ff00ffu) | (b & 0xff00ff00u); }

  struct Vectors {
    alignas(64) u32v vectors[kQuads * kRows * kPieces];
  };
  struct Rows {
    // Padded by a cache line, so that rows do not map to the same cache set.
    alignas(64) int32_t rows[kLanes][kQuads * kRows * kPieces + kLanes];
  };
  std::conditional_t<kByGroups, Vectors, Rows> words_;
  alignas(64) float exponents_[kRows][kLanes], shifts_[kRows][kLanes];
  alignas(64) int32_t sums_[kRows][kLanes];
};

// Combines the sums of all pieces, over at most kCount bytes, and subtracts `offset` times the sum
// of X.
template <class Format, int kCount, int kPieces, class Sum>
inline f32v in_floats(const i32v (&sums)[kPieces], int32_t offset, Sum sum_of_x) {
  constexpr int64_t kMost = int64_t{Format::kLargest} * kCount << (8 * kPieces - 1);
  if constexpr (kMost <= int64_t{1} << 31) {
    i32v sum = sums[kPieces - 1];
    for (int p = kPieces - 2; p >= 0; --p) {
      sum = (sum << 8) + sums[p];
    }
    return __builtin_convertvector(sum - offset * sum_of_x, f32v);
  } else {
    i32v high = sums[kPieces - 1];
    for (int p = kPieces - 2; p > 0; --p) {
      high = (high << 8) + sums[p];
    }
    high -= offset * (sum_of_x >> 8);
    const i32v low = sums[0] - offset * (sum_of_x & 0xff);
    return __builtin_convertvector(high, f32v) * 256.0f + __builtin_convertvector(low, f32v);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
