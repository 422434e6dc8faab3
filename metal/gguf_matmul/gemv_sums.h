// Products of up to kRows rows of x with rows of GGUF's blocks: what gemv.h defines for other
// formats. A lane takes chunks, so that neighbouring lanes load neighbouring bytes.
//
//   for each chunk of this lane:
//     load the codes of kStreams rows of w
//     for each side of the chunk, 16 columns with one scale:
//       for each piece of 8 codes:
//         unpack kStreams x 8 codes; load 8 elements of each row of x
//         dots[m][s] += codes * x; sums[m] += x
//       totals[m][s] += scale * dots[m][s] + bias * sums[m]
#pragma once

#include "metal/gguf_matmul/rows.h"
#include "metal/quantized_matmul/gemv.h"

template <typename T, typename Codes, int kRows>
struct GemvSums<T, GgufFormat<Codes>, kRows> {
  enum { kChunk = 16 * Codes::kSides, kStreams = GemvStreams<kRows>::kCount };
  enum { kHigh = 4 * Codes::kHasHigh, kWords = 4 + kHigh };
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
  METAL_FUNC void add(const thread WeightRow<T, GgufFormat<Codes>>* streams,
                      const device T* x,
                      constant QuantizedParams& params,
                      GemvPlace place) thread {
    enum { kChunks = Codes::kColumns / kChunk };  // of a block
    const uint first_x = gemv_row(place, 0, params);
    const int last_row = params.rows - 1 - place.first_row;
    for (int chunk = place.first_chunk; kChunk * chunk < params.columns;
         chunk += place.chunk_step) {
      const uint index = uint(chunk) / kChunks, own = uint(chunk) % kChunks;
      const device uchar* blocks[kStreams];
      uint words[kStreams][kWords];
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kStreams; ++s) {
        blocks[s] = streams[s].block(index);
        Codes::template load<4>(blocks[s], own, 0, words[s]);
      }
      MLX_ANVIL_UNROLL
      for (int side = 0; side < Codes::kSides; ++side) {
        const uint unit = Codes::unit(own, side);
        add_unit(blocks, words, unit, side, x, first_x + index * Codes::kColumns + 16 * unit,
                 last_row, params);
      }
    }
  }

  METAL_FUNC float sum_of_lanes(uint lane) const thread {
    return sum_of_lanes_of<kRows, kStreams>(totals, lane);
  }

 private:
  // `at` is the element of x at the unit's first column, in this lane's first row.
  METAL_FUNC void add_unit(const thread device uchar* const* blocks,
                           const thread uint (*words)[kWords],
                           uint unit,
                           int side,
                           const device T* x,
                           uint at,
                           int last_row,
                           constant QuantizedParams& params) thread {
    float dots[kRows][kStreams] = {};
    float sums[kRows] = {};  // of x
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < 2; ++piece) {
      float v[kStreams][8];
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kStreams; ++s) {
        Codes::values(words[s] + 2 * piece, words[s] + 2 * piece + kHigh, side, v[s]);
      }
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        float elements[8];
        load_eight(x, at + uint(metal::min(m, last_row) * params.columns + 8 * piece), elements);
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
      const float2 factors = Codes::factors(blocks[s], unit);
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        totals[m][s] = metal::fma(factors.x, Codes::factor() * dots[m][s], totals[m][s]);
        if (Codes::kHasMins) {
          totals[m][s] = metal::fma(factors.y, sums[m], totals[m][s]);
        }
      }
    }
  }
};
