// Rows of w as bytes, with the codes of four rows interleaved, for products that sum over rows
// (int_plain_gemv.cpp, int_plain_gemm.cpp). For kernel files only, and only on machines with VNNI.
#pragma once

#include <array>

#include "quantized_matmul/simd/int_codes.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Vectors of adjacent columns per panel.
constexpr int kPlainVectors = 4, kPlainPanel = kPlainVectors * kLanes;

// A block of a row of w fills one vector. Codes of 2, 4 or 8 bits stay packed, a cache line of
// them, and are split into several vectors of bytes later. Other sizes are unpacked to 64 bytes.
template <class Format>
struct RowBytes {
  static constexpr int kBits = Format::kBits;
  static constexpr bool kWhole = kBits == 2 || kBits == 4 || kBits == 8;
  static constexpr int kPerWord = kWhole ? 8 / kBits : 1;  // byte vectors per word vector
  static constexpr int64_t kColumns = kPlainPanel * kPerWord;
  static constexpr int64_t kBlockBytes = kColumns * kBits / 8;
  static constexpr int kVectors = kPlainVectors * kPerWord;  // per block

  // First column of a vector in its block. The following ones lie kPerWord apart.
  static constexpr int column(int vector) {
    return vector / kPerWord * kLanes * kPerWord + vector % kPerWord;
  }

  // The column of one lane after interleave_quarters().
  static constexpr int column_by_quarters(int vector, int lane) {
    return (lane / 4 * 16 + vector / kPerWord * 4 + lane % 4) * kPerWord + vector % kPerWord;
  }

  // Reorders the vectors of a block (by quarters) or of a panel into the order of columns.
  template <bool kByQuarters>
  static constexpr int64_t kOrdered = kByQuarters ? kColumns : kPlainPanel;
  template <bool kByQuarters>
  static void store_in_order(const float* vectors, float* columns) {
    alignas(64) static constexpr auto kPlaces = [] {
      std::array<int32_t, kOrdered<kByQuarters>> places{};
      for (int at = 0; at < kOrdered<kByQuarters>; ++at) {
        const int vector = at / kLanes, lane = at % kLanes;
        places[kByQuarters ? column_by_quarters(vector, lane) : column(vector) + lane * kPerWord] =
            at;
      }
      return places;
    }();
    for (int column = 0; column < kOrdered<kByQuarters>; column += kLanes) {
      const __m512i places = _mm512_load_si512(kPlaces.data() + column);
      store_lanes(columns + column, bits_as<f32v>(_mm512_i32gather_ps(places, vectors, 4)));
    }
  }

  // Mask of the block's bytes inside the row, which spans bytes [begin, end) of the block.
  static __mmask64 in_row(int64_t begin, int64_t end) {
    const uint64_t before_end =
        end >= kBlockBytes ? ~uint64_t{0} >> (64 - kBlockBytes) : (uint64_t{1} << end) - 1;
    return before_end & ~uint64_t{0} << begin;
  }

  // Loads a block, with zeros for bytes not in `there`. kInRow: all bytes are in the row.
  template <bool kInRow = false>
  static u32v words(const char* from, __mmask64 there) {
    const __m512i packed = kInRow && kBlockBytes == 64 ? _mm512_loadu_si512(from)
                                                       : _mm512_maskz_loadu_epi8(there, from);
    if constexpr (kWhole) {
      return bits_as<u32v>(packed);
    } else {
      // Eight codes are kBits bytes: move those to each 64-bit lane, then extract each code by a
      // multishift.
      alignas(64) static constexpr auto kBytes = [] {
        std::array<uint8_t, 64> bytes{};
        for (int i = 0; i < 64; ++i) {
          bytes[i] = static_cast<uint8_t>(i / 8 * kBits + i % 8);
        }
        return bytes;
      }();
      constexpr uint64_t kPlaces = [] {
        uint64_t places = 0;
        for (int i = 0; i < 8; ++i) {
          places |= static_cast<uint64_t>(i * kBits) << (8 * i);
        }
        return places;
      }();
      const __m512i eights = _mm512_permutexvar_epi8(_mm512_load_si512(kBytes.data()), packed);
      const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(kPlaces), eights);
      return bits_as<u32v>(codes) & ((1u << kBits) - 1) * 0x01010101u;
    }
  }

  template <int kIndex>
  static u32v bytes(u32v words) {
    if constexpr (kPerWord == 1) {
      return words;
    } else {
      return Format::bytes((words >> (kBits * kIndex)) & ((1u << kBits) - 1) * 0x01010101u);
    }
  }

  // A cheaper bytes() for formats whose bytes are plain codes: codes of a byte from kIndex on stay
  // together, extracted by a mask without a shift. unnest() corrects the sums.
  static constexpr bool kNested = kPerWord > 1 && Format::kHasBiases;

  template <int kIndex>
  static u32v nested(u32v words) {
    if constexpr (kNested && kIndex > 0) {
      return words & (0xffu << (kBits * kIndex) & 0xffu) * 0x01010101u;
    } else if constexpr (kNested) {
      return words;
    } else {
      return bytes<kIndex>(words);
    }
  }

  // Converts sums over nested() to sums over bytes(): subtracts the contribution of later codes,
  // and shifts.
  template <int kCount>
  MLX_ANVIL_UNROLLED static void unnest(i32v (&sums)[kVectors][kCount]) {
    if constexpr (kNested) {
      for (int vector = 0; vector < kVectors; ++vector) {
        const int index = vector % kPerWord;
        for (int s = 0; s < kCount; ++s) {
          i32v& sum = sums[vector][s];
          sum = (index + 1 < kPerWord ? sum - sums[vector + 1][s] : sum) >> (kBits * index);
        }
      }
    }
  }
};

// Interleaves the bytes of two rows, one table per half. Unpacking byte pairs within 128-bit lanes
// then yields 16 bytes of four rows per vector, in order.
alignas(64) constexpr auto kByTwoRows = [] {
  std::array<std::array<uint8_t, 64>, 2> bytes{};
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 64; ++i) {
      const int quarter = i / 16, pair = i % 16 / 2, row = i % 2;
      const int byte = 32 * half + pair / 4 * 16 + quarter * 4 + pair % 4;
      bytes[half][i] = static_cast<uint8_t>(row * 64 + byte);
    }
  }
  return bytes;
}();

// Loads a block of four rows, row_bytes apart. If there are fewer, the last row is repeated; the
// factors of those rows are zero.
template <class Codes, bool kInRow>
MLX_ANVIL_UNROLLED void load_quad(
    const char* w, int64_t row_bytes, int64_t rows, __mmask64 in_row, __m512i (&to)[4]) {
  for (int r = 0; r < 4; ++r) {
    const int64_t row = r < rows ? r : rows - 1;
    to[r] = bits_as<__m512i>(Codes::template words<kInRow>(w + row * row_bytes, in_row));
  }
}

// Interleaves a block of four rows: one vector for each 16 bytes.
template <class Codes, bool kInRow>
MLX_ANVIL_UNROLLED void interleave_quad(
    const char* w, int64_t row_bytes, int64_t rows, __mmask64 in_row, u32v (&to)[4]) {
  const __m512i first_half = _mm512_load_si512(kByTwoRows[0].data());
  const __m512i second_half = _mm512_load_si512(kByTwoRows[1].data());
  __m512i rows_of[4];
  load_quad<Codes, kInRow>(w, row_bytes, rows, in_row, rows_of);
  const auto two_rows = [&](int r, __m512i order) {
    return _mm512_permutex2var_epi8(rows_of[r], order, rows_of[r + 1]);
  };
  const __m512i first01 = two_rows(0, first_half), first23 = two_rows(2, first_half);
  const __m512i second01 = two_rows(0, second_half), second23 = two_rows(2, second_half);
  to[0] = bits_as<u32v>(_mm512_unpacklo_epi16(first01, first23));
  to[1] = bits_as<u32v>(_mm512_unpackhi_epi16(first01, first23));
  to[2] = bits_as<u32v>(_mm512_unpacklo_epi16(second01, second23));
  to[3] = bits_as<u32v>(_mm512_unpackhi_epi16(second01, second23));
}

// The same with two thirds of the work, in another order: each 128-bit lane of a vector has 4 of
// the 16 bytes of that quarter of the block.
template <class Codes, bool kInRow>
MLX_ANVIL_UNROLLED void interleave_quarters(
    const char* w, int64_t row_bytes, int64_t rows, __mmask64 in_row, u32v (&to)[4]) {
  __m512i rows_of[4];
  load_quad<Codes, kInRow>(w, row_bytes, rows, in_row, rows_of);
  const __m512i low01 = _mm512_unpacklo_epi8(rows_of[0], rows_of[1]);
  const __m512i low23 = _mm512_unpacklo_epi8(rows_of[2], rows_of[3]);
  const __m512i high01 = _mm512_unpackhi_epi8(rows_of[0], rows_of[1]);
  const __m512i high23 = _mm512_unpackhi_epi8(rows_of[2], rows_of[3]);
  to[0] = bits_as<u32v>(_mm512_unpacklo_epi16(low01, low23));
  to[1] = bits_as<u32v>(_mm512_unpackhi_epi16(low01, low23));
  to[2] = bits_as<u32v>(_mm512_unpacklo_epi16(high01, high23));
  to[3] = bits_as<u32v>(_mm512_unpackhi_epi16(high01, high23));
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
