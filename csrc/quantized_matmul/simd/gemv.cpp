// GEMV: out[m, n] = sum over k of x[m, k] W[n, k] for up to 8 rows m. Each word of w is read once
// for all rows. A row takes the same steps whatever the number of rows, so its bits do not depend
// on it.
//
//   for each row n of w:
//     read its scales and biases
//     for each block (one unit per lane):
//       sum[m] = sum of code * x[m] over the codes of the unit
//       total[m] += scale * sum[m] + bias * (sum of x[m])
//     out[m, n] = lane sum of total[m]
#include <type_traits>

#include "quantized_matmul/simd/entries.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Rows of w are contiguous in memory: prefetch this far ahead.
constexpr int64_t kAheadWords = 8192 / sizeof(uint32_t);

// Multiplies one row of w, whose scales have been read. Returns false if Format does not cover one
// of its codes (NaN).
template <class Format, int kRows>
bool multiply_row(const QuantizedGemvArgs& args,
                  const uint32_t* w,
                  const RowScales& scales,
                  f32v (&total)[kRows]) {
  for (f32v& sum : total) {
    sum = f32v{};
  }
  u32v nans{};
  using BlockUnits = Units<Format::kBits>;
  constexpr int kValues = BlockUnits::kValues, kWords = BlockUnits::kWords;
  const int64_t units = args.matrix.columns / kValues;
  const int64_t blocks = (units + kLanes - 1) / kLanes;
  const int64_t x_step = blocks * kValues * kLanes, sums_step = blocks * kLanes;
  for (int64_t block = 0; block < blocks; ++block) {
    BlockUnits codes;
    const uint32_t* const from = w + block * kLanes * kWords;
    codes.load(from, units - block * kLanes);
    for (int line = 0; line < kWords; ++line) {
      __builtin_prefetch(from + kAheadWords + line * kLanes, 0, 2);
    }
    if constexpr (std::is_same_v<Format, FiniteE4m3>) {
      nans |= Format::nan_bytes(codes.words[0]);
    }
    f32v sum[kRows] = {};
    const float* const x_block = args.x + block * kValues * kLanes;
    unroll<kValues>([&](auto i) {
      const f32v value = Format::value(codes.template shifted<i.value>());
      for (int m = 0; m < kRows; ++m) {
        sum[m] += value * load_lanes(x_block + m * x_step + i.value * kLanes);
      }
    });
    const f32v scale = scales.scale(block);
    for (int m = 0; m < kRows; ++m) {
      total[m] += scale * sum[m];
    }
    if constexpr (Format::kHasBiases) {
      const f32v bias = scales.bias(block);
      for (int m = 0; m < kRows; ++m) {
        total[m] += bias * load_lanes(args.sums + m * sums_step + block * kLanes);
      }
    }
  }
  return !any_top_bit_of_bytes(nans);
}

template <class Format, int kRows>
void gemv(const QuantizedGemvArgs& args) {
  const QuantizedMatrixView& matrix = args.matrix;
  const int64_t words = matrix.columns * Format::kBits / 32;
  RowScales scales(matrix, Units<Format::kBits>::kValues, args.scratch);
  for (int64_t n = 0; n < args.count; ++n) {
    const uint32_t* const w = matrix.weights.w + (args.first + n) * words;
    scales.read(args.first + n);
    f32v total[kRows];
    constexpr bool kFiniteFirst = std::is_same_v<Format, E4m3>;
    using Usual = std::conditional_t<kFiniteFirst, FiniteE4m3, Format>;
    if (!multiply_row<Usual>(args, w, scales, total)) {
      multiply_row<Format>(args, w, scales, total);
    }
    for (int m = 0; m < kRows; ++m) {
      args.out[m * args.count + n] = lane_sum(total[m]);
    }
  }
}

}  // namespace

void quantized_gemv_kernel(const QuantizedGemvArgs& args) {
  with_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    switch (args.x_rows) {
      case 1:
        return gemv<Format, 1>(args);
      case 2:
        return gemv<Format, 2>(args);
      case 4:
        return gemv<Format, 4>(args);
      default:
        return gemv<Format, 8>(args);
    }
  });
}

int64_t quantized_gemv_scratch(const QuantizedMatrixView& matrix) {
  return RowScales::scratch(matrix);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
