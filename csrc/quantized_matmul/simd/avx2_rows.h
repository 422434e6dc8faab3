// Rows of x for integer GEMV on AVX2 (avx2_gemv.cpp). For kernel files only, and only where
// entries.h defines MLX_ANVIL_AVX2_PRODUCTS.
//   x ~= step * X,  X one signed byte; one word; or X0 + 65536 X1, both words
// with one step per lane of a run (avx2_codes.h).
#pragma once

#include "quantized_matmul/simd/avx2_codes.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Codes that straddle bytes take fewer instructions as words.
template <class Format, int kPieces>
using Avx2RowElements = Avx2Elements<Format, kPieces, (Format::kLaneColumns > 4)>;

// Layout of a packed row: runs, and for affine formats the sum of X times its step for each group.
// A run has the vectors of X, the second words after all first ones, then by lanes the steps, and
// the corrections for the offset of codes.
template <class Elements>
struct Avx2RowLayout {
  static constexpr int kParts = Elements::kPieces == 3 ? 2 : 1;
  static constexpr int64_t kVector = 32;
  static constexpr int64_t kStepsAt = kParts * Elements::kVectors * kVector;
  static constexpr int64_t kCorrectionsAt = kStepsAt + kVector;
  static constexpr int64_t kRunBytes = kCorrectionsAt + (Elements::kOffset != 0 ? kVector : 0);

  int64_t columns, group, runs;

  explicit Avx2RowLayout(const QuantizedMatrixView& matrix)
      : columns(matrix.columns),
        group(matrix.format.group),
        runs((columns + Elements::kRunColumns - 1) / Elements::kRunColumns) {}

  int64_t groups() const { return columns / group; }
  int64_t sums_at() const { return runs * kRunBytes; }
  int64_t bytes() const {
    const int64_t sums = Elements::Format::kHasBiases ? padded(groups()) : 0;
    return (sums_at() + sums * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
  }
};

// Packs a row of x, which has zeros up to the end of its last run. Returns false if an element is
// not finite; `to` is then undefined.
template <class Elements>
bool pack_avx2_row(const QuantizedMatrixView& matrix, const float* x, char* to) {
  using Format = typename Elements::Format;
  using Layout = Avx2RowLayout<Elements>;
  constexpr int kLaneColumns = Format::kLaneColumns, kBits = 32 / Elements::kPerLane;
  const Layout layout(matrix);
  float* const sums = reinterpret_cast<float*>(to + layout.sums_at());
  if constexpr (Format::kHasBiases) {
    std::memset(sums, 0, padded(layout.groups()) * sizeof(float));
  }
  const __m256i lanes = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                           _mm256_set1_epi32(kLaneColumns));
  for (int64_t run = 0; run < layout.runs; ++run, to += Layout::kRunBytes) {
    const int64_t first = run * Elements::kRunColumns;
    f32v numbers[kLaneColumns];
    Largest largest;
    for (int i = 0; i < kLaneColumns; ++i) {
      numbers[i] = bits_as<f32v>(_mm256_i32gather_ps(x + first + i, lanes, 4));
      largest.add(numbers[i]);
    }
    if (!largest.finite()) {
      return false;
    }
    const IntSteps<Elements::kPieces> steps(largest.value());
    i32v integers[kLaneColumns], sum{};
    for (int i = 0; i < kLaneColumns; ++i) {
      integers[i] = rounded(numbers[i] * steps.factor);
      sum += integers[i];
    }
    for (int part = 0; part < Layout::kParts; ++part) {
      for (int v = 0; v < Elements::kVectors; ++v) {
        u32v elements{};
        for (int i = 0; i < Elements::kPerLane; ++i) {
          i32v& integer = integers[Elements::code(v, i)];
          elements |= (bits_as<u32v>(integer) & ((1u << kBits) - 1)) << (kBits * i);
          // A word with its top bit set is 65536 less as a signed one.
          integer = (integer + 0x8000) >> 16;
        }
        std::memcpy(to + (part * Elements::kVectors + v) * Layout::kVector, &elements,
                    sizeof(elements));
      }
    }
    store_lanes(reinterpret_cast<float*>(to + Layout::kStepsAt), steps.step);
    if constexpr (Elements::kOffset != 0) {
      const i32v correction = sum * -Elements::kOffset;
      std::memcpy(to + Layout::kCorrectionsAt, &correction, sizeof(correction));
    }
    if constexpr (Format::kHasBiases) {
      // Biases multiply the rounded x, as in int_rows.h.
      const f32v of_lanes = __builtin_convertvector(sum, f32v) * steps.step;
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t column = first + lane * kLaneColumns;
        if (column < layout.columns) {
          sums[column / layout.group] += of_lanes[lane];
        }
      }
    }
  }
  return true;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
