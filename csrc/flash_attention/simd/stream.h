// Products of a few rows with keys and values read in place, for decoding. A decode reads each key
// once, so packing would cost more than the arithmetic. For kernel files only (see
// common/simd/simd.h).
#pragma once

#include "common/simd/panels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

template <class T>
struct Stream {
  Source<T> source;
  int64_t columns;

  // Prefetch distance. Several loops read a tile's rows, in an order that the hardware prefetcher
  // does not detect. Measured on Zen 4: 4 KiB reaches two thirds of the bandwidth of 32 KiB.
  int64_t ahead() const {
    constexpr int64_t kAheadBytes = 32768;
    const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(T));
    return (kAheadBytes / row_bytes + 1) * source.row_stride;
  }
};

// Prefetches into L2: L1 has too few outstanding requests to saturate memory.
template <class T>
inline void prefetch(const T* from, int columns) {
  constexpr int kLine = 64;
  for (int byte = 0; byte < columns * static_cast<int>(sizeof(T)); byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, 2);
  }
}

// ---- scores ------------------------------------------------------------------------------------

// Lane l of the result is the sum of the lanes of x[l].
template <int kBit = kLanes / 2>
inline f32v lane_sums(f32v (&x)[kLanes]) {
  for (int i = 0; i < kBit; ++i) {
    exchange<kBit>(x[i], x[i + kBit], std::make_integer_sequence<int, kLanes>());
    x[i] += x[i + kBit];
  }
  if constexpr (kBit > 1) {
    return lane_sums<kBit / 2>(x);
  } else {
    return x[0];
  }
}

// Computes products of rows of q with kKeys keys, without the final sum over lanes.
template <class T, int kRows, int kKeys>
inline void dot_tile(
    const Stream<T>& keys, const T* const* key, Panels q, f32v (*sums)[kLanes], int at) {
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
  const int64_t stride = keys.source.column_stride;
  int64_t c = 0;
  for (; stride == 1 && c + kPanel <= keys.columns; c += kPanel) {
    for (int k = 0; k < kKeys; ++k) {
      prefetch(key[k] + ahead + c, kPanel);
    }
    for (int v = 0; v < kPanel; v += kLanes) {
      add(c + v, [](const T* row, int64_t column) { return load_lanes(row + column); });
    }
  }
  for (; c < keys.columns; c += kLanes) {
    add(c, [&](const T* row, int64_t column) {
      return load_columns(row, stride, column, keys.columns);
    });
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kKeys; ++k) {
      sums[r][at + k] = sum[r][k];
    }
  }
}

// Computes factor * products of rows with the keys [begin, end). `begin` starts a panel of s. The
// last panel is filled by repeating the last key.
template <class T, int kRows>
void stream_scores(
    const Stream<T>& keys, int64_t begin, int64_t end, float factor, Panels q, Panels s) {
  constexpr int kKeys = kRegisters / 2 / kRows < kLanes ? kRegisters / 2 / kRows : kLanes;
  for (int64_t first = begin; first < round_up(end, kPanel); first += kLanes) {
    f32v sums[kRows][kLanes];
    for (int at = 0; at < kLanes; at += kKeys) {
      const T* key[kKeys];
      for (int k = 0; k < kKeys; ++k) {
        const int64_t index = first + at + k;
        key[k] = keys.source.at(index < end ? index : end - 1);
      }
      dot_tile<T, kRows, kKeys>(keys, key, q, sums, at);
    }
    for (int r = 0; r < kRows; ++r) {
      store_lanes(s.at(r, first / kPanel) + first % kPanel, lane_sums(sums[r]) * factor);
    }
  }
}

// ---- weighted sums of values -------------------------------------------------------------------

// Updates columns [column, column + kVectors * kLanes): out = factors * out + p values, for the
// keys [begin, end).
template <class T, int kRows, int kVectors, bool kWhole>
inline void value_tile(const Stream<T>& values,
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
    const T* row = values.source.at(key);
    const float* weight =
        p.at(0, static_cast<uint64_t>(key) / kPanel) + static_cast<uint64_t>(key) % kPanel;
    f32v x[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      x[v] = kWhole ? load_lanes(row + column + v * kLanes)
                    : load_columns(row, values.source.column_stride, column + v * kLanes,
                                   values.columns);
    }
    prefetch(row + ahead + column, kVectors * kLanes);
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

template <class T, int kRows>
void stream_values(const Stream<T>& values,
                   int64_t begin,
                   int64_t end,
                   Panels p,
                   const float* factors,
                   Panels out) {
  // Processes several columns if there are few rows: as many accumulators as registers allow.
  constexpr int kMost = kRegisters / 2 / kRows;
  constexpr int kWide = kMost > 4 ? 4 : kMost > 2 ? kMost : 2;
  const bool dense = values.source.column_stride == 1;
  int64_t c = 0;
  for (; dense && c + kWide * kLanes <= values.columns; c += kWide * kLanes) {
    value_tile<T, kRows, kWide, true>(values, begin, end, c, p, factors, out);
  }
  for (; c + kLanes < values.columns; c += kPanel) {
    value_tile<T, kRows, 2, false>(values, begin, end, c, p, factors, out);
  }
  for (; c < values.columns; c += kLanes) {
    value_tile<T, kRows, 1, false>(values, begin, end, c, p, factors, out);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
