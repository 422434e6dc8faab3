// Matrices in panels, and the register-tiled product of two of them with float32 sums. Kernel files
// only (see simd.h).
//
// A panel holds kPanel neighbouring columns of all rows, row after row, so that the product reads
// its right operand as one stream whatever the matrix' width. All operands have this layout.
//
// Elements are 32-bit words. A word is a float32; or, where the machine multiplies bfloat16, two of
// them that are neighbours along the axis that the product sums over. Such a matrix has half as
// many columns (as left operand) or rows (as right operand), and the product is otherwise the same.
#pragma once

#include <utility>

#include "common/integers.h"
#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline constexpr int kPanel = 2 * kLanes;  // columns

// Rows that the product computes at once. With a panel's two vectors that makes 16 accumulators of
// 32 registers, or 8 of 16: enough to hide the latency of fused multiply-add, and a power of two,
// so that tiles never straddle panels when the left operand is transposed.
inline constexpr int kTileRows = kRegisters / 4;

constexpr int64_t panel_count(int64_t columns) {
  return (columns + kPanel - 1) / kPanel;
}

enum class Words { kFloat32, kBf16Pairs };

// The words that operands of type T are best multiplied as.
template <class T>
inline constexpr Words kWordsOf = Words::kFloat32;
#if defined(__AVX512BF16__)
template <>
inline constexpr Words kWordsOf<bf16> = Words::kBf16Pairs;
#endif

// Words that hold so many elements along the axis that is summed over.
template <Words kWords>
constexpr int64_t word_count(int64_t elements) {
  return kWords == Words::kBf16Pairs ? (elements + 1) / 2 : elements;
}

struct Panels {
  float* data;
  int64_t rows;  // for which there is memory

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

// kCount elements of which `count` are at a stride and the others 0.
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

// The vector of float32 from `column` on; zeros in the lanes beyond `columns`.
template <class T>
inline f32v load_columns(const T* row, int64_t stride, int64_t column, int64_t columns) {
  const int64_t left = columns - column;
  if (stride == 1 && left >= kLanes) {
    return load_lanes(row + column);
  }
  const int64_t count = left < kLanes ? left : kLanes;
  return load_lanes(Gathered<kLanes, T>(row + column * stride, stride, count).elements);
}

// The vector of words from `word` on.
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

// Source as a left operand, into rows [to_row, to_row + rows).
template <Words kWords, class T>
void pack_left(Source<T> source, int64_t rows, int64_t columns, Panels to, int64_t to_row) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = source.at(r);
    for (int64_t w = 0; w < word_count<kWords>(columns); w += kLanes) {
      store_lanes(to.at(to_row + r, w / kPanel) + w % kPanel,
                  load_words<kWords>(row, source.column_stride, w, columns));
    }
  }
}

// Of one row, a panel of columns as half a panel of pairs: for left operands that are computed.
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

// A row of words of a right operand, from one row of the source, or from two (`odd` may be null:
// 0).
template <Words kWords, class T>
inline void pack_right_row(
    const T* even, const T* odd, int64_t stride, int64_t columns, Panels to, int64_t to_row) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    f32v words = load_columns(even, stride, c, columns);
    if constexpr (kWords == Words::kBf16Pairs) {
      // Widened, a bfloat16 is the upper half of its word.
      const u32v low = bits_as<u32v>(words) >> 16;
      words = bits_as<f32v>(odd ? low | bits_as<u32v>(load_columns(odd, stride, c, columns)) : low);
    }
    store_lanes(to.at(to_row, c / kPanel) + c % kPanel, words);
  }
}

// Source as a right operand.
template <Words kWords, class T>
void pack_right(Source<T> source, int64_t rows, int64_t columns, Panels to) {
  constexpr int64_t kStep = kWords == Words::kBf16Pairs ? 2 : 1;
  for (int64_t r = 0; r < rows; r += kStep) {
    pack_right_row<kWords>(source.at(r), r + 1 < rows ? source.at(r + 1) : nullptr,
                           source.column_stride, columns, to, r / kStep);
  }
}

// source^T as a right operand: its rows become columns, from column 0 on. `to` has memory for rows
// of words rounded up to whole vectors; the columns that fill up the last panel are 0.
template <Words kWords, class T>
void pack_right_transposed(Source<T> source, int64_t rows, int64_t columns, Panels to) {
  for (int64_t r = 0; r < round_up(rows, kPanel); r += kLanes) {
    for (int64_t w = 0; w < word_count<kWords>(columns); w += kLanes) {
      f32v x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = r + i < rows ? load_words<kWords>(source.at(r + i), source.column_stride, w, columns)
                            : f32v{};
      }
      transpose(x);
      float* out = to.at(w, r / kPanel) + r % kPanel;
      for (int i = 0; i < kLanes; ++i) {
        store_lanes(out + i * kPanel, x[i]);
      }
    }
  }
}

// Writes columns of one row.
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

// factor * one row of panels, in T.
template <class T>
inline void unpack_row(Panels from, int64_t row, int64_t columns, float factor, T* to) {
  const float* in = from.at(row, 0);
  for (int64_t c = 0; c < columns; c += kLanes) {
    const f32v x = load_lanes(in + c / kPanel * from.rows * kPanel + c % kPanel);
    store_columns(to, c, columns, x * factor);
  }
}

// ---- product ------------------------------------------------------------------------------------

// What becomes of the values that the result had: set aside, added to, or multiplied by a factor
// for each row and then added to.
enum class Accumulate { kNone, kAdd, kScale };

struct LeftOperand {
  const float* data;
  int64_t panel_step;  // from one run of words along a row to the next
  int64_t first_run;   // words of the first run; the others have kPanel
};

// Rows of `m` from `row` on, from word `column` on.
inline LeftOperand left_rows(Panels m, int64_t row, int64_t column) {
  return {m.at(row, column / kPanel) + column % kPanel, m.rows * kPanel, kPanel - column % kPanel};
}

// Rows of m^T: columns of `m` from `column` on, taken from word `row` on. A word of m holds
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

// `rows` rows (at most kTileRows) of one panel of a product, summed over `depth` words, with
// `columns` (at least 1) columns of the panel in use. May write up to the next power of two of
// rows. `factors`: with kScale one for each row, for the old values; with kNone one, for the
// product.
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
