// Dense products of few rows, which read each matrix once, as it is. Both layouts of w add the same
// terms in the same order: lane i of a vector sums the depths i, i + kLanes, ..., and lane_sum()
// adds the lanes.
#pragma once

#include "common/simd/panels.h"
#include "gather_matmul/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline constexpr int64_t kFewRows = 8;
inline constexpr int64_t kFewDepth = 16 * kLanes;  // of plain w per pass, a block in L1 or L2

// x in float32, padded with zeros to whole vectors.
struct FewRows {
  float* x;
  int64_t step;
};

template <class T>
FewRows load_few_rows(const GatherDenseTile& tile, float* to) {
  const FewRows rows = {to, round_up(tile.depth, kLanes)};
  for (int64_t m = 0; m < tile.rows; ++m) {
    for (int64_t k = 0; k < tile.depth; k += kLanes) {
      store_lanes(to + m * rows.step + k,
                  load_columns(static_cast<const T*>(tile.x[m]), 1, k, tile.depth));
    }
  }
  return rows;
}

// kColumns rows of w [columns, depth] times rows [m, m + kRows) of x, to [kRows][columns].
template <int kColumns, int kRows, class T>
void dot_rows(const T* w, int64_t depth, const float* x, int64_t x_step, float* to, int64_t step) {
  f32v sums[kColumns][kRows] = {};
  const auto add = [&](int64_t k, auto load) {
    for (int c = 0; c < kColumns; ++c) {
      const f32v of_w = load(w + c * depth);
      for (int m = 0; m < kRows; ++m) {
        sums[c][m] = of_w * load_lanes(x + m * x_step + k) + sums[c][m];
      }
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    add(k, [&](const T* row) { return load_lanes(row + k); });
  }
  if (k < depth) {
    add(k, [&](const T* row) { return load_columns(row, 1, k, depth); });
  }
  for (int c = 0; c < kColumns; ++c) {
    for (int m = 0; m < kRows; ++m) {
      to[m * step + c] = lane_sum(sums[c][m]);
    }
  }
}

template <int kColumns, class T>
void dot_all_rows(
    const GatherDenseTile& tile, const T* w, const FewRows& rows, float* to, int64_t step) {
  int64_t m = 0;
  for (; m + 4 <= tile.rows; m += 4) {
    dot_rows<kColumns, 4>(w, tile.depth, rows.x + m * rows.step, rows.step, to + m * step, step);
  }
  if (m + 2 <= tile.rows) {
    dot_rows<kColumns, 2>(w, tile.depth, rows.x + m * rows.step, rows.step, to + m * step, step);
    m += 2;
  }
  if (m < tile.rows) {
    dot_rows<kColumns, 1>(w, tile.depth, rows.x + m * rows.step, rows.step, to + m * step, step);
  }
}

template <class T>
void few_rows_transposed(const GatherDenseTile& tile,
                         const FewRows& rows,
                         float* to,
                         int64_t step) {
  constexpr int kColumns = kRegisters / 8;
  const T* const w = static_cast<const T*>(tile.w) + tile.first * tile.depth;
  int64_t c = 0;
  for (; c + kColumns <= tile.count; c += kColumns) {
    dot_all_rows<kColumns>(tile, w + c * tile.depth, rows, to + c, step);
  }
  for (; c < tile.count; ++c) {
    dot_all_rows<1>(tile, w + c * tile.depth, rows, to + c, step);
  }
}

// Depths [k, k + count) of one vector of columns and one row. `sums` has a vector for each lane.
template <class T>
inline void add_depths(const GatherDenseTile& tile,
                       int64_t k,
                       int64_t count,
                       int64_t column,
                       const float* x,
                       float* sums) {
  f32v of_lane[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    of_lane[i] = load_lanes(sums + i * kLanes);
  }
  const T* w = static_cast<const T*>(tile.w) + k * tile.columns;
  for (int64_t d = 0; d < count; d += kLanes) {
    for (int i = 0; i < kLanes; ++i, w += tile.columns) {
      const f32v of_w = k + d + i < tile.depth ? load_columns(w, 1, column, tile.columns) : f32v{};
      of_lane[i] = of_w * splat(x[k + d + i]) + of_lane[i];
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    store_lanes(sums + i * kLanes, of_lane[i]);
  }
}

template <class T>
void few_rows_plain(
    const GatherDenseTile& tile, const FewRows& rows, float* sums, float* to, int64_t step) {
  constexpr int64_t kSums = kLanes * kLanes;
  const int64_t vectors = (tile.count + kLanes - 1) / kLanes;
  for (int64_t i = 0; i < vectors * tile.rows * kSums; i += kLanes) {
    store_lanes(sums + i, f32v{});
  }
  for (int64_t k = 0; k < rows.step; k += kFewDepth) {
    const int64_t count = rows.step - k < kFewDepth ? rows.step - k : kFewDepth;
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t m = 0; m < tile.rows; ++m) {
        add_depths<T>(tile, k, count, tile.first + v * kLanes, rows.x + m * rows.step,
                      sums + (v * tile.rows + m) * kSums);
      }
    }
  }
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t m = 0; m < tile.rows; ++m) {
      const float* const of_lane = sums + (v * tile.rows + m) * kSums;
      f32v lanes[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        lanes[i] = load_lanes(of_lane + i * kLanes);
      }
      for (int width = kLanes / 2; width > 0; width /= 2) {  // as lane_sum()
        for (int i = 0; i < width; ++i) {
          lanes[i] += lanes[i + width];
        }
      }
      store_lanes(to + m * step + v * kLanes, lanes[0]);
    }
  }
}

inline int64_t few_rows_scratch(const GatherDenseTile& tile) {
  const int64_t columns = round_up(tile.count, kLanes);
  return tile.rows *
         (round_up(tile.depth, kLanes) + columns + (tile.transposed ? 0 : columns * kLanes));
}

template <class T>
void multiply_few_rows(const GatherDenseTile& tile) {
  const FewRows rows = load_few_rows<T>(tile, tile.scratch);
  const int64_t step = round_up(tile.count, kLanes);
  float* const results = tile.scratch + tile.rows * rows.step;
  if (tile.transposed) {
    few_rows_transposed<T>(tile, rows, results, step);
  } else {
    few_rows_plain<T>(tile, rows, results + tile.rows * step, results, step);
  }
  for (int64_t m = 0; m < tile.rows; ++m) {
    for (int64_t c = 0; c < tile.count; c += kLanes) {
      store_columns(static_cast<T*>(tile.out[m]) + tile.first, c, tile.count,
                    load_lanes(results + m * step + c));
    }
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
