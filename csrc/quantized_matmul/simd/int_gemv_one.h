// Integer GEMV (int_gemv.cpp) of one row of x. For kernel files only, and only on machines with
// VNNI.
#pragma once

#include <type_traits>

#include "quantized_matmul/simd/int_blocks.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Loads up to kLanes numbers, with zeros in lanes past the `count` that there are.
template <class T, class Widen>
MLX_ANVIL_UNROLLED f32v widen_given(const T* from, int64_t count, Widen widen) {
  const auto given =
      static_cast<__mmask16>(count < kLanes ? (1u << count) - 1 : (1u << kLanes) - 1);
  if constexpr (std::is_same_v<T, float>) {
    return bits_as<f32v>(_mm512_maskz_loadu_ps(given, from));
  } else if constexpr (std::is_same_v<T, bf16>) {
    const __m512i halves = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(given, from));
    return bits_as<f32v>(_mm512_slli_epi32(halves, 16));
  } else if constexpr (std::is_same_v<T, f16>) {
    return bits_as<f32v>(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(given, from)));
  } else {
    return widen_some(from, count, widen);
  }
}

// One row of x. Its loop stores nothing: numbers that are stored for later loads would make these
// wait until the rows before are complete, and compilers would load pointers anew for each block.
// Scales are read where they are, and codes unpacked just before they are multiplied.
template <class Format, int kPieces>
class IntGemvOfOne {
 public:
  explicit IntGemvOfOne(const QuantizedGemvArgs& args)
      : args_(args),
        layout_(args.matrix),
        units_(layout_.columns / BlockUnits::kValues),
        units_per_group_(args.matrix.format.group / BlockUnits::kValues),
        group_shift_(__builtin_ctz(static_cast<unsigned>(units_per_group_))) {
    for (int lane = 0; lane < kLanes; ++lane) {
      group_of_lane_[lane] =
          static_cast<uint32_t>(BlockUnits::unit_of_lane(lane) / units_per_group_);
    }
  }

  void run() {
    with_scales(args_.matrix, args_.matrix.weights.scales, [&](const auto* scales, auto widen) {
      using Scale = std::remove_cvref_t<decltype(*scales)>;
      if constexpr (Format::kHasBiases == (sizeof(Scale) > 1)) {
        for (int64_t n = 0; n < args_.count; n += kOutputs) {
          multiply(n, scales, static_cast<const Scale*>(args_.matrix.weights.biases), widen);
        }
      }
    });
  }

 private:
  using BlockUnits = typename Bytes<Format>::BlockUnits;
  static constexpr int kWords = BlockUnits::kWords;
  // One byte per element keeps up with memory, whose prefetchers follow one row better than two.
  static constexpr int kOutputs = kPieces == 1 ? 1 : kIntGemvOutputs;
  static constexpr bool kHighHalves = kPieces == 1 && Bytes<Format>::kHasHalves;
  static constexpr int64_t kAhead = kPieces == 1 ? kAheadWords / 2 : kAheadWords;

  template <class Scale, class Widen>
  MLX_ANVIL_UNROLLED void multiply(int64_t n,
                                   const Scale* all_scales,
                                   const Scale* all_biases,
                                   Widen widen) const {
    const uint32_t* w[kOutputs];  // of the block
    const Scale *scales[kOutputs], *biases[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      // Past the last row of w, repeat it.
      const int64_t row = args_.first + (n + o < args_.count ? n + o : args_.count - 1);
      w[o] = args_.matrix.weights.w + row * units_ * kWords;
      scales[o] = all_scales + row * layout_.groups;
      biases[o] = Format::kHasBiases ? all_biases + row * layout_.groups : nullptr;
    }
    prefetch_rows(scales[0]);
    if constexpr (Format::kHasBiases) {
      prefetch_rows(biases[0]);
    }
    const char* const row = reinterpret_cast<const char*>(args_.x);
    const char* x = row;
    const char* const offsets = row + layout_.offsets_at();
    const char* const steps = row + layout_.steps_at();
    f32v totals[kOutputs] = {};
    f32v of_groups[kOutputs];
    const auto load_scales = [&](int64_t group) __attribute__((always_inline)) {
      unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
        of_groups[o.value] = widen_given(scales[o.value] + group, layout_.groups - group, widen);
      });
    };
    // `groups` are the lanes' groups among those that were loaded.
    const auto add = [&](const uint32_t* const(&from)[kOutputs], int64_t block,
                         u32v groups) __attribute__((always_inline)) {
      f32v products[1][kOutputs];
      BlockUnits packed[kOutputs];
      unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
        packed[o.value].load_whole(from[o.value]);
      });
      block_products<Format, kPieces, 1, kOutputs, kHighHalves>(
          [&](auto v, auto o) __attribute__((always_inline)) {
            return Bytes<Format>::template vector<v.value, kHighHalves>(packed[o.value]);
          },
          x, offsets + block * sizeof(i32v), 0, products);
      const f32v step = load_lanes(reinterpret_cast<const float*>(steps) + block * kLanes);
      unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
        // Keep this order, as in IntGemv.
        totals[o.value] += products[0][o.value] * step * lookup(of_groups[o.value], groups);
      });
      x += layout_.block_columns * kPieces;
    };
    const int64_t whole = units_ / kLanes;
    int64_t block = 0;
    while (block < whole) {
      load_scales(block * kLanes >> group_shift_);
      const int64_t first = block, loaded = int64_t{1} << group_shift_;  // blocks of kLanes groups
      for (; block < whole && block < first + loaded; ++block) {
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          for (int line = 0; line < kWords; ++line) {
            // The line of the last word: that of the first may belong to the previous block.
            __builtin_prefetch(w[o.value] + kAhead + (line + 1) * kLanes - 1, 0, 2);
          }
        });
        add(w, block,
            group_of_lane_ + static_cast<uint32_t>((block - first) * kLanes >> group_shift_));
        for (int o = 0; o < kOutputs; ++o) {
          w[o] += kLanes * kWords;
        }
      }
    }
    if (block < layout_.blocks) {
      uint32_t padded[kOutputs][kWords * kLanes];
      unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
        copy_with_zeros<kWords>(w[o.value], (units_ - block * kLanes) * kWords, padded[o.value]);
        w[o.value] = padded[o.value];
      });
      load_scales(block * kLanes >> group_shift_);
      add(w, block, group_of_lane_);
    }
    if constexpr (Format::kHasBiases) {
      const char* const sums_of_x = row + layout_.sums_at();
      for (int64_t g = 0; g < layout_.groups; g += kLanes) {
        const f32v of_x = load_lanes(reinterpret_cast<const float*>(sums_of_x) + g);
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          const int64_t given = layout_.groups - g;
          f32v bias = widen_given(biases[o.value] + g, given, widen);
          if constexpr (Bytes<Format>::kOffset != 0) {
            bias += widen_given(scales[o.value] + g, given, widen) *
                    static_cast<float>(Bytes<Format>::kOffset);
          }
          totals[o.value] += bias * of_x;
        });
      }
    }
    const f32v results = sums_of_lanes<kOutputs>(totals) * Format::kFactor;
    for (int o = 0; o < kOutputs && n + o < args_.count; ++o) {
      args_.out[n + o] = results[o];
    }
  }

  // The scales or biases of later rows, which lie one after the other.
  template <class Scale>
  void prefetch_rows(const Scale* numbers) const {
    const char* const from = reinterpret_cast<const char*>(numbers) + 8192;
    const int64_t bytes = kOutputs * layout_.groups * static_cast<int64_t>(sizeof(Scale));
    for (int64_t byte = 0; byte < bytes; byte += 64) {
      __builtin_prefetch(from + byte, 0, 2);
    }
  }

  const QuantizedGemvArgs& args_;
  const IntRowLayout layout_;
  const int64_t units_, units_per_group_;
  const int group_shift_;
  u32v group_of_lane_;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
