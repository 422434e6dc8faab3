// x W for up to kRows rows of x: what a threadgroup of plain.metal does.
#pragma once

#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/large_numbers.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/parts.h"

enum { kPlainSimdgroups = 8, kPlainThreads = 32 * kPlainSimdgroups };

// Columns per lane: a chunk, or fewer so that the sums of all rows fit in 64 registers.
template <typename Format, int kRows>
struct PlainColumns {
  enum { kMost = 64 / kRows, kChunk = Format::kChunk, kCount = kMost < kChunk ? kMost : kChunk };
};

template <typename Format, int kRows>
struct PlainTotals {
  enum { kColumns = PlainColumns<Format, kRows>::kCount };
  enum { kPart = kColumns < Format::kPart ? kColumns : Format::kPart, kParts = kColumns / kPart };
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

template <typename T, typename Format, int kRows>
struct PlainSums : PlainTotals<Format, kRows> {
  using Totals = PlainTotals<Format, kRows>;
  enum { kColumns = Totals::kColumns, kPart = Totals::kPart, kParts = Totals::kParts };
  enum { kWords = (kColumns * Format::kBits + 31) / 32 };

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
          this->shifts[m][part] = metal::fma(factors.y, x[m], this->shifts[m][part]);
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
            thread float& product = this->products[m][part * kPart + 8 * piece + i];
            product = metal::fma(v[i], scaled[m], product);
          }
        }
      }
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

// `first` is the first row of w. Adjacent lanes have adjacent shares for the same column. The
// padding to 33 avoids bank conflicts between adjacent columns of a lane.
template <typename T, typename Format, int kRows>
METAL_FUNC void plain_of_place(WeightRow<T, Format> first,
                               const device T* x,
                               device T* out,
                               constant QuantizedParams& params,
                               threadgroup float (*shares)[33],
                               uint3 group,
                               uint3 groups,
                               uint simdgroup,
                               uint lane,
                               uint thread_index) {
  enum { kColumns = PlainColumns<Format, kRows>::kCount, kBlock = 32 * kColumns };
  const long batch = group.z;
  const int first_column = group.x * kBlock, lane_column = first_column + kColumns * lane;
  const int begin = group.y * params.rows_per_part;
  const int end = metal::min(begin + params.rows_per_part, params.outputs);

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
        sums.add(
            weight_row(first, batch * params.outputs + n + i, params.columns, params.group_shift),
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
        total =
            total_in_units<T, Format>(first, x, m, first_column + i, group + zero, (&params)[zero]);
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
