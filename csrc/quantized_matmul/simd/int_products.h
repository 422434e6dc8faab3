// Products of tiles of rows of x and panels of w as bytes, shared by the integer GEMMs
// (int_gemm.cpp, int_plain_gemm.cpp). For kernel files only, and only on machines with VNNI.
//
// The summed dimension is split into runs of 16 elements: 4 words of 4 bytes. Each lane of a vector
// of w holds a word of one element of the result. A word of x is broadcast to all lanes.
//
//   w:  [run][word][vectors]                 codes, which are not negative
//   x:  [run][row of the tile][word][piece]  signed bytes
#pragma once

#include "common/simd/panels.h"
#include "quantized_matmul/simd/int_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int kRun = 16, kRunWords = kRun / 4;
// Elements summed per chunk, so that the bytes of a panel stay in L1. A multiple of every group
// size.
constexpr int64_t kChunk = 256;

// Rows of x per tile. With more, sums would not stay in registers between groups.
template <int kPieces>
inline constexpr int kIntTileRows = kPieces == 1 ? 4 : 2;

// Calls action(rows of the next tile), given that `left` rows are left.
template <int kPieces, class Action>
inline void with_tile_rows(int64_t left, Action action) {
  unroll<kIntTileRows<kPieces>>([&](auto fewer) {
    constexpr int kRows = fewer.value + 1;
    if (kRows == kIntTileRows<kPieces> ? left >= kRows : left == kRows) {
      action(std::integral_constant<int, kRows>());
    }
  });
}

// Reads scales or biases of up to kLanes rows from `row` on: one vector of rows per group, from
// `group` on. Missing rows and groups are zero.
inline void read_scales(const QuantizedMatrixView& matrix,
                        const void* numbers,
                        int64_t row,
                        int64_t rows,
                        int64_t group,
                        f32v (&to)[kLanes]) {
  const int64_t groups = matrix.columns / matrix.format.group;
  with_scales(matrix, numbers, [&](const auto* from, auto widen) {
    for (int i = 0; i < kLanes; ++i) {
      to[i] =
          i < rows ? widen_some(from + (row + i) * groups + group, groups - group, widen) : f32v{};
    }
  });
  transpose(to);
}

// ---- x ------------------------------------------------------------------------------------------

// Splits integers into kPieces bytes.
template <int kPieces>
class RunPacker {
 public:
  // element(word, byte) is the element of the run that goes there.
  template <class Element>
  explicit RunPacker(Element element) {
    for (int word = 0; word < kRunWords; ++word) {
      for (int piece = 0; piece < kPieces; ++piece) {
        for (int b = 0; b < 4; ++b) {
          places_[(word * kPieces + piece) * 4 + b] =
              static_cast<uint8_t>(element(word, b) * 4 + piece);
        }
      }
    }
  }

  // Packs run `run` of row m of a tile.
  void pack(i32v integers, char* tile, int64_t run, int m) const {
    // A byte with its top bit set is 256 less as a signed byte, so the byte above it must be one
    // more.
    constexpr uint32_t kCarry = kPieces == 1 ? 0u : kPieces == 2 ? 0x80u : 0x8080u;
    constexpr __mmask16 kWords = (1u << (kRunWords * kPieces)) - 1;
    const u32v pieces = (bits_as<u32v>(integers) + kCarry) ^ kCarry;
    const __m512i words =
        _mm512_permutexvar_epi8(_mm512_load_si512(places_), bits_as<__m512i>(pieces));
    _mm512_mask_storeu_epi32(tile + (run * kIntTileRows<kPieces> + m) * kRun * kPieces, kWords,
                             words);
  }

  // Initial sum of each piece: -offset times the sum of the integers, so that codes count relative
  // to `offset`.
  static void start(int32_t offset, int32_t sum, int32_t (&to)[kPieces]) {
    for (int piece = 0; piece < kPieces - 1; ++piece, sum >>= 8) {
      to[piece] = -offset * (sum & 0xff);
    }
    to[kPieces - 1] = -offset * sum;
  }

 private:
  alignas(64) uint8_t places_[64] = {};
};

// ---- sums ---------------------------------------------------------------------------------------

template <int kPieces, int kRows, int kVectors>
using TileSums = i32v[kRows][kPieces][kVectors];

template <int kPieces, int kRows, int kVectors>
MLX_ANVIL_UNROLLED void start_sums(const int32_t (*start)[kPieces],
                                   TileSums<kPieces, kRows, kVectors>& sums) {
  for (int m = 0; m < kRows; ++m) {
    for (int piece = 0; piece < kPieces; ++piece) {
      for (int v = 0; v < kVectors; ++v) {
        sums[m][piece][v] = i32v{} + start[m][piece];
      }
    }
  }
}

// Accumulates `runs` runs, and advances x and w past them.
template <int kPieces, int kRows, int kVectors>
MLX_ANVIL_UNROLLED void add_runs(const char*& x,
                                 const uint8_t*& w,
                                 int64_t runs,
                                 TileSums<kPieces, kRows, kVectors>& sums) {
  for (int64_t run = 0; run < runs; ++run) {
    unroll<kRunWords>([&](auto word) __attribute__((always_inline)) {
      __m512i codes[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        codes[v] = _mm512_loadu_si512(w + (word.value * kVectors + v) * 64);
      }
      for (int m = 0; m < kRows; ++m) {
        for (int piece = 0; piece < kPieces; ++piece) {
          int32_t bytes;
          std::memcpy(&bytes, x + ((m * kRunWords + word.value) * kPieces + piece) * 4, 4);
          for (int v = 0; v < kVectors; ++v) {
            i32v& sum = sums[m][piece][v];
            sum = bits_as<i32v>(
                _mm512_dpbusd_epi32(bits_as<__m512i>(sum), codes[v], _mm512_set1_epi32(bytes)));
          }
        }
      }
    });
    w += kRunWords * kVectors * 64;
    x += kIntTileRows<kPieces> * kRunWords * kPieces * 4;
  }
}

// Combines the sums of all pieces, over at most kChunk elements.
template <int kPieces, int kVectors>
MLX_ANVIL_UNROLLED f32v in_floats(const i32v (&sums)[kPieces][kVectors], int v) {
  if constexpr (kPieces == 1) {
    return __builtin_convertvector(sums[0][v], f32v);
  } else {
    const i32v high = (sums[kPieces - 1][v] << 8) + sums[kPieces - 2][v];
    f32v sum = __builtin_convertvector(high, f32v);
    if constexpr (kPieces == 3) {
      sum = sum * 256.0f + __builtin_convertvector(sums[0][v], f32v);
    }
    return sum;
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
