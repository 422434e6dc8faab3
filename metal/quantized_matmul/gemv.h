// Products of up to kRows rows of x with rows of w. Reading w dominates (bandwidth-bound).
//
// A lane processes chunks of columns: it dequantises the codes of a few rows of w and multiplies
// them with all rows of x. Each row of x takes the same steps in the same order, so the bits of its
// result do not depend on the number of rows.
//
//   for each chunk of this lane:
//     load the packed words of kStreams rows of w
//     for each part of the chunk:
//       for each piece of 8 codes:
//         dequantise kStreams x 8 values; load 8 elements of each row of x
//         dots[m][s] += values * x; sums[m] += x
//       totals[m][s] += scale * dots[m][s] + bias * sums[m]
//   simd_sum each total; if columns are shared, add up the simdgroups in threadgroup memory
//   compute totals that have overflowed again                        (large_numbers.h)
#pragma once

#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/large_numbers.h"
#include "metal/quantized_matmul/params.h"

// True: the simdgroups of a threadgroup split the columns of the same rows of w. False: each
// simdgroup has different rows.
constant bool columns_are_shared [[function_constant(1)]];

enum { kGemvSimdgroups = 4, kGemvThreads = 32 * kGemvSimdgroups };

// Rows of w that a simdgroup processes at once, limited by registers.
template <int kRows>
struct GemvStreams {
  enum { kCount = kRows > 4 ? 2 : 4 };
};

// Where a simdgroup starts: row of x, row of w, chunk of columns. Rows are those of the batch.
struct GemvPlace {
  int batch;
  int first_row;
  int first_output;
  int first_chunk;
  int chunk_step;
};

// `outputs` is the number of rows of w per simdgroup.
METAL_FUNC GemvPlace gemv_place(uint3 group, uint simdgroup, uint lane, int rows, int outputs) {
  const int batch = group.z, row = int(group.y) * rows;
  if (columns_are_shared) {
    return {batch, row, int(group.x) * outputs, int(32 * simdgroup + lane), 32 * kGemvSimdgroups};
  }
  return {batch, row, int(group.x * kGemvSimdgroups + simdgroup) * outputs, int(lane), 32};
}

// Returns the first element of row place.first_row + m of x.
METAL_FUNC uint gemv_row(GemvPlace place, int m, constant QuantizedParams& params) {
  return (uint(place.batch) * uint(params.rows) + uint(place.first_row + m)) * uint(params.columns);
}

// Returns in lane i the sum over all lanes of total i = kStreams * row + stream.
template <int kRows, int kStreams>
METAL_FUNC float sum_of_lanes_of(const thread float (*totals)[kStreams], uint lane) {
  float mine = 0.0f;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRows * kStreams; ++i) {
    const float sum = metal::simd_sum(totals[i / kStreams][i % kStreams]);
    mine = int(lane) == i ? sum : mine;
  }
  return mine;
}

template <typename T, typename Format, int kRows>
struct GemvSums {
  enum { kChunk = Format::kChunk, kPart = Format::kPart };
  enum { kChunkWords = kChunk * Format::kBits / 32, kStreams = GemvStreams<kRows>::kCount };
  float totals[kRows][kStreams];

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kRows; ++m) {
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kStreams; ++s) {
        totals[m][s] = 0.0f;
      }
    }
  }

  // Accumulates this lane's columns. Rows of x past the last repeat the last one.
  METAL_FUNC void add(const thread WeightRow<T, Format>* streams,
                      const device T* x,
                      constant QuantizedParams& params,
                      GemvPlace place) thread {
    const uint first_x = gemv_row(place, 0, params);
    const int last_row = params.rows - 1 - place.first_row;
    for (int chunk = place.first_chunk; kChunk * chunk < params.columns;
         chunk += place.chunk_step) {
      const int begin = kChunk * chunk;
      uint words[kStreams][kChunkWords];
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kStreams; ++s) {
        load_codes<Format, kChunk>(streams[s], begin, params.columns, words[s]);
      }
      MLX_ANVIL_UNROLL
      for (int part = 0; part < kChunk; part += kPart) {
        if (part == 0 || begin + part < params.columns) {
          add_part(streams, words, part, x, first_x, last_row, params, begin + part);
        }
      }
    }
  }

  METAL_FUNC float sum_of_lanes(uint lane) const thread {
    return sum_of_lanes_of<kRows, kStreams>(totals, lane);
  }

 private:
  // `column` is the first column of the part, whose codes start at code `part` of the words.
  METAL_FUNC void add_part(const thread WeightRow<T, Format>* streams,
                           const thread uint (*chunks)[kChunkWords],
                           int part,
                           const device T* x,
                           uint first_x,
                           int last_row,
                           constant QuantizedParams& params,
                           int column) thread {
    const int first_word = part * Format::kBits / 32;
    float dots[kRows][kStreams] = {};
    float sums[kRows] = {};  // of x
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < kPart / 8; ++piece) {
      float v[kStreams][8];
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kStreams; ++s) {
        Format::values(chunks[s] + first_word, piece, v[s]);
      }
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        float elements[8];
        load_eight(x, first_x + uint(metal::min(m, last_row) * params.columns + column + 8 * piece),
                   elements);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < 8; ++i) {
          MLX_ANVIL_UNROLL
          for (int s = 0; s < kStreams; ++s) {
            dots[m][s] = metal::fma(v[s][i], elements[i], dots[m][s]);
          }
          sums[m] += elements[i];
        }
      }
    }
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kStreams; ++s) {
      const float2 factors = scale_and_bias_of_sum<kPart>(streams[s], column >> params.group_shift,
                                                          chunks[s] + first_word);
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        totals[m][s] = metal::fma(factors.x, Format::factor() * dots[m][s], totals[m][s]);
        if (Format::kHasBiases) {
          totals[m][s] = metal::fma(factors.y, sums[m], totals[m][s]);
        }
      }
    }
  }
};

METAL_FUNC bool stores_results(uint simdgroup) {
  return !columns_are_shared || simdgroup == 0;
}

// Returns total i of all columns in lane i: of the first simdgroup if columns are shared, else of
// each. `matrices` has the rows of w: stream(s, place, params).
template <typename T, typename Format, int kRows, typename Matrices>
METAL_FUNC float gemv_totals(Matrices matrices,
                             const device T* x,
                             constant QuantizedParams& params,
                             GemvPlace place,
                             uint simdgroup,
                             uint lane,
                             threadgroup float (*shares)[32]) {
  enum { kStreams = GemvStreams<kRows>::kCount };
  WeightRow<T, Format> streams[kStreams];
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kStreams; ++s) {
    streams[s] = matrices.stream(s, place, params);
  }
  GemvSums<T, Format, kRows> sums;
  sums.clear();
  sums.add(streams, x, params, place);
  float total = sums.sum_of_lanes(lane);
  if (columns_are_shared) {
    shares[simdgroup][lane] = total;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    total = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kGemvSimdgroups; ++i) {
      total += shares[i][lane];
    }
  }
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
  const int m = lane / kStreams;
  if (has_overflowed<T>(total) && stores_results(simdgroup) && place.first_row + m < params.rows) {
    constant QuantizedParams& again = (&params)[zero];
    place.batch += zero;
    total = product_in_units(matrices.stream(lane % kStreams, place, again), x, again,
                             gemv_row(place, m, again));
  }
  return total;
}

// Rows of one matrix. Rows past the last repeat the last one.
template <typename T, typename Format>
struct OneMatrix {
  WeightRow<T, Format> first;

  METAL_FUNC WeightRow<T, Format> stream(int s,
                                         GemvPlace place,
                                         constant QuantizedParams& params) const thread {
    const int output = metal::min(place.first_output + s, params.outputs - 1);
    return row_of_tile(first, uint(place.batch) * uint(params.outputs) + uint(output),
                       params.columns, params.group_shift);
  }
};

// The same for the rows of one matrix from place.first_output on; stream lane % kStreams is one
// row.
template <typename T, typename Format, int kRows>
METAL_FUNC float gemv_of_place(WeightRow<T, Format> first,
                               const device T* x,
                               constant QuantizedParams& params,
                               GemvPlace place,
                               uint simdgroup,
                               uint lane,
                               threadgroup float (*shares)[32]) {
  return gemv_totals<T, Format, kRows>(OneMatrix<T, Format>{first}, x, params, place, simdgroup,
                                       lane, shares);
}

// kPairs rows of gate, then the same rows of up. Rows past the last repeat the last one.
template <typename T, typename Format, int kPairs>
struct GateAndUp {
  WeightRow<T, Format> gate;
  WeightRow<T, Format> up;

  METAL_FUNC WeightRow<T, Format> stream(int s,
                                         GemvPlace place,
                                         constant QuantizedParams& params) const thread {
    const int output = metal::min(place.first_output + s % kPairs, params.outputs - 1);
    // Chosen one by one, pointers stay in registers.
    const bool of_gate = s < kPairs;
    const WeightRow<T, Format> first = {of_gate ? gate.words : up.words,
                                        of_gate ? gate.scales : up.scales,
                                        of_gate ? gate.biases : up.biases, 0, 0};
    return row_of_tile(first, uint(output), params.columns, params.group_shift);
  }
};
