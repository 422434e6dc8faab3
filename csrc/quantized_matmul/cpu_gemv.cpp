// out[m, n] = sum over k of x[m, k] W[n, k] for up to 8 rows m: each word of w is read once for all
// of them. Per block, in lanes: total += scale * sum(code * x) + bias * sum(x).
//
// Every number of rows takes the same steps for each row, so that a row's result does not depend on
// how many others there are.
#include "quantized_matmul/cpu_entries.h"
#include "quantized_matmul/cpu_unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

inline float sum_of_lanes(f32v x) {
  float lanes[kLanes];
  store_lanes(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] += lanes[i + half];
    }
  }
  return lanes[0];
}

template <class Format, int kRows>
void gemv(const QuantizedGemvArgs& args) {
  using BlockUnits = Units<Format::kBits>;
  constexpr int kValues = BlockUnits::kValues, kWords = BlockUnits::kWords;
  const QuantizedMatrixView& matrix = args.matrix;
  const int64_t units = matrix.columns / kValues;
  const int64_t blocks = (units + kLanes - 1) / kLanes;
  const int64_t x_step = blocks * kValues * kLanes, sums_step = blocks * kLanes;
  RowScales scales(matrix, kValues, args.scratch);

  for (int64_t n = 0; n < args.count; ++n) {
    const uint32_t* const w = matrix.weights.w + (args.first + n) * units * kWords;
    scales.read(args.first + n);
    f32v total[kRows] = {};
    for (int64_t block = 0; block < blocks; ++block) {
      BlockUnits codes;
      codes.load(w + block * kLanes * kWords, units - block * kLanes);
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
    for (int m = 0; m < kRows; ++m) {
      args.out[m * args.count + n] = sum_of_lanes(total[m]);
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
