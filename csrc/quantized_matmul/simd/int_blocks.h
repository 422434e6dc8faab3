// Blocks of a row of w in integer GEMV (int_gemv.cpp). For kernel files only, and only on machines
// with VNNI.
#pragma once

#include "quantized_matmul/simd/int_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Rows of w that are multiplied together.
constexpr int kIntGemvOutputs = 2;

// Rows of w are contiguous in memory: without strips, prefetch this far ahead.
constexpr int64_t kAheadWords = 8192 / sizeof(uint32_t);

// Sums codes times X for each lane's unit, for several rows of w and of x together. Rows of w share
// the loads of x, and independent sums hide the latency of each instruction. The loops are unrolled
// so that registers hold everything.
// codes(v, o) returns vector v of row o of w. With kHighHalves, odd vectors hold 16 times their
// codes, and are summed by themselves: that saves the shift of each vector, and halves the chain of
// dependent sums, but takes twice the registers.
template <class Format,
          int kPieces,
          int kTogether,
          int kOutputs,
          bool kHighHalves = false,
          class Codes>
MLX_ANVIL_UNROLLED void block_products(Codes codes,
                                       const char* x,
                                       const char* offsets,
                                       int64_t row_bytes,
                                       f32v (&products)[kTogether][kOutputs]) {
  constexpr int kVectors = Bytes<Format>::kVectors;
  // True if the combined sums of all pieces fit in 32 bits. Intermediate sums, which still contain
  // kOffset, may wrap around.
  constexpr int64_t kMost = Bytes<Format>::kMost;
  constexpr bool kFits = 4 * kVectors * kMost << (8 * kPieces - 1) <= int64_t{1} << 31;
  // One sum per piece.
  i32v sums[kTogether][kPieces][kOutputs] = {};
  if constexpr (Bytes<Format>::kOffset != 0) {
    static_assert(kFits);
    unroll<kTogether>([&](auto m) {
      unroll<kOutputs>([&](auto o) {
        sums[m.value][0][o.value] =
            load_bits<i32v>(reinterpret_cast<const int32_t*>(offsets + m.value * row_bytes));
      });
    });
  }
  i32v high[kTogether][kPieces][kOutputs] = {};
  unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
    u32v own[kOutputs];
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) { own[o.value] = codes(v, o); });
    unroll<kPieces>([&](auto piece) __attribute__((always_inline)) {
      unroll<kTogether>([&](auto m) __attribute__((always_inline)) {
        u32v bytes = load_bits<u32v>(reinterpret_cast<const uint32_t*>(
            x + m.value * row_bytes + (v.value * kPieces + piece.value) * 64));
        if constexpr (kOutputs > 1) {
          asm("" : "+v"(bytes));  // keeps it in a register; otherwise each use reloads it
        }
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          constexpr bool kHigh = kHighHalves && v.value % 2 == 1;
          i32v& sum = (kHigh ? high : sums)[m.value][piece.value][o.value];
          sum = with_products(sum, own[o.value], bytes);
        });
      });
    });
  });
  if constexpr (kHighHalves) {
    unroll<kTogether>([&](auto m) __attribute__((always_inline)) {
      unroll<kPieces>([&](auto piece) __attribute__((always_inline)) {
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          sums[m.value][piece.value][o.value] += high[m.value][piece.value][o.value] >> 4;
        });
      });
    });
  }
  constexpr int kLast = kFits ? 0 : 1;
  unroll<kTogether>([&](auto m) __attribute__((always_inline)) {
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
      const auto of_piece = [&](int piece) { return sums[m.value][piece][o.value]; };
      u32v sum = bits_as<u32v>(of_piece(kPieces - 1));
      for (int piece = kPieces - 2; piece >= kLast; --piece) {
        sum = (sum << 8) + bits_as<u32v>(of_piece(piece));
      }
      f32v& product = products[m.value][o.value];
      product = __builtin_convertvector(bits_as<i32v>(sum), f32v);
      if constexpr (!kFits) {
        product = product * 256.0f + __builtin_convertvector(of_piece(0), f32v);
      }
    });
  });
}

// By vectors: a call would make the loop around it keep its sums in memory.
template <int kWords>
MLX_ANVIL_UNROLLED void copy_with_zeros(const uint32_t* from, int64_t count, uint32_t* to) {
  for (int i = 0; i < kWords; ++i, count -= kLanes) {
    const uint32_t all = (1u << kLanes) - 1;
    const uint32_t some = count <= 0 ? 0 : count < kLanes ? (1u << count) - 1 : all;
    const __m512i words = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(some), from + i * kLanes);
    _mm512_storeu_si512(to + i * kLanes, words);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
