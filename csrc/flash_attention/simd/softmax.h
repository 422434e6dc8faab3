// The online softmax: the state that a band of rows carries from tile to tile. For kernel files
// only (see common/simd/simd.h).
#pragma once

#include "flash_attention/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

struct SoftmaxState {
  float* max;      // running maximum of each row's scores
  float* sum;      // [rows][kLanes], running normaliser of each row, spread over lanes
  float* rescale;  // of a band: factor for earlier sums under the new maxima
};

inline SoftmaxState take_softmax_state(Arena& arena, int64_t rows) {
  return {arena.take<float>(rows), arena.take<float>(rows * kLanes),
          arena.take<float>(round_up(kBandRows, kLanes))};
}

// A row starts with its sink, or -inf without one.
inline void start_row(const SoftmaxState& state, int64_t row, float sink) {
  state.max[row] = sink;
  store_lanes(state.sum + row * kLanes, f32v{});
  state.sum[row * kLanes] = sink == -kInfinity ? 0.0f : 1.0f;
}

inline float normaliser(const SoftmaxState& state, int64_t row) {
  return lane_sum(load_lanes(state.sum + row * kLanes));
}

template <class T, Words kWords>
struct OnlineSoftmax {
  Panels s;  // products; then exponentials, if those are float32
  Panels p;  // exponentials, as a left operand of kWords
  const SoftmaxState& state;
  const RowTable& table;
  const ScoreRules& rules;
  KeyRange tile;
  int64_t first;  // row
  int64_t count;

  // Converts a tile's products to exponentials relative to the running maximum, in the panels
  // visible to each group of kTileRows rows.
  void advance(const PanelRange* panels) const {
    new_maxima(panels);
    for (int64_t r = 0; r < count; ++r) {
      exponentials(r, panels[r / kTileRows]);
    }
  }

 private:
  void new_maxima(const PanelRange* panels) const {
    float before[kBandRows];
    float after[kBandRows];
    for (int64_t r = 0; r < count; ++r) {
      before[r] = state.max[first + r];
      after[r] = row_maximum(r, panels[r / kTileRows]);
      state.max[first + r] = after[r];
    }
    for (int64_t r = 0; r < count; r += kLanes) {
      const f32v was = load_lanes(before + r), is = load_lanes(after + r);
      // If nothing is visible yet, -inf - (-inf) would be NaN.
      const f32v base = is == splat(-kInfinity) ? f32v{} : is;
      store_lanes(state.rescale + r, exp2_bounded<Accuracy::kFloat32>(was - base));
    }
  }

  float row_maximum(int64_t r, PanelRange panels) const {
    const KeyRange seen = table.seen[first + r];
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const int64_t key = tile.begin + p * kPanel;
      if (!scores_are_products(rules) || !sees_all(seen, key, kPanel)) {
        finish_scores<T>(rules, seen, table.mask[first + r], key, s.at(r, p), nullptr);
      }
    }
    f32v a = splat(state.max[first + r]);
    f32v b = a;
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const f32v x = load_lanes(s.at(r, p)), y = load_lanes(s.at(r, p) + kLanes);
      a = x > a ? x : a;  // skips NaN in x; its exponential propagates it
      b = y > b ? y : b;
    }
    return lane_max(a > b ? a : b);
  }

  void exponentials(int64_t r, PanelRange panels) const {
    const float max = state.max[first + r];
    const float base = max == -kInfinity ? 0.0f : max;
    f32v a = load_lanes(state.sum + (first + r) * kLanes) * state.rescale[r];
    f32v b = {};
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      float* row = s.at(r, panel);
      const f32v x = exp2_bounded<kExpAccuracy<T>>(load_lanes(row) - base);
      const f32v y = exp2_bounded<kExpAccuracy<T>>(load_lanes(row + kLanes) - base);
      a += x;
      b += y;
      if constexpr (kWords == Words::kBf16Pairs) {
        store_column_pairs(p, r, panel, x, y);
      } else {
        store_lanes(row, x);
        store_lanes(row + kLanes, y);
      }
    }
    store_lanes(state.sum + (first + r) * kLanes, a + b);
  }
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
