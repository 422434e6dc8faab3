// out[m, k] = sum over n of x[m, n] W[n, k] for one or two rows of x: the gradient of a decoding
// step. Each word of w is read once for both.
//
// Kernels: quantized_plain_<dtype>_<format>_r<rows>. Bindings: x, w, scales, biases (none: x in
// their place), out, params. Function constants: 0: of dequant.h; 2: whether the rows of w are in
// parts; out is then scratch memory of float32, [parts, batch, rows, K]. Grid: blocks of 1024
// columns x parts x batch. Threadgroup: 128 x 1 x 1, whose SIMD groups take turns with the rows of
// w. Arrays are dense; nothing else is assumed.
//
// quantized_sum_parts_<dtype> adds the parts up, in their order. Bindings: parts, out, params.
// Function constant 0: false. Grid: blocks of 128 elements of out. Threadgroup: 128.
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/params.h"

constant bool outputs_are_in_parts [[function_constant(2)]];

enum { kPlainSimdgroups = 4, kPlainThreads = 32 * kPlainSimdgroups, kPlainColumns = 32 * 32 };

template <typename T, typename Format, int kRows>
struct PlainSums {
  enum { kWords = Format::kPart * Format::kBits / 32 };
  float totals[kRows][32];  // of the lane's chunk

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kRows; ++m) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 32; ++i) {
        totals[m][i] = 0.0f;
      }
    }
  }

  // Adds x[m] times a row of w, from `column` on.
  METAL_FUNC void add(WeightRow<T, Format> row,
                      const thread float* x,
                      constant QuantizedParams& params,
                      int column) thread {
    MLX_ANVIL_UNROLL
    for (int part = 0; part < 32; part += Format::kPart) {
      if (column + part >= params.columns) {
        return;
      }
      uint words[kWords];
      load_words<kWords>(row.words + (column + part) / 16 * Format::kBits / 2, words);
      const float2 factors = scale_and_bias(row, (column + part) >> params.group_shift, words);
      MLX_ANVIL_UNROLL
      for (int piece = 0; piece < Format::kPart / 8; ++piece) {
        float v[8];
        Format::values(words, piece, v);
        MLX_ANVIL_UNROLL
        for (int m = 0; m < kRows; ++m) {
          const float scaled = factors.x * (Format::factor() * x[m]), shifted = factors.y * x[m];
          MLX_ANVIL_UNROLL
          for (int i = 0; i < 8; ++i) {
            thread float& total = totals[m][part + 8 * piece + i];
            total = metal::fma(v[i], scaled, total);
            if (Format::kHasBiases) {
              total += shifted;
            }
          }
        }
      }
    }
  }
};

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kPlainThreads)]] void quantized_plain(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  // Column 32 * l + i of a block is at [i][l]: lanes side by side, and a column more so that
  // neighbouring columns are not in one bank either.
  threadgroup float shares[kRows][32][33];
  const long batch = group.z;
  const int first_column = group.x * kPlainColumns;
  const int begin = group.y * params.rows_per_part;
  const int end = metal::min(begin + params.rows_per_part, params.outputs);
  const WeightRow<T, Format> first = {w, scales, biases};

  PlainSums<T, Format, kRows> sums;
  sums.clear();
  for (int n = begin + simdgroup; n < end; n += kPlainSimdgroups) {
    float elements[kRows];
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const long row = batch * params.rows + metal::min(m, params.rows - 1);
      elements[m] = static_cast<float>(x[row * params.outputs + n]);
    }
    sums.add(weight_row<T, Format>(first, batch * params.outputs + n, params.columns,
                                   params.group_shift),
             elements, params, first_column + 32 * lane);
  }

  for (uint turn = 0; turn < kPlainSimdgroups; ++turn) {
    if (simdgroup == turn) {
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < 32; ++i) {
          const float before = turn == 0 ? 0.0f : shares[m][i][lane];
          shares[m][i][lane] = before + sums.totals[m][i];
        }
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  const int columns = metal::min(int(kPlainColumns), params.columns - first_column);
  for (int m = 0; m < metal::min(kRows, params.rows); ++m) {
    for (int i = thread_index; i < columns; i += kPlainThreads) {
      const float total = shares[m][i % 32][i / 32];
      const long at = (batch * params.rows + m) * params.columns + first_column + i;
      if (outputs_are_in_parts) {
        const long size = long(groups.z) * params.rows * params.columns;
        reinterpret_cast<device float*>(out)[group.y * size + at] = total;
      } else {
        out[at] = static_cast<T>(total);
      }
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kPlainThreads)]] void quantized_sum_parts(
    const device float* parts [[buffer(0)]],
    device T* out [[buffer(1)]],
    constant QuantizedSumParams& params [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const long i = (long(group.y) * groups.x + group.x) * kPlainThreads + thread_index;
  if (i >= params.size) {
    return;
  }
  float sum = 0.0f;
  for (int part = 0; part < params.parts; ++part) {
    sum += parts[part * params.size + i];
  }
  out[i] = static_cast<T>(sum);
}

#define INSTANTIATE_PLAIN(name, format, dtype, type, rows)               \
  template [[host_name("quantized_plain_" #dtype "_" #name "_r" #rows)]] \
  [[kernel]] decltype(quantized_plain<type, format, rows>) quantized_plain<type, format, rows>;

#define INSTANTIATE_PLAIN_DTYPE(dtype, type)                     \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 1) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 2) \
  template [[host_name("quantized_sum_parts_" #dtype)]]          \
  [[kernel]] decltype(quantized_sum_parts<type>) quantized_sum_parts<type>;

INSTANTIATE_PLAIN_DTYPE(float32, float)
INSTANTIATE_PLAIN_DTYPE(float16, half)
INSTANTIATE_PLAIN_DTYPE(bfloat16, bfloat)
