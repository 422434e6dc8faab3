// Shared by the forward and backward kernels: the keys visible to each row, and the conversion of
// products to scores. For kernel files only (see common/simd/simd.h).
#pragma once

#include "common/simd/arena.h"
#include "common/simd/math.h"
#include "common/simd/panels.h"
#include "flash_attention/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.69314718055994531f;
inline constexpr float kInfinity = __builtin_inff();

// The log-sum-exp is float32 even for bfloat16 operands, so exponentials are more accurate than the
// output requires.
template <class T>
inline constexpr Accuracy kExpAccuracy =
    sizeof(T) == sizeof(float) ? Accuracy::kFloat32 : Accuracy::kFloat16;

// Rows processed between two matrix products. Their scores stay in the cache.
inline constexpr int64_t kBandRows = 64;

// Of values in integers: keys whose weights share a step.
inline constexpr int64_t kBlockKeys = 64;

inline int64_t row_count(const AttentionRows& rows) {
  return rows.heads * rows.queries;
}

template <class T>
inline T* row_address(T* data, const int64_t* strides, int64_t batch, int64_t head, int64_t row) {
  return data + batch * strides[0] + head * strides[1] + row * strides[2];
}

// Rows of one head of a view.
template <class T>
inline Source<T> rows_of(const AttentionView& view, int64_t batch, int64_t head, int64_t row) {
  const T* data = static_cast<const T*>(view.data);
  return {row_address(data, view.strides, batch, head, row), view.strides[2], view.strides[3]};
}

inline int64_t head_of(const AttentionRows& rows, int64_t r) {
  return rows.first_head + r / rows.queries;
}
inline int64_t query_of(const AttentionRows& rows, int64_t r) {
  return rows.first_query + r % rows.queries;
}

// Packs a block's rows of all heads as a left operand, padded with zero rows to whole product
// tiles.
template <Words kWords, class T>
void pack_left_block(const AttentionView& view,
                     const AttentionRows& rows,
                     int64_t columns,
                     Panels to) {
  for (int64_t h = 0; h < rows.heads; ++h) {
    pack_left<kWords>(rows_of<T>(view, rows.batch, rows.first_head + h, rows.first_query),
                      rows.queries, columns, to, h * rows.queries);
  }
  const int64_t count = row_count(rows);
  for (int64_t r = count; r < round_up(count, kTileRows); ++r) {
    for (int64_t p = 0; p < panel_count(word_count<kWords>(columns)); ++p) {
      std::memset(to.at(r, p), 0, kPanel * sizeof(float));
    }
  }
}

// Packs the block as a right operand of bfloat16 pairs. A pair may span two heads.
template <class T>
void pack_pairs_block(const AttentionView& view,
                      const AttentionRows& rows,
                      int64_t columns,
                      Panels to) {
  const auto row = [&](int64_t r) {
    return rows_of<T>(view, rows.batch, head_of(rows, r), query_of(rows, r)).data;
  };
  const int64_t count = row_count(rows);
  for (int64_t r = 0; r < count; r += 2) {
    pack_right_row<Words::kBf16Pairs>(row(r), r + 1 < count ? row(r + 1) : nullptr, view.strides[3],
                                      columns, to, r / 2);
  }
}

// ---- where keys are -----------------------------------------------------------------------------

// Calls action(first, count, batch, row) for each run of keys that follow one another in memory:
// keys [first, first + count) of the call are rows from `row` on of a batch, or of a page.
template <class Action>
void for_each_run(const AttentionOperands& args, int64_t batch, KeyRange keys, Action action) {
  const PageTable& pages = args.pages;
  if (!pages.ids) {
    action(keys.begin, keys.end - keys.begin, batch, keys.begin);
    return;
  }
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t column = key / pages.page_size, row = key - column * pages.page_size;
    const int64_t count = smaller(pages.page_size - row, keys.end - key);
    const int64_t id = pages.ids[column];
    action(key, count, smaller(larger(id, 0), pages.page_count - 1), row);
    key += count;
  }
}

// Lists the addresses of rows from keys.begin on, and of up to `ahead` rows after them, for
// prefetches. The last address is repeated where a sequence ends. `strides` are of batch, head,
// row.
template <class T>
void list_rows(const AttentionOperands& args,
               const AttentionRows& rows,
               const T* data,
               const int64_t* strides,
               KeyRange keys,
               int64_t ahead,
               const T** list) {
  const KeyRange all = {keys.begin, smaller(keys.end + ahead, args.sizes.kv_len)};
  for_each_run(args, rows.batch, all, [&](int64_t key, int64_t count, int64_t batch, int64_t row) {
    const T* const from = row_address(data, strides, batch, rows.kv_head, row);
    const int64_t stride = strides[2];  // a copy: stores to the list cannot change it
    const T** const to = list + (key - keys.begin);
    for (int64_t i = 0; i < count; ++i) {
      to[i] = from + i * stride;
    }
  });
  for (int64_t key = all.end; key < keys.end + ahead; ++key) {
    list[key - keys.begin] = list[all.end - 1 - keys.begin];
  }
}

// ---- visible keys -------------------------------------------------------------------------------

inline KeyRange visible_keys(const AttentionOperands& args, int64_t query) {
  const AttentionSizes& sizes = args.sizes;
  const int64_t position = query + sizes.kv_len - sizes.q_len;
  const KeyRange seen = {larger(0, position - args.config.window_left),
                         smaller(sizes.kv_len, position + args.config.window_right + 1)};
  return seen.begin < seen.end ? seen : KeyRange{0, 0};
}

inline KeyRange intersection(KeyRange a, KeyRange b) {
  const KeyRange both = {larger(a.begin, b.begin), smaller(a.end, b.end)};
  return both.begin < both.end ? both : KeyRange{0, 0};
}

// The smallest range that contains both.
inline KeyRange span(KeyRange a, KeyRange b) {
  if (a.begin == a.end || b.begin == b.end) {
    return a.begin == a.end ? b : a;
  }
  return {smaller(a.begin, b.begin), larger(a.end, b.end)};
}

// The rows of a block, padded to whole product tiles with rows that see no keys.
struct RowTable {
  KeyRange* seen;     // visible keys of each row
  const char** mask;  // row of the mask; unset if the call has none
};

inline RowTable take_row_table(Arena& arena, int64_t rows) {
  rows = round_up(rows, kTileRows);
  return {arena.take<KeyRange>(rows), arena.take<const char*>(rows)};
}

template <class T>
inline int64_t mask_item_bytes(const AttentionOperands& args) {
  return args.config.mask == AttentionMask::kBool ? 1 : sizeof(T);
}

// Fills the table. Returns the span of keys visible to any row.
template <class T>
KeyRange set_row_table(const AttentionOperands& args,
                       const AttentionRows& rows,
                       KeyRange keys,
                       const RowTable& table) {
  KeyRange all = {0, 0};
  int64_t r = 0;
  for (int64_t h = rows.first_head; h < rows.first_head + rows.heads; ++h) {
    for (int64_t i = rows.first_query; i < rows.first_query + rows.queries; ++i, ++r) {
      table.seen[r] = intersection(visible_keys(args, i), keys);
      all = span(all, table.seen[r]);
      if (args.config.mask != AttentionMask::kNone) {
        const int64_t* strides = args.mask.strides;
        const int64_t offset = rows.batch * strides[0] + h * strides[1] + i * strides[2];
        table.mask[r] =
            static_cast<const char*>(args.mask.data) + offset * mask_item_bytes<T>(args);
      }
    }
  }
  for (; r % kTileRows != 0; ++r) {
    table.seen[r] = {0, 0};
  }
  return all;
}

// The panels of a tile that contain keys visible to a group of rows.
struct PanelRange {
  int64_t begin;
  int64_t end;
};

inline PanelRange visible_panels(const RowTable& table, int64_t row, int64_t count, KeyRange tile) {
  KeyRange seen = {0, 0};
  for (int64_t r = row; r < row + count; ++r) {
    seen = span(seen, intersection(table.seen[r], tile));
  }
  if (seen.begin == seen.end) {
    return {0, 0};
  }
  return {(seen.begin - tile.begin) / kPanel, panel_count(seen.end - tile.begin)};
}

// ---- from products to scores -------------------------------------------------------------------

// How q . k becomes a score in the log2 domain.
struct ScoreRules {
  float factor;  // scales the product; with a softcap, in units of the cap
  float cap;     // in the log2 domain; 0: none
  AttentionMask mask;
  int64_t mask_stride;
};

inline ScoreRules score_rules(const AttentionOperands& args) {
  const AttentionConfig& config = args.config;
  const bool capped = config.softcap != 0;
  return {capped ? config.scale / config.softcap : config.scale * kLog2E,
          capped ? config.softcap * kLog2E : 0, config.mask, args.mask.strides[3]};
}

inline bool scores_are_products(const ScoreRules& rules) {
  return rules.cap == 0 && rules.mask == AttentionMask::kNone;
}

inline i32v lane_index() {
  i32v index;
  for (int i = 0; i < kLanes; ++i) {
    index[i] = i;
  }
  return index;
}

// Sets all bits in the lanes of keys [key, key + kLanes) that are in `seen`.
inline i32v lanes_seen(KeyRange seen, int64_t key) {
  const int32_t begin = static_cast<int32_t>(smaller(larger(seen.begin - key, 0), kLanes));
  const int32_t end = static_cast<int32_t>(smaller(larger(seen.end - key, 0), kLanes));
  const i32v lane = lane_index();
  return (lane >= begin) & (lane < end);
}

template <class T>
inline f32v apply_mask(
    const ScoreRules& rules, const char* mask, int64_t key, int64_t count, f32v s) {
  if (rules.mask == AttentionMask::kBool) {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(mask) + key * rules.mask_stride;
    u8v bits = {};
    if (rules.mask_stride == 1 && count >= kLanes) {
      bits = load_bits<u8v>(from);
    } else {
      for (int64_t i = 0; i < smaller(count, kLanes); ++i) {
        bits[i] = from[i * rules.mask_stride];
      }
    }
    return zero_extend(bits) != 0u ? s : splat(-kInfinity);
  }
  const T* from = reinterpret_cast<const T*>(mask) + key * rules.mask_stride;
  return s + load_columns(from, rules.mask_stride, 0, count) * kLog2E;
}

// Converts products to scores in place, for one row and one panel of keys. Stores the derivative of
// the softcap to `slope` unless that is null.
template <class T>
inline void finish_scores(
    const ScoreRules& rules, KeyRange seen, const char* mask, int64_t key, float* s, float* slope) {
  for (int v = 0; v < kPanel; v += kLanes) {
    f32v x = load_lanes(s + v);
    if (rules.cap != 0) {
      const f32v t = tanh(x);
      x = t * rules.cap;
      if (slope) {
        store_lanes(slope + v, 1.0f - t * t);
      }
    }
    const int64_t count = seen.end - (key + v);
    if (rules.mask != AttentionMask::kNone && count > 0) {
      x = apply_mask<T>(rules, mask, key + v, count, x);
    }
    x = lanes_seen(seen, key + v) != 0 ? x : splat(-kInfinity);
    store_lanes(s + v, x);
  }
}

inline float exp2_of(float x) {
  return exp2_bounded<Accuracy::kFloat32>(splat(x))[0];
}

inline bool sees_all(KeyRange seen, int64_t key, int64_t count) {
  return seen.begin <= key && seen.end >= key + count;
}

inline float lane_max(f32v x) {
  float lanes[kLanes];
  store_lanes(lanes, x);
  float max = lanes[0];
  for (int i = 1; i < kLanes; ++i) {
    max = lanes[i] > max ? lanes[i] : max;
  }
  return max;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
