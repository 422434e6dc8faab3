// The op function flash_attention.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

inline constexpr const char* kFlashAttention = "flash_attention";  // in messages

// The sequences of a ragged batch (sequences.h), as integers. None: every row is a query and a key.
struct AttentionLengths {
  std::optional<mx::array> keys, queries;        // [batch]
  std::optional<mx::array> starts;               // [batch]: the first key of each
  std::optional<mx::array> cu_queries, cu_keys;  // [sequences + 1]
};

struct AttentionPlan;  // plan.h

struct AttentionOptions {
  std::optional<float> scale;  // default: head_dim^-0.5
  // "causal", a bool mask (true: visible), or a mask added to the scores.
  std::variant<std::monostate, std::string, mx::array> mask;
  std::optional<mx::array> sinks;
  // Keys to the left and right of the query's own position; -1: unbounded.
  std::pair<int64_t, int64_t> window = {-1, -1};
  std::optional<float> softcap;
  bool return_lse = false;
  bool row_invariant = false;
  AttentionLengths lengths;
  std::optional<mx::array> block_table;       // k and v are pages (pages.h)
  std::shared_ptr<const AttentionPlan> plan;  // of these lengths and this table; null: none
  const char* op = kFlashAttention;           // in messages
};

// The arrays of a checked call, all of rank 4. Each dimension of `mask` is 1 or that of the scores.
struct AttentionInputs {
  mx::array q, k, v;
  std::optional<mx::array> mask;
  std::optional<mx::array> sinks;                 // float32 [batch or 1, q_heads]
  std::optional<mx::array> sequences;             // int32 [sequences, 5] (sequences.h)
  std::optional<mx::array> pages = std::nullopt;  // int32 [batch, pages_per_sequence] (pages.h)
};

// out, and lse if requested.
using AttentionResult = std::pair<mx::array, std::optional<mx::array>>;

AttentionResult flash_attention(const mx::array& q,
                                const mx::array& k,
                                const mx::array& v,
                                const AttentionOptions& options,
                                mx::StreamOrDevice stream);

}  // namespace mlx_anvil
