// The CPU kernels of attention, as the driver (cpu.cpp) calls them. Plain data: kernel files
// include this header (see common/isa.h for why they include no other kind).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// Query rows that share keys and values: `queries` consecutive queries of each of `heads`
// consecutive heads. Row r is query first_query + r % queries of head first_head + r / queries.
struct AttentionRows {
  int64_t batch;
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
  int64_t first_query;
  int64_t queries;
};

struct KeyRange {
  int64_t begin;
  int64_t end;
};

// What the scratch memory of a kernel is laid out for.
struct AttentionTile {
  int64_t rows;  // most rows of a call
  int64_t keys;  // keys worked on at a time; every range of keys begins at a multiple of it
  // Forward only: keys and values are read where they lie instead of packed. At most kStreamedRows
  // rows. The order of additions differs, so it is one for all rows of a call.
  bool streamed = false;
};

inline constexpr int64_t kStreamedRows = 8;

struct AttentionForwardKernels {
  int64_t (*scratch_bytes)(const AttentionSizes& sizes, AttentionTile tile);

  // Rows of out and lse from the keys in `keys`. With `partial`, instead: for each row its weighted
  // sum of values [v_head_dim], not yet normalised, the largest score (in the log2 domain) and the
  // normaliser, for `combine`. The sinks count for the range that begins at 0.
  void (*forward)(const AttentionForwardArgs& args,
                  const AttentionRows& rows,
                  KeyRange keys,
                  AttentionTile tile,
                  float* partial,
                  void* scratch);

  // Rows of out and lse from `splits` partial results, one after the other.
  void (*combine)(const AttentionForwardArgs& args,
                  const AttentionRows& rows,
                  const float* partials,
                  int64_t splits);
};

struct AttentionBackwardKernels {
  int64_t (*scratch_bytes)(const AttentionSizes& sizes, AttentionTile tile);

  // Memory for the sums that become d_k and d_v of so many keys.
  int64_t (*key_gradient_bytes)(const AttentionSizes& sizes, int64_t keys);
  void (*clear_key_gradients)(const AttentionSizes& sizes, KeyRange keys, void* key_gradients);

  // What the scores of `rows` with `keys` contribute: to `key_gradients`, unless that is null, and,
  // with `row_gradients` (`keys` are then all), rows of d_q and d_mask, as far as these are wanted.
  void (*backward)(const AttentionBackwardArgs& args,
                   const AttentionRows& rows,
                   KeyRange keys,
                   AttentionTile tile,
                   bool row_gradients,
                   void* key_gradients,
                   void* scratch);

  void (*store_key_gradients)(const AttentionBackwardArgs& args,
                              int64_t batch,
                              int64_t kv_head,
                              KeyRange keys,
                              void* key_gradients);

  // d_sinks of one head.
  void (*sink_gradient)(const AttentionBackwardArgs& args, int64_t batch, int64_t head);
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<AttentionForwardKernels>, attention_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(PerDtype<AttentionBackwardKernels>, attention_backward_kernels)

}  // namespace mlx_anvil
