// The innermost part of the backward: a band of rows against a tile of keys. Formulas:
// backward.cpp. For kernel files only (see common/simd/simd.h).
#pragma once

#include "flash_attention/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Sums over rows for a range of keys: [keys, head_dim] and [keys, v_head_dim].
struct KeyGradients {
  Panels d_k;
  Panels d_v;
};

inline KeyGradients take_key_gradients(Arena& arena, const AttentionSizes& sizes, int64_t keys) {
  keys = round_up(keys, kPanel);
  return {arena.take_panels(keys, sizes.head_dim), arena.take_panels(keys, sizes.v_head_dim)};
}

// If words are pairs, left and right operands of the same matrix need separate copies. Otherwise
// the two names refer to one copy.
struct BackwardScratch {
  Panels q_left;
  Panels q_right;
  Panels d_out_left;
  Panels d_out_right;
  Panels d_q;
  Panels k_transposed;
  Panels v_transposed;
  Panels k;
  Panels p;          // of a band of rows: scores, then probabilities
  Panels ds;         // of a band of rows: d_out v^T, then ds'
  Panels p_by_rows;  // words along the rows, for sums over rows
  Panels ds_by_rows;
  Panels ds_by_keys;  // words along the keys, for sums over keys
  float* lse;         // in the log2 domain
  float* delta;
  RowTable table;
};

template <Words kWords>
BackwardScratch take_backward_scratch(Arena& arena,
                                      const AttentionSizes& sizes,
                                      AttentionTile tile) {
  const int64_t rows = round_up(tile.rows, kTileRows);
  const int64_t band = smaller(rows, kBandRows);
  BackwardScratch scratch;
  scratch.q_left = arena.take_panels(rows, word_count<kWords>(sizes.head_dim));
  scratch.d_out_left = arena.take_panels(rows, word_count<kWords>(sizes.v_head_dim));
  scratch.d_q = arena.take_panels(rows, sizes.head_dim);
  scratch.k_transposed = arena.take_panels(round_up(sizes.head_dim, kLanes), tile.keys);
  scratch.v_transposed = arena.take_panels(round_up(sizes.v_head_dim, kLanes), tile.keys);
  scratch.k = arena.take_panels(word_count<kWords>(tile.keys), sizes.head_dim);
  scratch.p = arena.take_panels(band, tile.keys);
  scratch.ds = arena.take_panels(band, tile.keys);
  if (kWords == Words::kBf16Pairs) {
    scratch.q_right = arena.take_panels(word_count<kWords>(rows), sizes.head_dim);
    scratch.d_out_right = arena.take_panels(word_count<kWords>(rows), sizes.v_head_dim);
    scratch.p_by_rows = arena.take_panels(word_count<kWords>(band), tile.keys);
    scratch.ds_by_rows = arena.take_panels(word_count<kWords>(band), tile.keys);
    scratch.ds_by_keys = arena.take_panels(band, word_count<kWords>(tile.keys));
  } else {
    scratch.q_right = scratch.q_left;
    scratch.d_out_right = scratch.d_out_left;
    scratch.p_by_rows = scratch.p;
    scratch.ds_by_rows = scratch.ds;
    scratch.ds_by_keys = scratch.ds;
  }
  scratch.lse = arena.take<float>(rows);
  scratch.delta = arena.take<float>(rows);
  scratch.table = take_row_table(arena, rows);
  return scratch;
}

// Everything the loops below need about a call.
struct BackwardTask {
  const AttentionBackwardArgs& args;
  const AttentionRows& rows;
  const BackwardScratch& scratch;
  const KeyGradients* key_gradients;  // null: not wanted
  int64_t first_key;                  // of the key gradients
  bool write_d_q;
  bool write_d_mask;
};

inline float* d_mask_row(const BackwardTask& task, int64_t r) {
  return row_address(task.args.d_mask, task.args.d_mask_strides, task.rows.batch,
                     head_of(task.rows, r), query_of(task.rows, r));
}

// Processes one band of rows against one packed tile.
template <class T>
struct BackwardBand {
  static constexpr Words kWords = kWordsOf<T>;

  const BackwardTask& task;
  const ScoreRules& rules;
  KeyRange tile;
  int64_t first;  // row
  int64_t count;

  void process() const {
    PanelRange panels[kBandRows / kTileRows];
    for (int64_t r = 0; r < count; r += kTileRows) {
      panels[r / kTileRows] = visible_panels(task.scratch.table, first + r, rows_at(r), tile);
    }
    for (int64_t p = 0; p < panel_count(tile.end - tile.begin); ++p) {
      for (int64_t r = 0; r < count; r += kTileRows) {
        if (sees(panels[r / kTileRows], p)) {
          score_gradients(r, p);
        }
      }
    }
    if (task.write_d_q) {
      add_to_d_q(panels);
    }
    if (task.key_gradients) {
      const AttentionSizes& sizes = task.args.sizes;
      add_to_keys(panels, task.scratch.ds_by_rows, task.scratch.q_right, sizes.head_dim,
                  task.key_gradients->d_k);
      add_to_keys(panels, task.scratch.p_by_rows, task.scratch.d_out_right, sizes.v_head_dim,
                  task.key_gradients->d_v);
    }
  }

 private:
  int64_t rows_at(int64_t r) const { return smaller(kTileRows, count - r); }

  static bool sees(PanelRange range, int64_t panel) {
    return range.begin <= panel && panel < range.end;
  }

  // Computes p and ds' for kTileRows rows and one panel of keys.
  void score_gradients(int64_t r, int64_t panel) const {
    const BackwardScratch& scratch = task.scratch;
    const AttentionSizes& sizes = task.args.sizes;
    constexpr float kOne = 1.0f;
    multiply<kWords, Accumulate::kNone>(
        left_rows(scratch.q_left, first + r, 0), scratch.k_transposed.at(0, panel), rows_at(r),
        kPanel, word_count<kWords>(sizes.head_dim), scratch.p.at(r, panel), &rules.factor);
    multiply<kWords, Accumulate::kNone>(
        left_rows(scratch.d_out_left, first + r, 0), scratch.v_transposed.at(0, panel), rows_at(r),
        kPanel, word_count<kWords>(sizes.v_head_dim), scratch.ds.at(r, panel), &kOne);
    const int64_t key = tile.begin + panel * kPanel;
    for (int64_t i = r; i < r + rows_at(r); ++i) {
      const int64_t row = first + i;
      float* const p = scratch.p.at(i, panel);
      float* const ds = scratch.ds.at(i, panel);
      float slope[kPanel];
      const KeyRange seen = scratch.table.seen[row];
      if (!scores_are_products(rules) || !sees_all(seen, key, kPanel)) {
        finish_scores<T>(rules, seen, scratch.table.mask[row], key, p, slope);
      }
      for (int v = 0; v < kPanel; v += kLanes) {
        const f32v x = exp2_bounded<kExpAccuracy<T>>(load_lanes(p + v) - scratch.lse[row]);
        f32v gradient = x * (load_lanes(ds + v) - scratch.delta[row]);
        store_lanes(p + v, x);
        if (task.write_d_mask && key + v < sizes.kv_len) {
          store_columns(d_mask_row(task, row), key + v, sizes.kv_len, gradient);
        }
        if (rules.cap != 0) {
          gradient *= load_lanes(slope + v);
        }
        store_lanes(ds + v, gradient);
      }
    }
    if constexpr (kWords == Words::kBf16Pairs) {
      store_pairs(r, panel);
    }
  }

  // Packs p and ds' of kTileRows rows and one panel into words. A row that completes the last pair
  // is 0.
  void store_pairs(int64_t r, int64_t panel) const {
    const BackwardScratch& scratch = task.scratch;
    for (int64_t i = r; task.write_d_q && i < r + rows_at(r); ++i) {
      const float* ds = scratch.ds.at(i, panel);
      store_column_pairs(scratch.ds_by_keys, i, panel, load_lanes(ds), load_lanes(ds + kLanes));
    }
    if (!task.key_gradients) {
      return;
    }
    for (int64_t i = r; i < r + rows_at(r); i += 2) {
      for (int v = 0; v < kPanel; v += kLanes) {
        const bool odd = i + 1 < r + rows_at(r);
        const auto pairs = [&](Panels m) {
          const float* row = m.at(i, panel) + v;
          return bits_as<f32v>(
              bf16_pairs(load_lanes(row), odd ? load_lanes(row + kPanel) : f32v{}));
        };
        store_lanes(scratch.p_by_rows.at(i / 2, panel) + v, pairs(scratch.p));
        store_lanes(scratch.ds_by_rows.at(i / 2, panel) + v, pairs(scratch.ds));
      }
    }
  }

  void add_to_d_q(const PanelRange* panels) const {
    const BackwardScratch& scratch = task.scratch;
    const int64_t head_dim = task.args.sizes.head_dim;
    for (int64_t p = 0; p < panel_count(head_dim); ++p) {
      for (int64_t r = 0; r < count; r += kTileRows) {
        const PanelRange range = panels[r / kTileRows];
        const int64_t key = range.begin * kPanel;
        const int64_t depth = smaller(range.end * kPanel, tile.end - tile.begin) - key;
        if (depth > 0) {
          const int64_t word = word_count<kWords>(key);
          multiply<kWords, Accumulate::kAdd>(
              left_rows(scratch.ds_by_keys, r, word), scratch.k.at(word, p), rows_at(r),
              head_dim - p * kPanel, word_count<kWords>(depth), scratch.d_q.at(first + r, p));
        }
      }
    }
  }

  // sums += scores^T values, over runs of rows that see a panel of keys.
  void add_to_keys(
      const PanelRange* panels, Panels scores, Panels values, int64_t columns, Panels sums) const {
    for (int64_t panel = 0; panel < panel_count(tile.end - tile.begin); ++panel) {
      int64_t begin = 0;
      while (begin < count) {
        int64_t end = begin;
        while (end < count && sees(panels[end / kTileRows], panel)) {
          end += kTileRows;
        }
        if (end > begin) {
          add_run_to_keys(panel, begin, smaller(end, count), scores, values, columns, sums);
        }
        begin = end + kTileRows;
      }
    }
  }

  void add_run_to_keys(int64_t panel,
                       int64_t begin,
                       int64_t end,
                       Panels scores,
                       Panels values,
                       int64_t columns,
                       Panels sums) const {
    const int64_t first_key = panel * kPanel;
    const int64_t last_key = smaller(first_key + kPanel, tile.end - tile.begin);
    const int64_t offset = tile.begin - task.first_key;
    for (int64_t c = 0; c < panel_count(columns); ++c) {
      for (int64_t key = first_key; key < last_key; key += kTileRows) {
        multiply<kWords, Accumulate::kAdd, true>(
            left_columns(scores, key, word_count<kWords>(begin)),
            values.at(word_count<kWords>(first + begin), c), smaller(kTileRows, last_key - key),
            columns - c * kPanel, word_count<kWords>(end - begin), sums.at(offset + key, c));
      }
    }
  }
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
