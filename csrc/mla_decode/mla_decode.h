// The op function mla_decode.
#pragma once

#include <optional>

#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

inline constexpr const char* kMlaDecode = "mla_decode";  // in messages

// The arrays of a checked call, all of rank 4 and one dtype. Each dimension of `mask` is 1 or that
// of the scores.
struct MlaInputs {
  mx::array q_nope, q_rope;            // [batch, heads, q_len, rank or rope_dim]
  mx::array latent, k_rope;            // [batch, 1, kv_len, rank or rope_dim]
  std::optional<mx::array> mask;       // bool, or of the dtype
  std::optional<mx::array> sinks;      // float32 [batch or 1, heads]
  std::optional<mx::array> sequences;  // int32 [batch, 5] (flash_attention/sequences.h)
};

// `options` has a scale, and no window.
AttentionResult mla_decode(const mx::array& q_nope,
                           const mx::array& q_rope,
                           const mx::array& latent,
                           const mx::array& k_rope,
                           const AttentionOptions& options,
                           mx::StreamOrDevice stream);

}  // namespace mlx_anvil
