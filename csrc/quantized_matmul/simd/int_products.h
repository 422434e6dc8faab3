// Products of tiles of rows of x and panels of w as bytes, shared by the integer GEMMs
// (int_gemm.cpp, int_plain_gemm.cpp). For kernel files only, and only on machines with VNNI.
//
// The summed dimension is split into runs of 16 elements: 4 words of 4 bytes. Each lane of a vector
// of w holds a word of one element of the result.
//
//   w:  [run][word][vectors]  codes: not negative, or for AMX relative to their offset
//   x:  as VnniTiles says, or AmxTiles (amx_tiles.h)
#pragma once

#include "common/simd/panels.h"
#include "quantized_matmul/simd/int_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int kRun = 16, kRunWords = kRun / 4;
// Elements summed per chunk, so that the bytes of a panel stay in L1. A multiple of every group
// size.
constexpr int64_t kChunk = 256;

// Rows of x per tile, at most.
constexpr int kMostTileRows = 16;

// ---- x ------------------------------------------------------------------------------------------

// A run of x as bytes: [word][piece][4], or with kByPiece [piece][word][4], lowest pieces first.
template <int kPieces, bool kByPiece>
class RunBytes {
 public:
  // element(word, byte) is the element of the run that goes there.
  template <class Element>
  explicit RunBytes(Element element) {
    for (int word = 0; word < kRunWords; ++word) {
      for (int piece = 0; piece < kPieces; ++piece) {
        const int at = kByPiece ? piece * kRunWords + word : word * kPieces + piece;
        for (int b = 0; b < 4; ++b) {
          places_[at * 4 + b] = static_cast<uint8_t>(element(word, b) * 4 + piece);
        }
      }
    }
  }

  // Splits integers into signed bytes.
  __m512i of(i32v integers) const {
    // A byte with its top bit set is 256 less as a signed byte, so the byte above it must be one
    // more.
    constexpr uint32_t kCarry = kPieces == 1 ? 0u : kPieces == 2 ? 0x80u : 0x8080u;
    const u32v pieces = (bits_as<u32v>(integers) + kCarry) ^ kCarry;
    return _mm512_permutexvar_epi8(_mm512_load_si512(places_), bits_as<__m512i>(pieces));
  }

 private:
  alignas(64) uint8_t places_[64] = {};
};

// Tiles of rows of x whose words are broadcast to the lanes of w:
//   x:  [run][row of the tile][word][piece]  signed bytes
template <int kPieces_>
struct VnniTiles {
  static constexpr int kPieces = kPieces_;
  // With more rows, sums would not stay in registers between groups.
  static constexpr int kRows = kPieces == 1 ? 4 : 2;
  static constexpr int64_t kMostBlock = kRun;  // elements multiplied at once
  static constexpr bool kSignedCodes = false;

  // Initial sum of each piece: -offset times the sum of the integers, so that codes count relative
  // to `offset`.
  struct Start {
    int32_t start[kRows][kPieces];

    void set(int64_t m, int32_t offset, int32_t sum) {
      for (int piece = 0; piece < kPieces - 1; ++piece, sum >>= 8) {
        start[m][piece] = -offset * (sum & 0xff);
      }
      start[m][kPieces - 1] = -offset * sum;
    }
  };

  struct Registers {
    explicit Registers(int64_t) {}
  };

  // Calls action(rows of the next tile), given that `left` rows are left.
  template <class Action>
  static void with_rows(int64_t left, Action action) {
    unroll<kRows>([&](auto fewer) {
      constexpr int kThese = fewer.value + 1;
      if (kThese == kRows ? left >= kThese : left == kThese) {
        action(std::integral_constant<int, kThese>());
      }
    });
  }

  class Packer {
   public:
    template <class Element>
    Packer(int64_t, Element element) : bytes_(element) {}

    // Packs run `run` of row m of a tile.
    void pack(i32v integers, char* tile, int64_t run, int64_t m) const {
      constexpr __mmask16 kWords = (1u << (kRunWords * kPieces)) - 1;
      _mm512_mask_storeu_epi32(tile + (run * kRows + m) * kRun * kPieces, kWords,
                               bytes_.of(integers));
    }

   private:
    const RunBytes<kPieces, false> bytes_;
  };
};

// ---- w ------------------------------------------------------------------------------------------

// Stores a vector of codes, as Tiles takes them.
template <class Format, class Tiles>
MLX_ANVIL_UNROLLED void store_codes(u32v codes, uint8_t* to) {
  __m512i bytes = bits_as<__m512i>(codes);
  if constexpr (Tiles::kSignedCodes && Format::kOffset != 0) {
    bytes = _mm512_sub_epi8(bytes, _mm512_set1_epi8(static_cast<char>(Format::kOffset)));
  }
  _mm512_storeu_si512(to, bytes);
}

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
    x += VnniTiles<kPieces>::kRows * kRunWords * kPieces * 4;
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
