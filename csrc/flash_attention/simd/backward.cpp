// Attention backward on the CPU. Recomputes the probabilities from the saved log-sum-exp:
//
//   p = exp(s - lse)    delta = rowsum(d_out * out) - d_lse    ds = p (d_out v^T - delta)
//   d_v = p^T d_out     d_mask = ds     d_q = scale ds' k      d_k = scale ds'^T q
//
// where ds' = ds times the derivative of the softcap. Each block of query rows processes each tile
// of keys once. The caller chooses which gradients it adds to (cpu_backward.cpp has the two
// schedules).
#include "flash_attention/simd/backward_band.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

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
  return args.lse[(batch * args.sizes.q_heads + head) * args.lse_stride + query];
}

template <class T>
void start_rows(const BackwardTask& task) {
  const AttentionRows& rows = task.rows;
  const BackwardScratch& scratch = task.scratch;
  for (int64_t r = 0; r < row_count(rows); ++r) {
    const int64_t head = head_of(rows, r);
    const int64_t query = query_of(rows, r);
    const float lse = row_lse(task.args, rows.batch, head, query);
    // All scores of such a row are -inf, and -inf - (-inf) would be NaN. So would be 0 d_lse if
    // d_lse is infinite, as the gradient of lse^2 is.
    const bool sees_nothing = lse == -kInfinity;
    scratch.lse[r] = sees_nothing ? 0.0f : lse * kLog2E;
    scratch.delta[r] = sees_nothing ? 0.0f : row_delta<T>(task.args, rows.batch, head, query);
  }
}

void clear_rows(Panels m, int64_t rows, int64_t columns) {
  for (int64_t p = 0; p < panel_count(columns); ++p) {
    std::memset(m.at(0, p), 0, rows * kPanel * sizeof(float));
  }
}

template <class T>
void pack_tile(const BackwardTask& task, KeyRange tile) {
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

// Stores row `row` of a result, or adds it (AttentionBackwardArgs::adds).
template <class T>
struct RowWriter {
  const AttentionOutput& to;
  const bool adds;

  void write(Panels from,
             int64_t row,
             int64_t columns,
             float factor,
             int64_t batch,
             int64_t head,
             int64_t to_row) const {
    if (adds) {
      float* const sums =
          row_address(static_cast<float*>(to.data), to.strides, batch, head, to_row);
      add_row(from, row, columns, factor, sums);
    } else {
      unpack_row(from, row, columns, factor,
                 row_address(static_cast<T*>(to.data), to.strides, batch, head, to_row));
    }
  }

 private:
  static void add_row(Panels from, int64_t row, int64_t columns, float factor, float* to) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x = load_lanes(from.at(row, c / kPanel) + c % kPanel);
      store_columns(to, c, columns, load_columns(to, 1, c, columns) + x * factor);
    }
  }
};

template <class T>
void store_d_q(const BackwardTask& task) {
  const AttentionRows& rows = task.rows;
  const RowWriter<T> writer{task.args.d_q, task.args.adds};
  for (int64_t r = 0; r < row_count(rows); ++r) {
    writer.write(task.scratch.d_q, r, task.args.sizes.head_dim, task.args.config.scale, rows.batch,
                 head_of(rows, r), query_of(rows, r));
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
  const BackwardScratch scratch = take_backward_scratch<kWordsOf<T>>(arena, sizes, tile_size);
  const KeyGradients key_gradients = take_key_gradients(key_arena, sizes, keys.end - keys.begin);
  const BackwardTask task = {args,
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
      BackwardBand<T>{task, rules, tile, r, smaller(kBandRows, count - r)}.process();
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
void store_key_gradients(const AttentionBackwardArgs& args,
                         int64_t batch,
                         int64_t kv_head,
                         KeyRange keys,
                         void* memory) {
  Arena arena{static_cast<char*>(memory)};
  const KeyGradients sums = take_key_gradients(arena, args.sizes, keys.end - keys.begin);
  const RowWriter<T> d_k{args.d_k, args.adds}, d_v{args.d_v, args.adds};
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    d_k.write(sums.d_k, key - keys.begin, args.sizes.head_dim, args.config.scale, batch, kv_head,
              key);
    d_v.write(sums.d_v, key - keys.begin, args.sizes.v_head_dim, 1.0f, batch, kv_head, key);
  }
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
  take_backward_scratch<kWordsOf<T>>(arena, sizes, tile);
  return arena.used;
}

int64_t key_gradient_bytes(const AttentionSizes& sizes, int64_t keys) {
  Arena arena{nullptr};
  take_key_gradients(arena, sizes, keys);
  return arena.used;
}

template <class T>
constexpr AttentionBackwardKernels kernels() {
  return {.scratch_bytes = scratch_bytes<T>,
          .key_gradient_bytes = key_gradient_bytes,
          .clear_key_gradients = clear_key_gradients,
          .backward = backward<T>,
          .store_key_gradients = store_key_gradients<T>,
          .sink_gradient = sink_gradient<T>};
}

}  // namespace

constinit const PerDtype<AttentionBackwardKernels> attention_backward_kernels_table = {
    .float32 = kernels<float>(), .float16 = kernels<f16>(), .bfloat16 = kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
