// Products of a few rows with keys and values read in place, for decoding. A decode reads each key
// once, so packing would cost more than the arithmetic. For kernel files only (see
// common/simd/simd.h).
//
// Rows are those of keys or values: row(i) is one, load(row, column) a vector of it, of columns up
// to whole_columns(); load_some() has zeros past the last column.
#pragma once

#include "common/simd/panels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Prefetches into L2: L1 has too few outstanding requests to saturate memory. Inlined, since GCC 12
// drops calls of a function that only prefetches.
[[gnu::always_inline]] inline void prefetch_bytes(const void* from, int bytes) {
  constexpr int kLine = 64;
  for (int byte = 0; byte < bytes; byte += kLine) {
    __builtin_prefetch(static_cast<const char*>(from) + byte, 0, 2);
  }
}

// How many rows ahead to prefetch. Several loops read a tile's rows, in an order that the hardware
// prefetcher does not detect. Measured on Zen 4: 4 KiB reaches two thirds of the bandwidth of 32
// KiB.
inline int64_t rows_ahead(int64_t row_bytes) {
  constexpr int64_t kAheadBytes = 32768;
  return kAheadBytes / row_bytes + 1;
}

template <class T>
struct Stream {
  using Row = const T*;

  Source<T> source;
  int64_t columns;

  Row row(int64_t index) const { return source.at(index); }
  int64_t whole_columns() const { return source.column_stride == 1 ? columns : 0; }
  f32v load(Row row, int64_t column) const { return load_lanes(row + column); }
  f32v load_some(Row row, int64_t column) const {
    return load_columns(row, source.column_stride, column, columns);
  }

  int64_t ahead() const {
    return rows_ahead(columns * static_cast<int64_t>(sizeof(T))) * source.row_stride;
  }

  // Prefetches `count` columns from `column` on, of a row that is `ahead` elements further.
  void prefetch(Row row, int64_t ahead, int64_t column, int count) const {
    prefetch_bytes(row + ahead + column, count * static_cast<int>(sizeof(T)));
  }
};

// Rows anywhere in memory, by their addresses. The list goes on for `rows_to_prefetch` rows after
// the last one.
template <class T>
struct ListedStream {
  using Row = const T* const*;

  const T* const* rows;
  int64_t column_stride;
  int64_t columns;
  int64_t rows_to_prefetch;

  Row row(int64_t index) const { return rows + index; }
  int64_t whole_columns() const { return column_stride == 1 ? columns : 0; }
  f32v load(Row row, int64_t column) const { return load_lanes(*row + column); }
  f32v load_some(Row row, int64_t column) const {
    return load_columns(*row, column_stride, column, columns);
  }

  int64_t ahead() const { return rows_to_prefetch; }
  void prefetch(Row row, int64_t ahead, int64_t column, int count) const {
    prefetch_bytes(row[ahead] + column, count * static_cast<int>(sizeof(T)));
  }
};

// ---- scores ------------------------------------------------------------------------------------

// Computes products of rows of q with kKeys keys, without the final sum over lanes.
template <int kRows, int kKeys, class Rows>
inline void dot_tile(
    const Rows& keys, const typename Rows::Row* key, Panels q, f32v (*sums)[kLanes], int at) {
  f32v sum[kRows][kKeys] = {};
  const auto add = [&](int64_t column, auto load) {
    f32v x[kKeys];
    for (int k = 0; k < kKeys; ++k) {
      x[k] = load(key[k], column);
    }
    for (int r = 0; r < kRows; ++r) {
      const f32v y = load_lanes(q.at(r, column / kPanel) + column % kPanel);
      for (int k = 0; k < kKeys; ++k) {
        sum[r][k] += x[k] * y;
      }
    }
  };
  const int64_t ahead = keys.ahead();
  const int64_t whole = keys.whole_columns();
  int64_t c = 0;
  for (; c + kPanel <= whole; c += kPanel) {
    for (int k = 0; k < kKeys; ++k) {
      keys.prefetch(key[k], ahead, c, kPanel);
    }
    for (int v = 0; v < kPanel; v += kLanes) {
      add(c + v, [&](const auto& row, int64_t column) { return keys.load(row, column); });
    }
  }
  for (; c < keys.columns; c += kLanes) {
    add(c, [&](const auto& row, int64_t column) { return keys.load_some(row, column); });
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kKeys; ++k) {
      sums[r][at + k] = sum[r][k];
    }
  }
}

// Computes factor * products of rows with the keys [begin, end). `begin` starts a panel of s. The
// last panel is filled by repeating the last key.
template <int kRows, class Rows>
void stream_scores(const Rows& keys, int64_t begin, int64_t end, float factor, Panels q, Panels s) {
  constexpr int kKeys = kRegisters / 2 / kRows < kLanes ? kRegisters / 2 / kRows : kLanes;
  for (int64_t first = begin; first < round_up(end, kPanel); first += kLanes) {
    f32v sums[kRows][kLanes];
    for (int at = 0; at < kLanes; at += kKeys) {
      typename Rows::Row key[kKeys];
      for (int k = 0; k < kKeys; ++k) {
        const int64_t index = first + at + k;
        key[k] = keys.row(index < end ? index : end - 1);
      }
      dot_tile<kRows, kKeys>(keys, key, q, sums, at);
    }
    for (int r = 0; r < kRows; ++r) {
      store_lanes(s.at(r, first / kPanel) + first % kPanel, lane_sums(sums[r]) * factor);
    }
  }
}

// ---- weighted sums of values -------------------------------------------------------------------

// Updates columns [column, column + kVectors * kLanes): out = factors * out + p values, for the
// keys [begin, end).
template <int kRows, int kVectors, bool kWhole, class Rows>
inline void value_tile(const Rows& values,
                       int64_t begin,
                       int64_t end,
                       int64_t column,
                       Panels p,
                       const float* factors,
                       Panels out) {
  const auto out_at = [&](int r, int v) {
    return out.at(r, column / kPanel + v / 2) + v % 2 * kLanes;
  };
  f32v sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = load_lanes(out_at(r, v)) * factors[r];
    }
  }
  const int64_t ahead = values.ahead();
  for (int64_t key = begin; key < end; ++key) {
    const typename Rows::Row row = values.row(key);
    const float* weight =
        p.at(0, static_cast<uint64_t>(key) / kPanel) + static_cast<uint64_t>(key) % kPanel;
    f32v x[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      x[v] = kWhole ? values.load(row, column + v * kLanes)
                    : values.load_some(row, column + v * kLanes);
    }
    values.prefetch(row, ahead, column, kVectors * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const f32v y = splat(weight[r * kPanel]);
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] += y * x[v];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store_lanes(out_at(r, v), sum[r][v]);
    }
  }
}

template <int kRows, class Rows>
void stream_values(
    const Rows& values, int64_t begin, int64_t end, Panels p, const float* factors, Panels out) {
  // Processes several columns if there are few rows: as many accumulators as registers allow.
  constexpr int kMost = kRegisters / 2 / kRows;
  constexpr int kWide = kMost > 4 ? 4 : kMost > 2 ? kMost : 2;
  const int64_t whole = values.whole_columns();
  int64_t c = 0;
  for (; c + kWide * kLanes <= whole; c += kWide * kLanes) {
    value_tile<kRows, kWide, true>(values, begin, end, c, p, factors, out);
  }
  for (; c + kLanes < values.columns; c += kPanel) {
    value_tile<kRows, 2, false>(values, begin, end, c, p, factors, out);
  }
  for (; c < values.columns; c += kLanes) {
    value_tile<kRows, 1, false>(values, begin, end, c, p, factors, out);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
