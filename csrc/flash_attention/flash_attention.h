// The op function flash_attention.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

inline constexpr const char* kFlashAttention = "flash_attention";  // in messages

struct AttentionOptions {
  std::optional<float> scale;  // default: head_dim^-0.5
  // "causal", a bool mask (true: visible), or a mask added to the scores.
  std::variant<std::monostate, std::string, mx::array> mask;
  std::optional<mx::array> sinks;
  // Keys to the left and right of the query's own position; -1: unbounded.
  std::pair<int64_t, int64_t> window = {-1, -1};
  std::optional<float> softcap;
  bool return_lse = false;
};

// The arrays of a checked call, all of rank 4. Each dimension of `mask` is 1 or that of the scores.
struct AttentionInputs {
  mx::array q, k, v;
  std::optional<mx::array> mask;
  std::optional<mx::array> sinks;  // float32 [batch or 1, q_heads]
};

// out, and lse if requested.
using AttentionResult = std::pair<mx::array, std::optional<mx::array>>;

AttentionResult flash_attention(const mx::array& q,
                                const mx::array& k,
                                const mx::array& v,
                                const AttentionOptions& options,
                                mx::StreamOrDevice stream);

}  // namespace mlx_anvil
