// Keys or values of a tile, multiplied in integers. For kernel files only (see common/simd/simd.h).
#pragma once

#include "flash_attention/simd/integer_scores.h"
#include "flash_attention/simd/integer_values.h"
#include "flash_attention/simd/quantized_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Calls action(format) if the format has integers; returns whether it does.
template <class Action>
inline bool with_integer_format(const QuantizedFormat& format, Action action) {
  bool has = false;
  with_format(format, [&](auto type) {
    if constexpr (IntegerCodes<decltype(type)>::kHas) {
      has = true;
      action(type);
    }
  });
  return has;
}

// The scales and biases of a tile, by group instead of by row.
class IntegerTile {
 public:
  IntegerTile(Arena& arena, const QuantizedTile& tile, int64_t most_rows)
      : tile_(tile), stride_(round_up(most_rows, kPanel)) {
    has_format_ = with_integer_format(tile.format(), [&](auto format) {
      factor_ = IntegerCodes<decltype(format)>::kFactor;
      zero_ = IntegerCodes<decltype(format)>::kZero;
    });
    if (has_format_) {
      const int64_t count = stride_ * tile.numbers().groups;
      scales_ = arena.take<float>(count);
      biases_ = arena.take<float>(count);
    }
  }

  bool has_format() const { return has_format_; }

  // True if all formats and numbers of the tile are such that integers serve it.
  bool usable() const { return usable_; }

  IntegerNumbers numbers() const {
    return {scales_, biases_, stride_, tile_.numbers().groups, tile_.format().group};
  }

  // Reads the tile's numbers.
  void read() {
    usable_ = has_format_;
    if (!has_format_) {
      return;
    }
    const GroupNumbers& from = tile_.numbers();
    const uint32_t largest = from.biases ? by_group<true>(from) : by_group<false>(from);
    usable_ = largest < kInfinityBits;
  }

 private:
  // Returns the largest magnitude, as bits.
  template <bool kBiases>
  uint32_t by_group(const GroupNumbers& from) {
    u32v largest = {};
    const auto add = [&](f32v x) {
      const u32v magnitude = bits_as<u32v>(absolute(x));
      largest = magnitude > largest ? magnitude : largest;
    };
    const int64_t count = tile_.count(), groups = from.groups;
    if (groups == 2) {
      for (int64_t i = 0; i < count; i += kLanes) {
        store_group_pair<kBiases>(from, i, add);
      }
      return largest_bits(largest);
    }
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t some = smaller(count - i, kLanes), at = i * groups + g;
        const f32v scale = load_columns(from.scales + at, groups, 0, some);
        add(scale);
        store_lanes(scales_ + g * stride_ + i, scale * factor_);
        f32v bias = scale * zero_;
        if constexpr (kBiases) {
          bias = load_columns(from.biases + at, groups, 0, some);
          add(bias);
        }
        store_lanes(biases_ + g * stride_ + i, bias);
      }
    }
    return largest_bits(largest);
  }

  // Of two groups, for rows [i, i + kLanes). Past the last row, the numbers are 0.
  template <bool kBiases, class Add>
  void store_group_pair(const GroupNumbers& from, int64_t i, Add add) {
    const int64_t left = 2 * (tile_.count() - i);
    const auto split = [&](const float* numbers, f32v(&groups)[2]) {
      const f32v a = load_columns(numbers + 2 * i, 1, 0, left);
      const f32v b = left > kLanes ? load_columns(numbers + 2 * i, 1, kLanes, left) : f32v{};
      constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
      groups[0] = bits_as<f32v>(every_second<0>(bits_as<u32v>(a), bits_as<u32v>(b), kAll));
      groups[1] = bits_as<f32v>(every_second<1>(bits_as<u32v>(a), bits_as<u32v>(b), kAll));
    };
    f32v scales[2], biases[2];
    split(from.scales, scales);
    if constexpr (kBiases) {
      split(from.biases, biases);
    }
    for (int g = 0; g < 2; ++g) {
      add(scales[g]);
      store_lanes(scales_ + g * stride_ + i, scales[g] * factor_);
      if constexpr (kBiases) {
        add(biases[g]);
      } else {
        biases[g] = scales[g] * zero_;
      }
      store_lanes(biases_ + g * stride_ + i, biases[g]);
    }
  }

  const QuantizedTile& tile_;
  const int64_t stride_;
  float factor_ = 1, zero_ = 0;
  float *scales_ = nullptr, *biases_ = nullptr;
  bool has_format_ = false, usable_ = false;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
