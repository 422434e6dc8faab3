// Conversion of the lengths of a ragged batch, for the functions that take them.
#pragma once

#include "common/python_args.h"
#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

inline std::optional<mx::array> to_optional_array(const char* op,
                                                  const char* name,
                                                  nb::handle value) {
  return value.is_none() ? std::nullopt : std::optional(to_array(op, name, value));
}

inline AttentionLengths to_lengths(const char* op,
                                   nb::handle lengths,
                                   nb::handle q_lengths,
                                   nb::handle starts,
                                   nb::handle cu_seqlens_q,
                                   nb::handle cu_seqlens_k) {
  return {.keys = to_optional_array(op, "lengths", lengths),
          .queries = to_optional_array(op, "q_lengths", q_lengths),
          .starts = to_optional_array(op, "starts", starts),
          .cu_queries = to_optional_array(op, "cu_seqlens_q", cu_seqlens_q),
          .cu_keys = to_optional_array(op, "cu_seqlens_k", cu_seqlens_k)};
}

}  // namespace mlx_anvil
