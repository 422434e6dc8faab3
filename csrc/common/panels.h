// Matrices of float32 in panels, and the register-tiled product of two of them. Kernel files only
// (see simd.h).
//
// A panel holds kPanel neighbouring columns of all rows, row after row, so that the product reads
// its right operand as one stream whatever the matrix' width. Every operand has this layout: the
// same packed matrix serves as right operand, as left operand and as transposed left operand.
#pragma once

#include <utility>

#include "common/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline constexpr int kPanel = 2 * kLanes;  // columns

// Rows that the product computes at once. With a panel's two vectors that makes 16 accumulators of
// 32 registers, or 8 of 16: enough to hide the latency of fused multiply-add, and a power of two,
// so that tiles never straddle panels when the left operand is transposed.
inline constexpr int kTileRows = kRegisters / 4;

constexpr int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

constexpr int64_t panel_count(int64_t columns) {
  return (columns + kPanel - 1) / kPanel;
}

struct Panels {
  float* data;
  int64_t rows;  // for which there is memory

  float* at(int64_t row, int64_t panel) const { return data + (panel * rows + row) * kPanel; }
};

// ---- packing -----------------------------------------------------------------------------------

template <class T>
struct Source {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  const T* at(int64_t row) const { return data + row * row_stride; }
};

// `count` elements at a stride; zeros in the lanes beyond.
template <class T>
inline f32v gather_lanes(const T* from, int64_t stride, int64_t count) {
  T dense[kLanes] = {};
  if (stride == 1) {
    std::memcpy(dense, from, count * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      dense[i] = from[i * stride];
    }
  }
  return load_lanes(dense);
}

// The vector of columns from `column` on.
template <class T>
inline f32v load_columns(const T* row, int64_t stride, int64_t column, int64_t columns) {
  const int64_t left = columns - column;
  if (stride == 1 && left >= kLanes) {
    return load_lanes(row + column);
  }
  return gather_lanes(row + column * stride, stride, left < kLanes ? left : kLanes);
}

// factor * source, into rows [to_row, to_row + rows).
template <class T>
void pack(
    Source<T> source, int64_t rows, int64_t columns, float factor, Panels to, int64_t to_row) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = source.at(r);
    float* out = to.at(to_row + r, 0);
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x = load_columns(row, source.column_stride, c, columns);
      store_lanes(out + c / kPanel * to.rows * kPanel + c % kPanel, x * factor);
    }
  }
}

// Lane l of result: a[l] where bit kBit of l is clear, else b[l - kBit]; and the other halves.
template <int kBit, int... kLane>
inline void exchange(f32v& a, f32v& b, std::integer_sequence<int, kLane...>) {
  const f32v low =
      __builtin_shufflevector(a, b, ((kLane & kBit) == 0 ? kLane : kLanes + kLane - kBit)...);
  const f32v high =
      __builtin_shufflevector(a, b, ((kLane & kBit) == 0 ? kLane + kBit : kLanes + kLane)...);
  a = low;
  b = high;
}

template <int kBit = kLanes / 2>
inline void transpose(f32v (&x)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kBit) == 0) {
      exchange<kBit>(x[i], x[i + kBit], std::make_integer_sequence<int, kLanes>());
    }
  }
  if constexpr (kBit > 1) {
    transpose<kBit / 2>(x);
  }
}

// source^T: its rows become columns, from column 0 on. `to` has memory for `columns` rounded up to
// whole vectors; the columns that fill up the last panel are 0.
template <class T>
void pack_transposed(Source<T> source, int64_t rows, int64_t columns, Panels to) {
  for (int64_t r = 0; r < round_up(rows, kPanel); r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      f32v x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = r + i < rows ? load_columns(source.at(r + i), source.column_stride, c, columns)
                            : f32v{};
      }
      transpose(x);
      float* out = to.at(c, r / kPanel) + r % kPanel;
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

// ---- product -----------------------------------------------------------------------------------

// What becomes of the values that the result had: set aside, added to, or multiplied by a factor
// for each row and then added to.
enum class Old { kNone, kAdd, kScale };

// Rows [row, row + kRows) of left, columns [column, column + depth) of left, `column` at the start
// of a panel. With kTransposed, `left` is taken as its own transpose, so that columns are rows.
struct LeftOperand {
  const float* data;
  int64_t panel_step;  // from one run of kPanel columns to the next
};

inline LeftOperand left_rows(Panels m, int64_t row, int64_t panel) {
  return {m.at(row, panel), m.rows * kPanel};
}

// Columns [column, ...) of m as rows, its rows from `row` on as columns.
inline LeftOperand left_columns(Panels m, int64_t column, int64_t row) {
  return {m.at(row, column / kPanel) + column % kPanel, kPanel * kPanel};
}

template <Old kOld, bool kTransposed, int kRows, int kVectors>
__attribute__((noinline)) void multiply_tile(
    LeftOperand left, const float* right, int64_t depth, const float* factors, float* result) {
  constexpr int kRowStep = kTransposed ? 1 : kPanel;
  constexpr int kColumnStep = kTransposed ? kPanel : 1;
  f32v sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kOld == Old::kNone) {
        sum[r][v] = f32v{};
      } else {
        sum[r][v] = load_lanes(result + r * kPanel + v * kLanes);
      }
      if constexpr (kOld == Old::kScale) {
        sum[r][v] *= factors[r];
      }
    }
  }
  const float* a = left.data;
  const float* b = right;
  for (int64_t done = 0; done < depth; done += kPanel) {
    const int64_t count = depth - done < kPanel ? depth - done : kPanel;
    for (int64_t i = 0; i < count; ++i) {
      f32v x[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        x[v] = load_lanes(b + v * kLanes);
      }
      for (int r = 0; r < kRows; ++r) {
        const f32v y = splat(a[i * kColumnStep + r * kRowStep]);
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] += y * x[v];
        }
      }
      b += kPanel;
    }
    a += left.panel_step;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store_lanes(result + r * kPanel + v * kLanes, sum[r][v]);
    }
  }
}

template <Old kOld, bool kTransposed, int kVectors>
inline void multiply_rows(LeftOperand left,
                          const float* right,
                          int64_t rows,
                          int64_t depth,
                          const float* factors,
                          float* result) {
  if (rows > kTileRows / 2) {
    multiply_tile<kOld, kTransposed, kTileRows, kVectors>(left, right, depth, factors, result);
  } else if (rows > kTileRows / 4) {
    multiply_tile<kOld, kTransposed, kTileRows / 2, kVectors>(left, right, depth, factors, result);
  } else if (rows > 1) {
    multiply_tile<kOld, kTransposed, kTileRows / 4, kVectors>(left, right, depth, factors, result);
  } else {
    multiply_tile<kOld, kTransposed, 1, kVectors>(left, right, depth, factors, result);
  }
}

// `rows` rows (at most kTileRows) of one panel of a product: left * right, with `columns` (at least
// 1) columns of the panel in use. May write up to the next power of two of rows.
template <Old kOld, bool kTransposed = false>
inline void multiply(LeftOperand left,
                     const float* right,
                     int64_t rows,
                     int64_t columns,
                     int64_t depth,
                     float* result,
                     const float* factors = nullptr) {
  if (columns > kLanes) {
    multiply_rows<kOld, kTransposed, 2>(left, right, rows, depth, factors, result);
  } else {
    multiply_rows<kOld, kTransposed, 1>(left, right, rows, depth, factors, result);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
