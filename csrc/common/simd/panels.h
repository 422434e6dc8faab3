// Matrices packed in panels, and their register-tiled product with float32 accumulation. For kernel
// files only (see simd.h).
//
// A panel holds kPanel adjacent columns of all rows, row by row. The product then reads its right
// operand as one stream, whatever the matrix width. All operands use this layout.
//
// Elements are 32-bit words. A word is a float32, or, if the machine multiplies bfloat16, a pair of
// bfloat16 adjacent along the summed axis. A matrix of pairs has half the columns (as left operand)
// or half the rows (as right operand); the product is otherwise the same.
#pragma once

#include <utility>

#include "common/integers.h"
#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline constexpr int kPanel = 2 * kLanes;  // columns

// Rows per register tile. With a panel's two vectors they give 16 accumulators out of 32 registers,
// or 8 out of 16: enough to hide the FMA latency. It is a power of two, so that tiles never
// straddle panels if the left operand is transposed.
inline constexpr int kTileRows = kRegisters / 4;

constexpr int64_t panel_count(int64_t columns) {
  return (columns + kPanel - 1) / kPanel;
}

enum class Words { kFloat32, kBf16Pairs };

// The word type that suits operands of type T best.
template <class T>
inline constexpr Words kWordsOf = Words::kFloat32;
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <>
inline constexpr Words kWordsOf<bf16> = Words::kBf16Pairs;
#endif

// The number of words for `elements` elements along the summed axis.
template <Words kWords>
constexpr int64_t word_count(int64_t elements) {
  return kWords == Words::kBf16Pairs ? (elements + 1) / 2 : elements;
}

struct Panels {
  float* data;
  int64_t rows;  // allocated rows

  float* at(int64_t row, int64_t panel) const { return data + (panel * rows + row) * kPanel; }
};

// ---- packing ------------------------------------------------------------------------------------

template <class T>
struct Source {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  const T* at(int64_t row) const { return data + row * row_stride; }
};

// Gathers `count` elements at a stride and pads to kCount with zeros.
template <int kCount, class T>
struct Gathered {
  T elements[kCount] = {};

  Gathered(const T* from, int64_t stride, int64_t count) {
    if (stride == 1) {
      std::memcpy(elements, from, count * sizeof(T));
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      elements[i] = from[i * stride];
    }
  }
};

// Loads a float32 vector that starts at `column`. Lanes beyond `columns` are 0.
template <class T>
inline f32v load_columns(const T* row, int64_t stride, int64_t column, int64_t columns) {
  const int64_t left = columns - column;
  if (stride == 1 && left >= kLanes) {
    return load_lanes(row + column);
  }
  const int64_t count = left < kLanes ? left : kLanes;
  return load_lanes(Gathered<kLanes, T>(row + column * stride, stride, count).elements);
}

// Loads a vector of words of adjacent columns.
template <Words kWords, class T>
inline f32v load_whole_words(const T* row, int64_t word) {
  if constexpr (kWords == Words::kFloat32) {
    return load_lanes(row + word);
  } else {
    return load_bits<f32v>(row + 2 * word);
  }
}

// Loads a vector of words that starts at `word`.
template <Words kWords, class T>
inline f32v load_words(const T* row, int64_t stride, int64_t word, int64_t columns) {
  if constexpr (kWords == Words::kFloat32) {
    return load_columns(row, stride, word, columns);
  } else {
    const int64_t left = columns - 2 * word;
    if (stride == 1 && left >= 2 * kLanes) {
      return load_bits<f32v>(row + 2 * word);
    }
    const int64_t count = left < 2 * kLanes ? left : 2 * kLanes;
    const Gathered<2 * kLanes, T> pairs(row + 2 * word * stride, stride, count);
    return load_bits<f32v>(pairs.elements);
  }
}

// Calls pack(word, to) for each vector of a row's words, with where the vector is in row `to_row`.
// Whole panels come first, with steps that are constants.
template <class Whole, class Some>
inline void for_each_vector(
    int64_t words, int64_t whole_words, Panels to, int64_t to_row, Whole whole, Some some) {
  float* at = to.at(to_row, 0);
  const int64_t step = to.rows * kPanel;
  int64_t w = 0;
  for (; w + kPanel <= whole_words; w += kPanel, at += step) {
    whole(w, at);
    whole(w + kLanes, at + kLanes);
  }
  for (; w < words; w += kPanel, at += step) {
    some(w, at);
    if (w + kLanes < words) {
      some(w + kLanes, at + kLanes);
    }
  }
}

// Packs `source` as a left operand, into rows [to_row, to_row + rows).
template <Words kWords, class T>
void pack_left(Source<T> source, int64_t rows, int64_t columns, Panels to, int64_t to_row) {
  const int64_t words = word_count<kWords>(columns);
  const int64_t whole = source.column_stride != 1     ? 0
                        : kWords == Words::kBf16Pairs ? columns / 2
                                                      : columns;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = source.at(r);
    for_each_vector(
        words, whole, to, to_row + r,
        [&](int64_t w, float* at) { store_lanes(at, load_whole_words<kWords>(row, w)); },
        [&](int64_t w, float* at) {
          store_lanes(at, load_words<kWords>(row, source.column_stride, w, columns));
        });
  }
}

// Stores one panel of columns of a row as half a panel of pairs, for computed left operands.
inline void store_column_pairs(Panels to, int64_t row, int64_t panel, f32v first, f32v second) {
#if defined(__AVX512BF16__)
  const f32v pairs =
      bits_as<f32v>(_mm512_cvtne2ps_pbh(bits_as<__m512>(second), bits_as<__m512>(first)));
#else
  bf16 pairs_in_order[kPanel];
  store_lanes(pairs_in_order, first);
  store_lanes(pairs_in_order + kLanes, second);
  const f32v pairs = load_bits<f32v>(pairs_in_order);
#endif
  store_lanes(to.at(row, panel / 2) + panel % 2 * kLanes, pairs);
}

// Packs one row of words of a right operand from one or two rows of the source. A null `odd` means
// zeros.
template <Words kWords, class T>
inline void pack_right_row(
    const T* even, const T* odd, int64_t stride, int64_t columns, Panels to, int64_t to_row) {
  // The upper half of a widened bfloat16's word is the bfloat16 itself.
  const auto pair = [](f32v low, f32v high) {
    return bits_as<f32v>(bits_as<u32v>(low) >> 16 | bits_as<u32v>(high));
  };
  const bool has_whole = stride == 1 && (kWords == Words::kFloat32 || odd);
  for_each_vector(
      columns, has_whole ? columns : 0, to, to_row,
      [&](int64_t c, float* at) {
        f32v words = load_lanes(even + c);
        if constexpr (kWords == Words::kBf16Pairs) {
          words = pair(words, load_lanes(odd + c));
        }
        store_lanes(at, words);
      },
      [&](int64_t c, float* at) {
        f32v words = load_columns(even, stride, c, columns);
        if constexpr (kWords == Words::kBf16Pairs) {
          words = pair(words, odd ? load_columns(odd, stride, c, columns) : f32v{});
        }
        store_lanes(at, words);
      });
}

// Packs `source` as a right operand.
template <Words kWords, class T>
void pack_right(Source<T> source, int64_t rows, int64_t columns, Panels to) {
  constexpr int64_t kStep = kWords == Words::kBf16Pairs ? 2 : 1;
  for (int64_t r = 0; r < rows; r += kStep) {
    pack_right_row<kWords>(source.at(r), r + 1 < rows ? source.at(r + 1) : nullptr,
                           source.column_stride, columns, to, r / kStep);
  }
}

// Packs the transpose of rows as a right operand: they become columns, starting at column 0.
// row_at(r) is the address of one. `to` must have rows for whole vectors of words. Columns that pad
// the last panel are 0.
template <Words kWords, class RowAt>
void pack_rows_transposed(
    RowAt row_at, int64_t column_stride, int64_t rows, int64_t columns, Panels to) {
  for (int64_t r = 0; r < round_up(rows, kPanel); r += kLanes) {
    for (int64_t w = 0; w < word_count<kWords>(columns); w += kLanes) {
      f32v x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = r + i < rows ? load_words<kWords>(row_at(r + i), column_stride, w, columns) : f32v{};
      }
      transpose(x);
      float* out = to.at(w, r / kPanel) + r % kPanel;
      for (int i = 0; i < kLanes; ++i) {
        store_lanes(out + i * kPanel, x[i]);
      }
    }
  }
}

template <Words kWords, class T>
void pack_right_transposed(Source<T> source, int64_t rows, int64_t columns, Panels to) {
  pack_rows_transposed<kWords>([&](int64_t r) { return source.at(r); }, source.column_stride, rows,
                               columns, to);
}

// Stores a vector to columns of one row, up to `columns`.
template <class T>
inline void store_columns(T* to, int64_t column, int64_t columns, f32v x) {
  if (columns - column >= kLanes) {
    store_lanes(to + column, x);
    return;
  }
  T lanes[kLanes];
  store_lanes(lanes, x);
  std::memcpy(to + column, lanes, (columns - column) * sizeof(T));
}

// Stores the transpose of the first panel: its first `rows` columns become rows of `columns`
// numbers. `from` must have rows for whole vectors.
inline void unpack_transposed(Panels from, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      f32v x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = load_lanes(from.at(c + i, 0) + r);
      }
      transpose(x);
      for (int64_t i = 0; i < kLanes && r + i < rows; ++i) {
        store_columns(to + (r + i) * columns, c, columns, x[i]);
      }
    }
  }
}

// Stores factor * one row of panels as T.
template <class T>
inline void unpack_row(Panels from, int64_t row, int64_t columns, float factor, T* to) {
  const float* in = from.at(row, 0);
  for (int64_t c = 0; c < columns; c += kLanes) {
    const f32v x = load_lanes(in + c / kPanel * from.rows * kPanel + c % kPanel);
    store_columns(to, c, columns, x * factor);
  }
}

// ---- product ------------------------------------------------------------------------------------

// How the product treats the previous values of the result: ignore them, add to them, or scale each
// row by a factor and then add.
enum class Accumulate { kNone, kAdd, kScale };

struct LeftOperand {
  const float* data;
  int64_t panel_step;  // from one run of words along a row to the next
  int64_t first_run;   // words of the first run; the others have kPanel
};

// Rows of `m` that start at `row`, from word `column` on.
inline LeftOperand left_rows(Panels m, int64_t row, int64_t column) {
  return {m.at(row, column / kPanel) + column % kPanel, m.rows * kPanel, kPanel - column % kPanel};
}

// Rows of m^T: columns of `m` that start at `column`, from word `row` on. A word of `m` holds
// elements of one column.
inline LeftOperand left_columns(Panels m, int64_t column, int64_t row) {
  return {m.at(row, column / kPanel) + column % kPanel, kPanel * kPanel, kPanel};
}

template <Words kWords>
inline f32v multiply_add(f32v x, f32v y, f32v sum) {
#if defined(__AVX512BF16__)
  if constexpr (kWords == Words::kBf16Pairs) {
    return bits_as<f32v>(
        _mm512_dpbf16_ps(bits_as<__m512>(sum), bits_as<__m512bh>(x), bits_as<__m512bh>(y)));
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  if constexpr (kWords == Words::kBf16Pairs) {
    return bits_as<f32v>(
        vbfdotq_f32(bits_as<float32x4_t>(sum), bits_as<bfloat16x8_t>(x), bits_as<bfloat16x8_t>(y)));
  }
#endif
  return x * y + sum;
}

template <Words kWords, Accumulate kAccumulate, bool kTransposed, int kRows, int kVectors>
__attribute__((noinline)) void multiply_tile(
    LeftOperand left, const float* right, int64_t depth, const float* factors, float* result) {
  constexpr int kRowStep = kTransposed ? 1 : kPanel;
  constexpr int kColumnStep = kTransposed ? kPanel : 1;
  f32v sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kAccumulate == Accumulate::kNone) {
        sum[r][v] = f32v{};
      } else {
        sum[r][v] = load_lanes(result + r * kPanel + v * kLanes);
      }
      if constexpr (kAccumulate == Accumulate::kScale) {
        sum[r][v] *= factors[r];
      }
    }
  }
  const float* a = left.data;
  const float* b = right;
  int64_t run = left.first_run;
  for (int64_t left_over = depth; left_over > 0; left_over -= run, run = kPanel) {
    const int64_t count = left_over < run ? left_over : run;
    for (int64_t i = 0; i < count; ++i) {
      f32v x[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        x[v] = load_lanes(b + v * kLanes);
      }
      for (int r = 0; r < kRows; ++r) {
        const f32v y = splat(a[i * kColumnStep + r * kRowStep]);
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = multiply_add<kWords>(x[v], y, sum[r][v]);
        }
      }
      b += kPanel;
    }
    a += run == kPanel ? left.panel_step : left.panel_step - (kPanel - run);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const f32v value = kAccumulate == Accumulate::kNone ? sum[r][v] * factors[0] : sum[r][v];
      store_lanes(result + r * kPanel + v * kLanes, value);
    }
  }
}

template <Words kWords, Accumulate kAccumulate, bool kTransposed, int kVectors>
inline void multiply_rows(LeftOperand left,
                          const float* right,
                          int64_t rows,
                          int64_t depth,
                          const float* factors,
                          float* result) {
  if (rows > kTileRows / 2) {
    multiply_tile<kWords, kAccumulate, kTransposed, kTileRows, kVectors>(left, right, depth,
                                                                         factors, result);
  } else if (rows > kTileRows / 4) {
    multiply_tile<kWords, kAccumulate, kTransposed, kTileRows / 2, kVectors>(left, right, depth,
                                                                             factors, result);
  } else if (rows > 1) {
    multiply_tile<kWords, kAccumulate, kTransposed, kTileRows / 4, kVectors>(left, right, depth,
                                                                             factors, result);
  } else {
    multiply_tile<kWords, kAccumulate, kTransposed, 1, kVectors>(left, right, depth, factors,
                                                                 result);
  }
}

// Computes `rows` rows (at most kTileRows) of one panel of a product over `depth` words, of which
// `columns` (at least 1) columns are used. May write rows up to the next power of two. `factors`
// holds one factor per row for the old values with kScale, and one for the product with kNone.
template <Words kWords, Accumulate kAccumulate, bool kTransposed = false>
inline void multiply(LeftOperand left,
                     const float* right,
                     int64_t rows,
                     int64_t columns,
                     int64_t depth,
                     float* result,
                     const float* factors = nullptr) {
  if (columns > kLanes) {
    multiply_rows<kWords, kAccumulate, kTransposed, 2>(left, right, rows, depth, factors, result);
  } else {
    multiply_rows<kWords, kAccumulate, kTransposed, 1>(left, right, rows, depth, factors, result);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
