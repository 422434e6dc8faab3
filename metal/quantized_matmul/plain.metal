// Untransposed quantized product for up to 8 rows of x, as in the gradient of a decode step. Each
// word of w is read once for all rows.
//   out[m, k] = sum over n of x[m, n] W[n, k]
//
// Kernels: quantized_plain_<dtype>_<format>_r<rows>, for at most that many rows.
// Grid: (blocks of 32 * PlainColumns columns, parts, batch). Threadgroup: 256 x 1 x 1; its
// simdgroups take rows of w in turn, 32 at a time.
// Bindings: x, w, scales, biases (x in place of absent ones), out, params.
// Function constants: 0: see dequant.h; 2: the rows of w are split into parts (split-K). Then out
// is float32 scratch, [parts, batch, rows, K].
// Alignment: none beyond function constant 0. Arrays are dense.
//
//   for each 32 rows of w of this simdgroup:
//     load 32 elements of each row of x, one per lane
//     for each row n of w: broadcast x[m, n]; products[m] += (scale x[m, n]) * codes;
//                          shifts[m] += bias * x[m, n]
//   total = products + shifts; add up the simdgroups in threadgroup memory
//   compute totals that have overflowed again    (large_numbers.h)
//   store out, or the part
//
// Kernels: quantized_sum_parts_<dtype>, which adds up the parts in order.
// Grid: blocks of 256 elements of out. Threadgroup: 256.
// Bindings: parts, out, params. Function constant 0: false.
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/large_numbers.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/parts.h"

enum { kPlainSimdgroups = 8, kPlainThreads = 32 * kPlainSimdgroups };

// Columns per lane: a chunk, or fewer so that the sums of all rows fit in 64 registers.
template <typename Format, int kRows>
struct PlainColumns {
  enum { kMost = 64 / kRows, kChunk = Format::kChunk, kCount = kMost < kChunk ? kMost : kChunk };
};

template <typename T, typename Format, int kRows>
struct PlainSums {
  enum { kColumns = PlainColumns<Format, kRows>::kCount };
  enum { kPart = kColumns < Format::kPart ? kColumns : Format::kPart, kParts = kColumns / kPart };
  enum { kWords = (kColumns * Format::kBits + 31) / 32 };
  float products[kRows][kColumns];  // sums of x * scale * code
  float shifts[kRows][kParts];      // sums of x * bias, shared by all columns of a part

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kRows; ++m) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        products[m][i] = 0.0f;
      }
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kParts; ++i) {
        shifts[m][i] = 0.0f;
      }
    }
  }

  // Adds x[m] times a row of w, from `column` on.
  METAL_FUNC void add(WeightRow<T, Format> row,
                      const thread float* x,
                      constant QuantizedParams& params,
                      int column) thread {
    uint words[kWords];
    load_codes<Format, kColumns>(row, column, params.columns, words);
    MLX_ANVIL_UNROLL
    for (int part = 0; part < kParts; ++part) {
      const int begin = column + part * kPart;
      if (begin >= params.columns) {
        return;
      }
      const thread uint* own = words + part * kPart * Format::kBits / 32;
      const float2 factors = scale_and_bias(row, begin >> params.group_shift);
      float scaled[kRows];
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        scaled[m] = factors.x * (Format::factor() * x[m]);
        if (Format::kHasBiases) {
          shifts[m][part] = metal::fma(factors.y, x[m], shifts[m][part]);
        }
      }
      MLX_ANVIL_UNROLL
      for (int piece = 0; piece < kPart / 8; ++piece) {
        float v[8];
        values_or_nan<Format>(own, piece, v);
        MLX_ANVIL_UNROLL
        for (int m = 0; m < kRows; ++m) {
          MLX_ANVIL_UNROLL
          for (int i = 0; i < 8; ++i) {
            thread float& product = products[m][part * kPart + 8 * piece + i];
            product = metal::fma(v[i], scaled[m], product);
          }
        }
      }
    }
  }

  METAL_FUNC float total(int m, int i) const thread {
    return products[m][i] + shifts[m][i / kPart];
  }

  // Adds up the simdgroups: total(m, i) of lane l goes to [kColumns * m + i][l]. In each turn every
  // simdgroup works on a different share, so that none idles. The order per share is fixed.
  METAL_FUNC void reduce(threadgroup float (*shares)[33], uint simdgroup, uint lane) const thread {
    enum { kShare = kRows * kColumns / kPlainSimdgroups };
    MLX_ANVIL_NO_UNROLL
    for (uint turn = 0; turn < kPlainSimdgroups; ++turn) {
      MLX_ANVIL_UNROLL
      for (uint share = 0; share < kPlainSimdgroups; ++share) {
        if ((simdgroup + turn) % kPlainSimdgroups == share) {
          MLX_ANVIL_UNROLL
          for (int i = share * kShare; i < int(share + 1) * kShare; ++i) {
            const float before = turn == 0 ? 0.0f : shares[i][lane];
            shares[i][lane] = before + total(i / kColumns, i % kColumns);
          }
        }
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }
};

// Returns the total of row m of x and a column of w, for the part and batch of `group`.
template <typename T, typename Format>
METAL_FUNC float total_in_units(WeightRow<T, Format> first,
                                const device T* x,
                                int m,
                                int column,
                                uint3 group,
                                constant QuantizedParams& params) {
  const long batch = group.z;
  const int begin = group.y * params.rows_per_part;
  const int end = metal::min(begin + params.rows_per_part, params.outputs);
  return plain_product_in_units(first, batch * params.outputs, begin, end, column,
                                x + (batch * params.rows + m) * params.outputs, params);
}

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
  enum { kColumns = PlainColumns<Format, kRows>::kCount, kBlock = 32 * kColumns };
  // Adjacent lanes have adjacent words for the same column. The padding to 33 avoids bank conflicts
  // between adjacent columns of a lane.
  threadgroup float shares[kRows * kColumns][33];
  const long batch = group.z;
  const int first_column = group.x * kBlock, lane_column = first_column + kColumns * lane;
  const int begin = group.y * params.rows_per_part;
  const int end = metal::min(begin + params.rows_per_part, params.outputs);
  const WeightRow<T, Format> first = {w, scales, biases};

  PlainSums<T, Format, kRows> sums;
  sums.clear();
  const device T* first_x = x + batch * params.rows * params.outputs;
  for (int n = begin + 32 * simdgroup; n < end; n += 32 * kPlainSimdgroups) {
    const int count = metal::min(32, end - n);
    float elements[kRows];  // column n + lane of each row of x
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const long row = metal::min(m, params.rows - 1);
      elements[m] =
          static_cast<float>(first_x[row * params.outputs + n + metal::min(int(lane), count - 1)]);
    }
    for (int i = 0; i < count; ++i) {
      float own[kRows];
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        own[m] = metal::simd_broadcast(elements[m], ushort(i));
      }
      if (lane_column < params.columns) {
        sums.add(weight_row<T, Format>(first, batch * params.outputs + n + i, params.columns,
                                       params.group_shift),
                 own, params, lane_column);
      }
    }
  }

  sums.reduce(shares, simdgroup, lane);

  const uint zero = unknown_zero(lane);
  const int columns = metal::min(int(kBlock), params.columns - first_column);
  for (int m = 0; m < metal::min(kRows, params.rows); ++m) {
    for (int i = thread_index; i < columns; i += kPlainThreads) {
      float total = shares[m * kColumns + i % kColumns][i / kColumns];
      if (has_overflowed<T>(total)) {
        total = total_in_units<T, Format>({w, scales, biases}, x, m, first_column + i, group + zero,
                                          (&params)[zero]);
      }
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

// ---- kernels

#define INSTANTIATE_PLAIN(name, format, dtype, type, rows)         \
  MLX_ANVIL_KERNEL("quantized_plain_" #dtype "_" #name "_r" #rows, \
                   quantized_plain<type, format, rows>)

#define INSTANTIATE_PLAIN_DTYPE(dtype, type)                     \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 1) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 2) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 4) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 8) \
  MLX_ANVIL_KERNEL("quantized_sum_parts_" #dtype, quantized_sum_parts<type>)

INSTANTIATE_PLAIN_DTYPE(float32, float)
INSTANTIATE_PLAIN_DTYPE(float16, half)
INSTANTIATE_PLAIN_DTYPE(bfloat16, bfloat)
