// The forward of attention: blocks of query rows against tiles of keys, with online softmax.
// Formulas: problem.h. The arithmetic is float32, with scores in the log2 domain. For kernel files
// only (see common/simd/simd.h).
//
// KeyValues is where keys and values come from:
//   Args                    the arguments of a call
//   KeyValues(arena, args, rows, tile_size)
//                           of one kv head; takes its scratch memory
//   pack_queries<kWords>(q) packs the queries as a left operand
//   read(tile)              turns to a tile of keys
//   pack(k, v)              packs the tile: k transposed, both as right operands
//   kMultiplies             true if it keeps queries and keys itself; q and k are empty
//   multiply(first, count, factor, s)
//                           if so: factor * products of some rows with the tile's keys, to s
//   kStreams                true if keys and values can be read in place; if so:
//   set_queries(q, count)   of a call that reads keys and values in place
//   scores<kRows>(...), add_values<kRows>(...)
//                           as stream.h, from the tile in place
#pragma once

#include "flash_attention/simd/softmax.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

struct ForwardScratch {
  Panels q;
  Panels k;    // transposed tile: rows are the head's dimensions
  Panels v;    // tile
  Panels s;    // scores of a band of rows
  Panels p;    // their exponentials; if those are float32, in place of the scores
  Panels out;  // not normalised yet
  SoftmaxState state;
  RowTable table;
};

template <Words kWords>
ForwardScratch take_forward_scratch(Arena& arena, const AttentionSizes& sizes, AttentionTile tile) {
  const int64_t rows = round_up(tile.rows, kTileRows);
  ForwardScratch scratch;
  scratch.q = arena.take_panels(rows, sizes.head_dim);
  const int64_t packed_keys = tile.streamed ? 0 : tile.keys;
  scratch.k = arena.take_panels(round_up(sizes.head_dim, kLanes), packed_keys);
  scratch.v = arena.take_panels(packed_keys, sizes.v_head_dim);
  scratch.s = arena.take_panels(smaller(rows, kBandRows), tile.keys);
  scratch.p = scratch.s;
  if (kWords == Words::kBf16Pairs) {
    scratch.p = arena.take_panels(scratch.s.rows, word_count<kWords>(tile.keys));
  }
  scratch.out = arena.take_panels(rows, sizes.v_head_dim);
  scratch.state = take_softmax_state(arena, rows);
  scratch.table = take_row_table(arena, rows);
  return scratch;
}

// A sink acts as a key whose value is 0.
inline void start_rows(const AttentionForwardArgs& args,
                       const AttentionRows& rows,
                       bool with_sinks,
                       const ForwardScratch& scratch) {
  const int64_t count = row_count(rows);
  const int64_t padded = round_up(count, kTileRows);
  for (int64_t r = 0; r < padded; ++r) {
    const bool has_sink = with_sinks && r < count;
    float sink = -kInfinity;
    if (has_sink) {
      const int64_t head = head_of(rows, r);
      sink = args.sinks[rows.batch * args.sinks_strides[0] + head * args.sinks_strides[1]] * kLog2E;
    }
    start_row(scratch.state, r, sink);
    for (int64_t p = 0; p < panel_count(args.sizes.v_head_dim); ++p) {
      std::memset(scratch.out.at(r, p), 0, kPanel * sizeof(float));
    }
  }
}

// A band of rows against one tile of keys.
template <class T, class KeyValues>
struct Band {
  static constexpr Words kWords = kWordsOf<T>;

  const ForwardScratch& scratch;
  const ScoreRules& rules;
  const AttentionSizes& sizes;
  const KeyValues& kv;
  KeyRange tile;
  int64_t first;  // row
  int64_t count;

  // For packed keys and values.
  void process() const {
    PanelRange panels[kBandRows / kTileRows];
    for (int64_t r = 0; r < count; r += kTileRows) {
      panels[r / kTileRows] = visible_panels(scratch.table, first + r, rows_at(r), tile);
    }
    scores(panels);
    softmax<kWords>().advance(panels);
    add_values(panels);
  }

  // For keys and values read in place. At most kStreamedRows rows.
  void process_streamed() const {
    PanelRange seen = visible_panels(scratch.table, first, count, tile);
    if (seen.begin == seen.end) {
      return;
    }
    // Keys whose weights share a step are the same ones whatever rows are beside.
    seen.begin -= seen.begin % (kBlockKeys / kPanel);
    if (count > 4) {
      stream<8>(seen);
    } else if (count > 2) {
      stream<4>(seen);
    } else if (count > 1) {
      stream<2>(seen);
    } else {
      stream<1>(seen);
    }
  }

 private:
  int64_t rows_at(int64_t r) const { return smaller(kTileRows, count - r); }

  template <Words kExponentials>
  OnlineSoftmax<T, kExponentials> softmax() const {
    return {scratch.s, scratch.p, scratch.state, scratch.table, rules, tile, first, count};
  }

  template <int kRows>
  void stream(PanelRange seen) const {
    PanelRange panels[kStreamedRows / kTileRows];
    for (PanelRange& range : panels) {
      range = seen;
    }
    const int64_t begin = seen.begin * kPanel;
    const int64_t end = smaller(seen.end * kPanel, tile.end - tile.begin);
    kv.template scores<kRows>(begin, end, rules.factor, scratch.q, scratch.s);
    softmax<Words::kFloat32>().advance(panels);
    kv.template add_values<kRows>(begin, end, scratch.s, scratch.state.rescale, scratch.out);
  }

  // Iterates over panels first, so that a panel of k stays in L1 for all rows.
  void scores(const PanelRange* panels) const {
    if constexpr (KeyValues::kMultiplies) {
      kv.multiply(first, count, rules.factor, scratch.s);
      return;
    }
    for (int64_t p = 0; p < panel_count(tile.end - tile.begin); ++p) {
      for (int64_t r = 0; r < count; r += kTileRows) {
        if (panels[r / kTileRows].begin <= p && p < panels[r / kTileRows].end) {
          multiply<kWords, Accumulate::kNone>(
              left_rows(scratch.q, first + r, 0), scratch.k.at(0, p), rows_at(r), kPanel,
              word_count<kWords>(sizes.head_dim), scratch.s.at(r, p), &rules.factor);
        }
      }
    }
  }

  void add_values(const PanelRange* panels) const {
    for (int64_t p = 0; p < panel_count(sizes.v_head_dim); ++p) {
      for (int64_t r = 0; r < count; r += kTileRows) {
        const PanelRange range = panels[r / kTileRows];
        const int64_t key = range.begin * kPanel;
        const int64_t depth = smaller(range.end * kPanel, tile.end - tile.begin) - key;
        if (depth > 0) {
          const int64_t word = word_count<kWords>(key);
          multiply<kWords, Accumulate::kScale>(
              left_rows(scratch.p, r, word), scratch.v.at(word, p), rows_at(r),
              sizes.v_head_dim - p * kPanel, word_count<kWords>(depth),
              scratch.out.at(first + r, p), scratch.state.rescale + r);
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
  const int64_t head = head_of(rows, r);
  const int64_t query = query_of(rows, r);
  const AttentionSizes& sizes = args.sizes;
  T* to = row_address(static_cast<T*>(args.out.data), args.out.strides, rows.batch, head, query);
  unpack_row(out, out_row, sizes.v_head_dim, sum == 0 ? 0.0f : 1.0f / sum, to);
  if (args.lse) {
    args.lse[(rows.batch * sizes.q_heads + head) * args.lse_stride + query] =
        max * kLn2 + __builtin_logf(sum);
  }
}

template <class T, class KeyValues>
void attention_forward(const typename KeyValues::Args& args,
                       const AttentionRows& rows,
                       KeyRange keys,
                       AttentionTile tile_size,
                       float* partial,
                       void* memory) {
  Arena arena{static_cast<char*>(memory)};
  const AttentionSizes& sizes = args.sizes;
  const ForwardScratch scratch = take_forward_scratch<kWordsOf<T>>(arena, sizes, tile_size);
  KeyValues kv(arena, args, rows, tile_size);
  const ScoreRules rules = score_rules(args);
  const int64_t count = row_count(rows);

  const KeyRange all = set_row_table<T>(args, rows, keys, scratch.table);
  if (!KeyValues::kStreams || !tile_size.streamed) {
    kv.template pack_queries<kWordsOf<T>>(scratch.q);
  } else if constexpr (KeyValues::kStreams) {
    kv.template pack_queries<Words::kFloat32>(scratch.q);
    kv.set_queries(scratch.q, round_up(count, kTileRows));
  }
  start_rows(args, rows, args.config.has_sinks && keys.begin == 0, scratch);

  for (int64_t key = all.begin / tile_size.keys * tile_size.keys; key < all.end;
       key += tile_size.keys) {
    const KeyRange tile = {key, smaller(key + tile_size.keys, all.end)};
    kv.read(tile);
    if constexpr (KeyValues::kStreams) {
      if (tile_size.streamed) {
        Band<T, KeyValues>{scratch, rules, sizes, kv, tile, 0, count}.process_streamed();
        continue;
      }
    }
    kv.pack(scratch.k, scratch.v);
    for (int64_t r = 0; r < count; r += kBandRows) {
      Band<T, KeyValues>{scratch, rules, sizes, kv, tile, r, smaller(kBandRows, count - r)}
          .process();
    }
  }

  for (int64_t r = 0; r < count; ++r) {
    const float sum = normaliser(scratch.state, r);
    if (partial) {
      float* to = partial + r * (sizes.v_head_dim + 2);
      unpack_row(scratch.out, r, sizes.v_head_dim, 1.0f, to);
      to[sizes.v_head_dim] = scratch.state.max[r];
      to[sizes.v_head_dim + 1] = sum;
    } else {
      finish_row<T>(args, rows, r, scratch.state.max[r], sum, scratch.out, r);
    }
  }
}

template <class T, class KeyValues>
int64_t forward_scratch_bytes(const typename KeyValues::Args& args, AttentionTile tile) {
  Arena arena{nullptr};
  take_forward_scratch<kWordsOf<T>>(arena, args.sizes, tile);
  KeyValues(arena, args, AttentionRows{}, tile);
  return arena.used;
}

template <class T>
void combine(const AttentionForwardArgs& args,
             const AttentionRows& rows,
             int64_t r,
             const float* partials,
             int64_t splits) {
  const int64_t columns = args.sizes.v_head_dim;
  const int64_t count = row_count(rows);
  if (r >= count) {
    return;
  }
  const int64_t row_size = columns + 2;
  float memory[kMaxHeadDim];
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
      store_lanes(memory + c, load_lanes(memory + c) + load_columns(part, 1, c, columns) * factor);
    }
  }
  finish_row<T>(args, rows, r, max, sum, {memory, 1}, 0);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
