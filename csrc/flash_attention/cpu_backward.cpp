// Attention backward on the CPU. The probabilities are computed again from the saved log-sum-exp:
//
//   p = exp(s - lse)    delta = rowsum(d_out * out) - d_lse    ds = p (d_out v^T - delta)
//   d_v = p^T d_out     d_mask = ds     d_q = scale ds' k      d_k = scale ds'^T q
//
// with ds' = ds times the derivative of the softcap. Each block of query rows meets each tile of
// keys once; what it adds to is what the caller wants (native.cpp has the two schedules).
#include "flash_attention/cpu_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Sums over rows for a range of keys, [keys, head_dim] and [keys, v_head_dim].
struct KeyGradients {
  Panels d_k;
  Panels d_v;
};

KeyGradients take_key_gradients(Arena& arena, const AttentionSizes& sizes, int64_t keys) {
  keys = round_up(keys, kPanel);
  return {arena.take_panels(keys, sizes.head_dim), arena.take_panels(keys, sizes.v_head_dim)};
}

// Operands that the two sides of products need in different words have two copies where words are
// pairs, else one under two names.
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
  Panels p_by_rows;  // with words along the rows: for sums over rows
  Panels ds_by_rows;
  Panels ds_by_keys;  // with words along the keys: for sums over keys
  float* lse;         // in the log2 domain
  float* delta;
  RowTable table;
};

template <Words kWords>
BackwardScratch take_scratch(Arena& arena, const AttentionSizes& sizes, AttentionTile tile) {
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

// What the loops below need to know of a call.
struct Task {
  const AttentionBackwardArgs& args;
  const AttentionRows& rows;
  const BackwardScratch& scratch;
  const KeyGradients* key_gradients;  // null: not wanted
  int64_t first_key;                  // of the key gradients
  bool write_d_q;
  bool write_d_mask;
};

inline float* d_mask_row(const Task& task, int64_t r) {
  const AttentionSizes& sizes = task.args.sizes;
  const int64_t head = head_of(task.rows, r);
  const int64_t query = query_of(task.rows, r);
  return task.args.d_mask +
         ((task.rows.batch * sizes.q_heads + head) * sizes.q_len + query) * sizes.kv_len;
}

// ---- one band of rows against one packed tile --------------------------------------------------

template <class T>
struct Band {
  static constexpr Words kWords = kWordsOf<T>;

  const Task& task;
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

  // p and ds' of kTileRows rows and one panel of keys.
  void score_gradients(int64_t r, int64_t panel) const {
    const BackwardScratch& scratch = task.scratch;
    const AttentionSizes& sizes = task.args.sizes;
    constexpr float kOne = 1.0f;
    multiply<kWords, Old::kNone>(
        left_rows(scratch.q_left, first + r, 0), scratch.k_transposed.at(0, panel), rows_at(r),
        kPanel, word_count<kWords>(sizes.head_dim), scratch.p.at(r, panel), &rules.factor);
    multiply<kWords, Old::kNone>(
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

  // p and ds' of kTileRows rows and one panel, as words. Rows that fill up the last pair are 0.
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
          multiply<kWords, Old::kAdd>(left_rows(scratch.ds_by_keys, r, word), scratch.k.at(word, p),
                                      rows_at(r), head_dim - p * kPanel, word_count<kWords>(depth),
                                      scratch.d_q.at(first + r, p));
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
        multiply<kWords, Old::kAdd, true>(
            left_columns(scores, key, word_count<kWords>(begin)),
            values.at(word_count<kWords>(first + begin), c), smaller(kTileRows, last_key - key),
            columns - c * kPanel, word_count<kWords>(end - begin), sums.at(offset + key, c));
      }
    }
  }
};

// ---- one block of rows -------------------------------------------------------------------------

// rowsum(d_out * out) - d_lse
template <class T>
float row_delta(const AttentionBackwardArgs& args, int64_t batch, int64_t head, int64_t query) {
  const Source<T> out = rows_of<T>(args.out, batch, head, query);
  const Source<T> d_out = rows_of<T>(args.d_out, batch, head, query);
  const int64_t columns = args.sizes.v_head_dim;
  f32v sum = {};
  for (int64_t c = 0; c < columns; c += kLanes) {
    sum += load_columns(out.data, out.column_stride, c, columns) *
           load_columns(d_out.data, d_out.column_stride, c, columns);
  }
  const float d_lse =
      args.d_lse ? *row_address(args.d_lse, args.d_lse_strides, batch, head, query) : 0.0f;
  return lane_sum(sum) - d_lse;
}

inline float row_lse(const AttentionBackwardArgs& args,
                     int64_t batch,
                     int64_t head,
                     int64_t query) {
  return args.lse[(batch * args.sizes.q_heads + head) * args.sizes.q_len + query];
}

template <class T>
void start_rows(const Task& task) {
  const AttentionRows& rows = task.rows;
  const BackwardScratch& scratch = task.scratch;
  for (int64_t r = 0; r < row_count(rows); ++r) {
    const int64_t head = head_of(rows, r);
    const int64_t query = query_of(rows, r);
    const float lse = row_lse(task.args, rows.batch, head, query);
    // All scores of such a row are -inf, and -inf - (-inf) would be NaN.
    scratch.lse[r] = lse == -kInfinity ? 0.0f : lse * kLog2E;
    scratch.delta[r] = row_delta<T>(task.args, rows.batch, head, query);
  }
}

void clear_rows(Panels m, int64_t rows, int64_t columns) {
  for (int64_t p = 0; p < panel_count(columns); ++p) {
    std::memset(m.at(0, p), 0, rows * kPanel * sizeof(float));
  }
}

template <class T>
void pack_tile(const Task& task, KeyRange tile) {
  const AttentionBackwardArgs& args = task.args;
  const BackwardScratch& scratch = task.scratch;
  const int64_t size = tile.end - tile.begin;
  const Source<T> k = rows_of<T>(args.k, task.rows.batch, task.rows.kv_head, tile.begin);
  const Source<T> v = rows_of<T>(args.v, task.rows.batch, task.rows.kv_head, tile.begin);
  pack_right_transposed<kWordsOf<T>>(k, size, args.sizes.head_dim, scratch.k_transposed);
  pack_right_transposed<kWordsOf<T>>(v, size, args.sizes.v_head_dim, scratch.v_transposed);
  if (task.write_d_q) {
    pack_right<kWordsOf<T>>(k, size, args.sizes.head_dim, scratch.k);
  }
}

template <class T>
void store_d_q(const Task& task) {
  const AttentionRows& rows = task.rows;
  const AttentionOutput& d_q = task.args.d_q;
  for (int64_t r = 0; r < row_count(rows); ++r) {
    T* to = row_address(static_cast<T*>(d_q.data), d_q.strides, rows.batch, head_of(rows, r),
                        query_of(rows, r));
    unpack_row(task.scratch.d_q, r, task.args.sizes.head_dim, task.args.config.scale, to);
  }
}

template <class T>
void backward(const AttentionBackwardArgs& args,
              const AttentionRows& rows,
              KeyRange keys,
              AttentionTile tile_size,
              bool row_gradients,
              void* key_memory,
              void* memory) {
  constexpr Words kWords = kWordsOf<T>;
  Arena arena{static_cast<char*>(memory)};
  Arena key_arena{static_cast<char*>(key_memory)};
  const AttentionSizes& sizes = args.sizes;
  const BackwardScratch scratch = take_scratch<kWordsOf<T>>(arena, sizes, tile_size);
  const KeyGradients key_gradients = take_key_gradients(key_arena, sizes, keys.end - keys.begin);
  const Task task = {args,
                     rows,
                     scratch,
                     key_memory ? &key_gradients : nullptr,
                     keys.begin,
                     row_gradients && args.d_q.data,
                     row_gradients && args.d_mask};
  const ScoreRules rules = score_rules(args);
  const int64_t count = row_count(rows);

  const KeyRange all = set_row_table<T>(args, rows, keys, scratch.table);
  if (task.write_d_mask) {
    for (int64_t r = 0; r < count; ++r) {
      std::memset(d_mask_row(task, r), 0, sizes.kv_len * sizeof(float));
    }
  }
  if (task.write_d_q) {
    clear_rows(scratch.d_q, round_up(count, kTileRows), sizes.head_dim);
  }
  if (all.begin < all.end) {
    start_rows<T>(task);
    pack_left_block<kWords, T>(args.q, rows, sizes.head_dim, scratch.q_left);
    pack_left_block<kWords, T>(args.d_out, rows, sizes.v_head_dim, scratch.d_out_left);
    if constexpr (kWords == Words::kBf16Pairs) {
      if (task.key_gradients) {
        pack_pairs_block<T>(args.q, rows, sizes.head_dim, scratch.q_right);
        pack_pairs_block<T>(args.d_out, rows, sizes.v_head_dim, scratch.d_out_right);
      }
    }
  }
  for (int64_t key = all.begin / tile_size.keys * tile_size.keys; key < all.end;
       key += tile_size.keys) {
    const KeyRange tile = {key, smaller(key + tile_size.keys, all.end)};
    pack_tile<T>(task, tile);
    for (int64_t r = 0; r < count; r += kBandRows) {
      Band<T>{task, rules, tile, r, smaller(kBandRows, count - r)}.process();
    }
  }
  if (task.write_d_q) {
    store_d_q<T>(task);
  }
}

// ---- sums over rows ----------------------------------------------------------------------------

void clear_key_gradients(const AttentionSizes& sizes, KeyRange keys, void* memory) {
  Arena arena{nullptr};
  take_key_gradients(arena, sizes, keys.end - keys.begin);
  std::memset(memory, 0, arena.used);
}

template <class T>
void store_rows(Panels from,
                const AttentionOutput& to,
                int64_t batch,
                int64_t head,
                KeyRange keys,
                int64_t columns,
                float factor) {
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    unpack_row(from, key - keys.begin, columns, factor,
               row_address(static_cast<T*>(to.data), to.strides, batch, head, key));
  }
}

template <class T>
void store_key_gradients(const AttentionBackwardArgs& args,
                         int64_t batch,
                         int64_t kv_head,
                         KeyRange keys,
                         void* memory) {
  Arena arena{static_cast<char*>(memory)};
  const KeyGradients sums = take_key_gradients(arena, args.sizes, keys.end - keys.begin);
  store_rows<T>(sums.d_k, args.d_k, batch, kv_head, keys, args.sizes.head_dim, args.config.scale);
  store_rows<T>(sums.d_v, args.d_v, batch, kv_head, keys, args.sizes.v_head_dim, 1.0f);
}

template <class T>
void sink_gradient(const AttentionBackwardArgs& args, int64_t batch, int64_t head) {
  const float sink = args.sinks[batch * args.sinks_strides[0] + head * args.sinks_strides[1]];
  double sum = 0;
  for (int64_t i = 0; i < args.sizes.q_len; ++i) {
    const float p = exp2_of((sink - row_lse(args, batch, head, i)) * kLog2E);
    sum -= p * row_delta<T>(args, batch, head, i);
  }
  args.d_sinks[batch * args.sizes.q_heads + head] =
      sink == -kInfinity ? 0.0f : static_cast<float>(sum);
}

template <class T>
int64_t scratch_bytes(const AttentionSizes& sizes, AttentionTile tile) {
  Arena arena{nullptr};
  take_scratch<kWordsOf<T>>(arena, sizes, tile);
  return arena.used;
}

int64_t key_gradient_bytes(const AttentionSizes& sizes, int64_t keys) {
  Arena arena{nullptr};
  take_key_gradients(arena, sizes, keys);
  return arena.used;
}

template <class T>
constexpr AttentionBackwardKernels kernels() {
  return {scratch_bytes<T>, key_gradient_bytes,     clear_key_gradients,
          backward<T>,      store_key_gradients<T>, sink_gradient<T>};
}

}  // namespace

constinit const ByAttentionDtype<AttentionBackwardKernels> attention_backward_kernels_table = {
    kernels<float>(), kernels<f16>(), kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
