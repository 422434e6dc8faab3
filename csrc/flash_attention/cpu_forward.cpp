// Attention forward on the CPU: blocks of query rows against tiles of packed keys and values, with
// the online softmax. Formulas: problem.h. Everything is float32 inside, scores in the log2 domain.
#include "flash_attention/cpu_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

struct ForwardScratch {
  Panels q;        // scaled
  Panels k;        // transposed tile: rows are the head's dimensions
  Panels v;        // tile
  Panels s;        // scores of a band of rows, then their exponentials
  Panels out;      // not yet normalised
  float* max;      // largest score of each row so far
  float* sum;      // [rows][kLanes], normaliser of each row so far
  float* rescale;  // what earlier tiles' sums are worth under the new largest score
  RowTable table;
};

ForwardScratch take_scratch(Arena& arena, const AttentionSizes& sizes, AttentionTile tile) {
  const int64_t rows = round_up(tile.rows, kTileRows);
  ForwardScratch scratch;
  scratch.q = arena.take_panels(rows, sizes.head_dim);
  scratch.k = arena.take_panels(round_up(sizes.head_dim, kLanes), tile.keys);
  scratch.v = arena.take_panels(tile.keys, sizes.v_head_dim);
  scratch.s = arena.take_panels(smaller(rows, kBandRows), tile.keys);
  scratch.out = arena.take_panels(rows, sizes.v_head_dim);
  scratch.max = arena.take<float>(rows);
  scratch.sum = arena.take<float>(rows * kLanes);
  scratch.rescale = arena.take<float>(round_up(kBandRows, kLanes));
  scratch.table = take_row_table(arena, rows);
  return scratch;
}

// The sink is as a key with a value of 0.
void start_rows(const AttentionForwardArgs& args,
                const AttentionRows& rows,
                bool with_sinks,
                const ForwardScratch& scratch) {
  const int64_t count = row_count(rows);
  const int64_t padded = round_up(count, kTileRows);
  for (int64_t r = 0; r < padded; ++r) {
    const bool has_sink = with_sinks && r < count;
    float sink = -kInfinity;
    if (has_sink) {
      const int64_t head = rows.first_head + r / rows.queries;
      sink = args.sinks[rows.batch * args.sinks_strides[0] + head * args.sinks_strides[1]] * kLog2E;
    }
    scratch.max[r] = sink;
    store_lanes(scratch.sum + r * kLanes, f32v{});
    scratch.sum[r * kLanes] = sink == -kInfinity ? 0.0f : 1.0f;
    for (int64_t p = 0; p < panel_count(args.sizes.v_head_dim); ++p) {
      std::memset(scratch.out.at(r, p), 0, kPanel * sizeof(float));
    }
  }
}

// A band of rows against one packed tile.
template <class T>
struct Band {
  const ForwardScratch& scratch;
  const ScoreRules& rules;
  int64_t head_dim;
  int64_t v_head_dim;
  KeyRange tile;
  int64_t first;  // row
  int64_t count;

  void process() const {
    PanelRange panels[kBandRows / kTileRows];
    for (int64_t r = 0; r < count; r += kTileRows) {
      panels[r / kTileRows] = visible_panels(scratch.table, first + r, rows_at(r), tile);
    }
    scores(panels);
    new_maxima(panels);
    for (int64_t r = 0; r < count; ++r) {
      exponentials(r, panels[r / kTileRows]);
    }
    add_values(panels);
  }

 private:
  int64_t rows_at(int64_t r) const { return smaller(kTileRows, count - r); }

  // Panel by panel, so that one of k stays in the first cache while all rows meet it.
  void scores(const PanelRange* panels) const {
    for (int64_t p = 0; p < panel_count(tile.end - tile.begin); ++p) {
      for (int64_t r = 0; r < count; r += kTileRows) {
        if (panels[r / kTileRows].begin <= p && p < panels[r / kTileRows].end) {
          multiply<Old::kNone>(left_rows(scratch.q, first + r, 0), scratch.k.at(0, p), rows_at(r),
                               kPanel, head_dim, scratch.s.at(r, p));
        }
      }
    }
  }

  void new_maxima(const PanelRange* panels) const {
    float before[kBandRows];
    float after[kBandRows];
    for (int64_t r = 0; r < count; ++r) {
      before[r] = scratch.max[first + r];
      after[r] = row_maximum(r, panels[r / kTileRows]);
      scratch.max[first + r] = after[r];
    }
    for (int64_t r = 0; r < count; r += kLanes) {
      const f32v was = load_lanes(before + r), is = load_lanes(after + r);
      // Nothing seen yet: -inf - (-inf) would be NaN.
      const f32v base = is == splat(-kInfinity) ? f32v{} : is;
      store_lanes(scratch.rescale + r, exp2_bounded<Accuracy::kFloat32>(was - base));
    }
  }

  float row_maximum(int64_t r, PanelRange panels) const {
    const KeyRange seen = scratch.table.seen[first + r];
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const int64_t key = tile.begin + p * kPanel;
      if (!scores_are_products(rules) || !sees_all(seen, key, kPanel)) {
        finish_scores<T>(rules, seen, scratch.table.mask[first + r], key, scratch.s.at(r, p),
                         nullptr);
      }
    }
    f32v a = splat(scratch.max[first + r]);
    f32v b = a;
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const f32v x = load_lanes(scratch.s.at(r, p)), y = load_lanes(scratch.s.at(r, p) + kLanes);
      a = x > a ? x : a;  // a NaN in x is passed over: its exponential brings it back
      b = y > b ? y : b;
    }
    return lane_max(a > b ? a : b);
  }

  void exponentials(int64_t r, PanelRange panels) const {
    const float max = scratch.max[first + r];
    const float base = max == -kInfinity ? 0.0f : max;
    f32v a = load_lanes(scratch.sum + (first + r) * kLanes) * scratch.rescale[r];
    f32v b = {};
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      float* s = scratch.s.at(r, p);
      const f32v x = exp2_bounded<kExpAccuracy<T>>(load_lanes(s) - base);
      const f32v y = exp2_bounded<kExpAccuracy<T>>(load_lanes(s + kLanes) - base);
      a += x;
      b += y;
      store_lanes(s, x);
      store_lanes(s + kLanes, y);
    }
    store_lanes(scratch.sum + (first + r) * kLanes, a + b);
  }

  void add_values(const PanelRange* panels) const {
    for (int64_t p = 0; p < panel_count(v_head_dim); ++p) {
      for (int64_t r = 0; r < count; r += kTileRows) {
        const PanelRange range = panels[r / kTileRows];
        const int64_t key = range.begin * kPanel;
        const int64_t depth = smaller(range.end * kPanel, tile.end - tile.begin) - key;
        if (depth > 0) {
          multiply<Old::kScale>(left_rows(scratch.s, r, range.begin), scratch.v.at(key, p),
                                rows_at(r), v_head_dim - p * kPanel, depth,
                                scratch.out.at(first + r, p), scratch.rescale + r);
        }
      }
    }
  }
};

// Normalises row r of a result and writes it.
template <class T>
void finish_row(const AttentionForwardArgs& args,
                const AttentionRows& rows,
                int64_t r,
                float max,
                float sum,
                Panels out,
                int64_t out_row) {
  const int64_t head = rows.first_head + r / rows.queries;
  const int64_t query = rows.first_query + r % rows.queries;
  const AttentionSizes& sizes = args.sizes;
  T* to = row_address(static_cast<T*>(args.out.data), args.out.strides, rows.batch, head, query);
  unpack_row(out, out_row, sizes.v_head_dim, sum == 0 ? 0.0f : 1.0f / sum, to);
  if (args.lse) {
    args.lse[(rows.batch * sizes.q_heads + head) * sizes.q_len + query] =
        max * kLn2 + __builtin_logf(sum);
  }
}

template <class T>
void forward(const AttentionForwardArgs& args,
             const AttentionRows& rows,
             KeyRange keys,
             AttentionTile tile_size,
             float* partial,
             void* memory) {
  Arena arena{static_cast<char*>(memory)};
  const AttentionSizes& sizes = args.sizes;
  const ForwardScratch scratch = take_scratch(arena, sizes, tile_size);
  const ScoreRules rules = score_rules(args);
  const int64_t count = row_count(rows);

  const KeyRange all = set_row_table<T>(args, rows, keys, scratch.table);
  pack_block<T>(args.q, rows, sizes.head_dim, rules.q_factor, scratch.q);
  start_rows(args, rows, args.config.has_sinks && keys.begin == 0, scratch);

  for (int64_t key = all.begin / tile_size.keys * tile_size.keys; key < all.end;
       key += tile_size.keys) {
    const KeyRange tile = {key, smaller(key + tile_size.keys, all.end)};
    const int64_t size = tile.end - tile.begin;
    pack_transposed(rows_of<T>(args.k, rows.batch, rows.kv_head, key), size, sizes.head_dim,
                    scratch.k);
    pack(rows_of<T>(args.v, rows.batch, rows.kv_head, key), size, sizes.v_head_dim, 1.0f, scratch.v,
         0);
    for (int64_t r = 0; r < count; r += kBandRows) {
      Band<T>{
          scratch, rules, sizes.head_dim, sizes.v_head_dim, tile, r, smaller(kBandRows, count - r)}
          .process();
    }
  }

  for (int64_t r = 0; r < count; ++r) {
    const float sum = lane_sum(load_lanes(scratch.sum + r * kLanes));
    if (partial) {
      float* to = partial + r * (sizes.v_head_dim + 2);
      unpack_row(scratch.out, r, sizes.v_head_dim, 1.0f, to);
      to[sizes.v_head_dim] = scratch.max[r];
      to[sizes.v_head_dim + 1] = sum;
    } else {
      finish_row<T>(args, rows, r, scratch.max[r], sum, scratch.out, r);
    }
  }
}

template <class T>
void combine(const AttentionForwardArgs& args,
             const AttentionRows& rows,
             const float* partials,
             int64_t splits) {
  const int64_t columns = args.sizes.v_head_dim;
  const int64_t count = row_count(rows);
  const int64_t row_size = columns + 2;
  float memory[kMaxDecodeHeadDim];
  const Panels total = {memory, 1};
  for (int64_t r = 0; r < count; ++r) {
    const float* row = partials + r * row_size;
    float max = -kInfinity;
    for (int64_t i = 0; i < splits; ++i) {
      const float other = row[i * count * row_size + columns];
      max = other > max ? other : max;
    }
    float sum = 0;
    std::memset(memory, 0, sizeof(memory));
    for (int64_t i = 0; i < splits; ++i) {
      const float* part = row + i * count * row_size;
      const float factor = max == -kInfinity ? 0.0f : exp2_of(part[columns] - max);
      sum += factor * part[columns + 1];
      for (int64_t c = 0; c < columns; c += kLanes) {
        store_lanes(memory + c,
                    load_lanes(memory + c) + load_columns(part, 1, c, columns) * factor);
      }
    }
    finish_row<T>(args, rows, r, max, sum, total, 0);
  }
}

int64_t scratch_bytes(const AttentionSizes& sizes, AttentionTile tile) {
  Arena arena{nullptr};
  take_scratch(arena, sizes, tile);
  return arena.used;
}

template <class T>
constexpr AttentionForwardKernels kernels() {
  return {scratch_bytes, forward<T>, combine<T>};
}

}  // namespace

constinit const ByAttentionDtype<AttentionForwardKernels> attention_forward_kernels_table = {
    kernels<float>(), kernels<f16>(), kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
