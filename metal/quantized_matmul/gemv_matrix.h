// Products of up to 8 rows of x with rows of w of 4-bit codes, by matrix products of 16-bit
// numbers: for GPUs that have units for these, on which eight rows of x cost no more than one.
//
// Two fragments, of 8 rows of w each, meet the same columns of x. The columns of a fragment are
// dealt so that a lane's two elements are codes i and i + 4 of one word, which one mask gives, and
// that a group is whole fragments. So groups are summed up before their scale is applied, and all
// rows of x take the same steps, however many there are.
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/gemv.h"

// What a code is as a 16-bit number: with these bits around it, (code + kOffset) / factor().
template <typename T>
struct SmallCode;

// A subnormal number is an integer times 2^-24.
template <>
struct SmallCode<half> {
  enum { kBits = 0, kOffset = 0 };
  METAL_FUNC static float factor() { return 0x1p24f; }
};

// Too few bits of range for that: from 128 to 255, neighbours are one apart.
template <>
struct SmallCode<bfloat> {
  enum { kBits = 0x43004300, kOffset = 128 };
  METAL_FUNC static float factor() { return 1.0f; }
};

template <typename T, int kGroup>
struct GemvMatrixSums {
  enum { kMatrices = 2, kRows = 8, kColumns = 256 };           // of a step of a SIMD group
  enum { kGroups = kColumns / kGroup, kWords = kGroup / 32 };  // words: a lane's of a group
  enum { kStride = TileRow<T, kColumns>::kStride, kTileVectors = kRows * kStride / 8 };
  using Row = WeightRow<T, AffineFormat<4>>;

  FragmentPlace place;
  float2 totals[kMatrices];  // of w's row place.row and x's rows place.column and place.column + 1

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kMatrices; ++r) {
      totals[r] = float2(0.0f);
    }
  }

  // Adds the columns of the SIMD group. `rows`: the lane's, of both matrices. `vectors`:
  // room for its rows of x.
  METAL_FUNC void add(const thread Row (&rows)[kMatrices],
                      const device T* x,
                      threadgroup uint4 (&vectors)[kTileVectors],
                      constant QuantizedParams& params,
                      GemvPlace at,
                      uint lane) thread {
    const int row_count = metal::min(int(kRows), params.rows - at.first_row);
    for (int i = lane; i < kTileVectors; i += 32) {
      vectors[i] = uint4(0);
    }
    threadgroup T* tile = reinterpret_cast<threadgroup T*>(vectors);
    // A chunk of GemvPlace is a step here.
    const int steps = (params.columns + kColumns - 1) / kColumns;
    for (int step = at.first_chunk / 32; step < steps; step += at.chunk_step / 32) {
      const int begin = step * kColumns;
      uint words[kMatrices][kGroups][kWords];
      T scales[kMatrices][kGroups], biases[kMatrices][kGroups];
      MLX_ANVIL_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        load_group(rows, begin + g * kGroup, params.columns, g, words, scales, biases);
      }
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      for (int m = 0; m < row_count; ++m) {
        stage_row(x + long(at.first_row + m) * params.columns, begin, params.columns, lane,
                  tile + m * kStride);
      }
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      MLX_ANVIL_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        add_group(g, words, scales, biases, tile);
      }
    }
  }

 private:
  METAL_FUNC void load_group(const thread Row (&rows)[kMatrices],
                             int column,
                             int columns,
                             int g,
                             thread uint (&words)[kMatrices][kGroups][kWords],
                             thread T (&scales)[kMatrices][kGroups],
                             thread T (&biases)[kMatrices][kGroups]) const thread {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kMatrices; ++r) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kWords; ++i) {
        words[r][g][i] = 0;
      }
      scales[r][g] = biases[r][g] = T(0);
      if (column < columns) {
        load_words<kWords>(rows[r].words + column / 8 + place.column / 2 * kWords, words[r][g]);
        scales[r][g] = rows[r].scales[column / kGroup];
        biases[r][g] = rows[r].biases[column / kGroup];
      }
    }
  }

  // Deals the step's columns of a row of x, eight of a word to a lane; zeros beyond the last.
  METAL_FUNC void stage_row(
      const device T* x, int begin, int columns, uint lane, threadgroup T* to) const thread {
    const int column = begin + 8 * lane;
    uint4 raw = uint4(0);
    if (column < columns) {
      raw = *reinterpret_cast<const device uint4*>(x + column);
    }
    const uint pairs[4] = {(raw.x & 0xffffu) | raw.z << 16, raw.x >> 16 | (raw.z & 0xffff0000u),
                           (raw.y & 0xffffu) | raw.w << 16, raw.y >> 16 | (raw.w & 0xffff0000u)};
    const int word = lane % (4 * kWords), group = lane / (4 * kWords);
    const int first_fragment = 4 * (group * kWords + word % kWords);
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 4; ++f) {
      *reinterpret_cast<threadgroup uint*>(to + 8 * (first_fragment + f) + word / kWords * 2) =
          pairs[f];
    }
  }

  METAL_FUNC void add_group(int g,
                            thread uint (&words)[kMatrices][kGroups][kWords],
                            thread T (&scales)[kMatrices][kGroups],
                            thread T (&biases)[kMatrices][kGroups],
                            const threadgroup T* tile) thread {
    const Fragment<T> ones = fragment_of<T>(T(1), T(1));
    Fragment<float> x_sums = fragment_of<float>(0.0f, 0.0f);
    Fragment<float> sums[kMatrices];
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kMatrices; ++r) {
      sums[r] = x_sums;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4 * kWords; ++i) {
      Fragment<T> x;
      metal::simdgroup_load(x, tile + 8 * (4 * kWords * g + i), kStride, ulong2(0),
                            /*transpose=*/true);
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kMatrices; ++r) {
        const uint codes = words[r][g][i / 4] >> (4 * (i % 4)) & 0x000f000fu;
        const Pair<T> pair = metal::as_type<Pair<T>>(codes | uint(SmallCode<T>::kBits));
        metal::simdgroup_multiply_accumulate(sums[r], fragment_of<T>(pair.x, pair.y), x, sums[r]);
      }
      metal::simdgroup_multiply_accumulate(x_sums, ones, x, x_sums);
    }
    const float2 of_x = elements_of(x_sums);
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kMatrices; ++r) {
      const float2 of_codes =
          SmallCode<T>::factor() * elements_of(sums[r]) - float(SmallCode<T>::kOffset) * of_x;
      totals[r] +=
          static_cast<float>(scales[r][g]) * of_codes + static_cast<float>(biases[r][g]) * of_x;
    }
  }
};

// Totals of the lane, over all SIMD groups where these share columns.
template <typename T, int kGroup>
METAL_FUNC void add_shares(thread GemvMatrixSums<T, kGroup>& sums,
                           threadgroup float2 (*shares)[2][32],
                           uint simdgroup,
                           uint lane) {
  if (!columns_are_shared) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int r = 0; r < 2; ++r) {
    shares[simdgroup][r][lane] = sums.totals[r];
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  sums.clear();
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kGemvSimdgroups; ++i) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < 2; ++r) {
      sums.totals[r] += shares[i][r][lane];
    }
  }
}
