// Interface of the CPU attention kernels, called by cpu.cpp and cpu_backward.cpp. Plain data:
// kernel files include this header (common/isa.h says why they include no other kind).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"
#include "flash_attention/quantized_problem.h"

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

// Determines the layout of a kernel's scratch memory.
struct AttentionTile {
  int64_t rows;  // maximum rows of a call
  int64_t keys;  // keys processed at a time; every key range starts at a multiple of it
  // Forward only: read keys and values in place instead of packing them. At most kStreamedRows
  // rows. All rows of a call use the same setting, because it changes the order of additions.
  bool streamed = false;
};

inline constexpr int64_t kStreamedRows = 8;

template <class Args>
struct ForwardKernels {
  int64_t (*scratch_bytes)(const Args& args, AttentionTile tile);

  // Computes rows of out and lse from `keys`. With `partial` it stores, per row, the unnormalised
  // sum of values [v_head_dim], the largest score (log2 domain) and the normaliser, for `combine`.
  // Sinks count in the range that begins at 0.
  void (*forward)(const Args& args,
                  const AttentionRows& rows,
                  KeyRange keys,
                  AttentionTile tile,
                  float* partial,
                  void* scratch);

  // Combines `splits` consecutive partial results of row `row`, if there is such a row, into out
  // and lse.
  void (*combine)(const AttentionForwardArgs& args,
                  const AttentionRows& rows,
                  int64_t row,
                  const float* partials,
                  int64_t splits);
};

using AttentionForwardKernels = ForwardKernels<AttentionForwardArgs>;
using QuantizedAttentionKernels = ForwardKernels<QuantizedAttentionArgs>;

struct AttentionBackwardKernels {
  int64_t (*scratch_bytes)(const AttentionSizes& sizes, AttentionTile tile);

  // Memory for the sums that become d_k and d_v of `keys` keys.
  int64_t (*key_gradient_bytes)(const AttentionSizes& sizes, int64_t keys);
  void (*clear_key_gradients)(const AttentionSizes& sizes, KeyRange keys, void* key_gradients);

  // Adds the contributions of `rows` with `keys` to `key_gradients`, unless that is null. With
  // `row_gradients`, `keys` must be all keys, and rows of d_q and d_mask are written if wanted.
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

  // Computes d_sinks of one head.
  void (*sink_gradient)(const AttentionBackwardArgs& args, int64_t batch, int64_t head);
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<AttentionForwardKernels>, attention_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(PerDtype<QuantizedAttentionKernels>, quantized_attention_kernels)
MLX_ANVIL_DECLARE_KERNELS(PerDtype<AttentionBackwardKernels>, attention_backward_kernels)

}  // namespace mlx_anvil
