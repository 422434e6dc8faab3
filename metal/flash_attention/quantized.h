// Keys and values as codes of mx.quantize over the head dim: codes to float32 in registers.
// csrc/quantized_matmul/problem.h describes the formats.
//
// Codes of 4 and 8 bits, which caches have, take the instructions of quantized_matmul's kernels.
// Other widths are a number of the launch: one kernel serves all formats.
#pragma once

#include "metal/common/unroll.h"
#include "metal/flash_attention/pages.h"
#include "metal/flash_attention/scores.h"
#include "metal/quantized_matmul/codes.h"

// Neither: 2, 3, 5 or 6 bits.
constant bool keys_have_4_bits [[function_constant(17)]];
constant bool keys_have_8_bits [[function_constant(18)]];
constant bool values_have_4_bits [[function_constant(19)]];
constant bool values_have_8_bits [[function_constant(20)]];
// Codes are e2m1 (4 bits) or e4m3, without biases, and scales are e8m0. Otherwise both are affine.
constant bool codes_are_floats [[function_constant(21)]];
constant bool scales_are_e4m3 [[function_constant(22)]];  // nvfp4

enum Operand { kOfKeys, kOfValues };

METAL_FUNC uint near(long first, long stride, int row) {
  return uint(int(first) + row * int(stride));
}

// Codes of one head. Offsets and strides are in elements.
//
// rows_are_vectors promises that every offset into the arrays fits 31 bits, and that biases have
// the strides of scales. So a load takes one sum of 32 bits, and addresses take no registers.
template <typename T>
struct CodeRows {
  const device uint* words;
  const device uchar* scales;  // of type T if affine
  const device T* biases;      // likewise; otherwise not read
  long first_word;
  long first_scale;
  long first_bias;
  long word_stride;  // from a row to the next
  long scale_stride;
  long bias_stride;
  int rows;
  int columns;
  int bits;
  int group_shift;
  int shift;           // of the first code in its word: not zero with 3, 5 or 6 bits
  int last_word;       // with these bits: of the row, counted from the first
  PageTable table;     // if is_paged; then `first` is of page 0
  long page_of_words;  // from a page to the next
  long page_of_scales;
  long page_of_biases;

  // Returns the codes from `column` on, a multiple of eight that exists.
  METAL_FUNC CodeRows from(int column) const thread {
    CodeRows result = *this;
    const int bit = column * bits, group = column >> group_shift;
    result.first_word += bit / 32;
    result.first_scale += group;
    result.first_bias += group;
    result.shift = bit % 32;
    result.last_word -= bit / 32;
    return result;
  }

  // Returns the codes of the page that has key `row`, and makes `row` that in the page.
  METAL_FUNC CodeRows of_page(thread int& row) const thread {
    return is_paged ? of_page(table.page(row), row) : *this;
  }
  METAL_FUNC CodeRows of_page(int page, thread int& row) const thread {
    CodeRows result = *this;
    if (is_paged) {
      result.first_word += page * page_of_words;
      result.first_scale += page * page_of_scales;
      result.first_bias += page * page_of_biases;
      row = table.row(row);
    }
    return result;
  }

  // Offsets of a row, where rows_are_vectors: of its words, and of its scale and bias.
  METAL_FUNC uint near_word(int row) const thread { return near(first_word, word_stride, row); }
  METAL_FUNC uint near_scale(int row) const thread { return near(first_scale, scale_stride, row); }
};

template <typename T>
METAL_FUNC CodeRows<T> code_rows(const device uint* words,
                                 const device uchar* scales,
                                 const device T* biases,
                                 constant int64_t (&strides)[4],
                                 constant AttentionCodesParams& codes,
                                 int batch,
                                 int head,
                                 int rows,
                                 int columns,
                                 int first_row = 0) {
  return {words,
          scales,
          biases,
          batch * strides[0] + head * strides[1] + first_row * strides[2],
          batch * codes.scales_strides[0] + head * codes.scales_strides[1] +
              first_row * codes.scales_strides[2],
          batch * codes.biases_strides[0] + head * codes.biases_strides[1] +
              first_row * codes.biases_strides[2],
          strides[2],
          codes.scales_strides[2],
          codes.biases_strides[2],
          rows,
          columns,
          codes.bits,
          codes.group_shift,
          0,
          columns / 32 * codes.bits - 1};
}

// The same of a batch that may be in pages.
template <typename T>
METAL_FUNC CodeRows<T> cache_codes(const device uint* words,
                                   const device uchar* scales,
                                   const device T* biases,
                                   constant int64_t (&strides)[4],
                                   constant AttentionCodesParams& codes,
                                   PageTable table,
                                   int batch,
                                   int head,
                                   int rows,
                                   int columns,
                                   int first_row) {
  CodeRows<T> result = code_rows(words, scales, biases, strides, codes, is_paged ? 0 : batch, head,
                                 rows, columns, is_paged ? 0 : first_row);
  if (is_paged) {
    result.table = table;
    result.page_of_words = strides[0];
    result.page_of_scales = codes.scales_strides[0];
    result.page_of_biases = codes.biases_strides[0];
  }
  return result;
}

// Returns `column`, or the last that kColumns codes of a row start at. Rows are whole numbers of
// them.
template <int kColumns>
METAL_FUNC int existing_column(int column, int columns) {
  return heads_fill_tile ? column : metal::min(column, columns - kColumns);
}

template <typename U>
METAL_FUNC const device U* element_of_row(const device U* all, long first, long stride, int row) {
  return rows_are_vectors ? all + near(first, stride, row) : all + (first + row * stride);
}

// kColumns codes of a row, 8 or 16, which share a scale. A piece is eight of them.
template <typename T, Operand kOperand, int kColumns>
struct CodeChunk {
  enum { kPieces = kColumns / 8 };
  // 4 bits: one word per piece. Otherwise two, with the first code in the lowest bits.
  uint words[2 * kPieces];
  float scale;
  float bias;

  METAL_FUNC static bool have_4_bits() {
    return kOperand == kOfKeys ? keys_have_4_bits : values_have_4_bits;
  }
  METAL_FUNC static bool have_8_bits() {
    return kOperand == kOfKeys ? keys_have_8_bits : values_have_8_bits;
  }

  // What the code's values are to be multiplied by, apart from the scale: their product may
  // overflow.
  METAL_FUNC static float factor() {
    if (have_4_bits()) {
      return codes_are_floats ? E2m1Format<16>::factor() : AffineCodes<4>::factor();
    }
    if (have_8_bits()) {
      return codes_are_floats ? Mxfp8Format::factor() : AffineCodes<8>::factor();
    }
    return 1.0f;
  }

  // Loads the first codes of row `row` of `from`.
  METAL_FUNC void load(CodeRows<T> from, int row) thread {
    const device uint* own = element_of_row(from.words, from.first_word, from.word_stride, row);
    if (have_4_bits()) {
      load_words<kPieces>(own, rows_are_vectors, words);
    } else if (have_8_bits()) {
      load_words<2 * kPieces>(own, rows_are_vectors, words);
    } else {
      MLX_ANVIL_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        load_bytes(own, from.shift + 8 * piece * from.bits, from.last_word, words + 2 * piece);
      }
    }
    if (codes_are_floats) {
      const uchar stored = *element_of_row(from.scales, from.first_scale, from.scale_stride, row);
      scale = scales_are_e4m3 ? e4m3(stored) : e8m0(stored);
      bias = 0.0f;
      return;
    }
    const device T* scales = reinterpret_cast<const device T*>(from.scales);
    scale = static_cast<float>(*element_of_row(scales, from.first_scale, from.scale_stride, row));
    bias = static_cast<float>(
        rows_are_vectors ? *element_of_row(from.biases, from.first_scale, from.scale_stride, row)
                         : *element_of_row(from.biases, from.first_bias, from.bias_stride, row));
  }

  // As if all codes, the scale and the bias were zero.
  METAL_FUNC void clear_unless(bool exists) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 2 * kPieces; ++i) {
      words[i] = exists ? words[i] : 0;
    }
    scale = exists ? scale : 0.0f;
    bias = exists ? bias : 0.0f;
  }

  METAL_FUNC bool has_nan() const thread {
    return codes_are_floats && have_8_bits() && Mxfp8Format::has_nan<2 * kPieces>(words);
  }

  // Values of a piece, divided by factor(). Undefined for NaN codes.
  METAL_FUNC void values(int piece, int bits, thread float* v) const thread {
    if (have_4_bits() && codes_are_floats) {
      E2m1Format<16>::values(words, piece, v);
    } else if (have_4_bits()) {
      AffineCodes<4>::values(words, piece, v);
    } else if (have_8_bits() && codes_are_floats) {
      Mxfp8Format::values(words, piece, v);
    } else if (have_8_bits()) {
      AffineCodes<8>::values(words, piece, v);
    } else {
      // Four codes are at most 24 bits.
      const uint low = words[2 * piece], high = words[2 * piece + 1];
      const uint halves[2] = {low, low >> 4 * bits | high << (32 - 4 * bits)};
      const uint mask = (1u << bits) - 1;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 8; ++i) {
        v[i] = static_cast<float>(halves[i / 4] >> (i % 4 * bits) & mask);
      }
    }
  }

  // The same, with NaN codes as NaN.
  METAL_FUNC void values_or_nan(int piece, int bits, thread float* v) const thread {
    values(piece, bits, v);
    if (has_nan()) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 8; ++i) {
        const uint code = words[2 * piece + i / 4] >> (8 * (i % 4)) & 0x7f;
        v[i] = code == 0x7f ? NAN : v[i];
      }
    }
  }

 private:
  // Loads eight codes of less than 8 bits, which start at a byte: from at most two words.
  METAL_FUNC static void load_bytes(const device uint* row, int bit, int last, thread uint* to) {
    const uint first = row[bit / 32], second = row[metal::min(bit / 32 + 1, last)];
    const uint shift = bit % 32;
    to[0] = first >> shift | second << 1 << (31 - shift);
    to[1] = second >> shift;
  }
};
