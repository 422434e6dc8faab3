// The gradients of a forward from what it saved, for plain and for dequantized keys and values.
#pragma once

#include <optional>

#include "common/primitive.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// `primals`: q, k, v, mask and sinks, without those that the call lacks; `saved`: its out and lse;
// `cotangents`: of out, and of lse if that was a result. Returns the gradients of `argnums`.
Arrays attention_gradient(const AttentionConfig& config,
                          const Arrays& primals,
                          const Arrays& saved,
                          const Arrays& cotangents,
                          const std::vector<int>& argnums,
                          mx::Stream s);

// The gradients of a call's results without those of rows that see no key, where the kernels
// multiply by weights of 0: an infinite one would become NaN.
struct SeenGradients {
  mx::array d_out;
  std::optional<mx::array> d_lse;
  std::optional<mx::array> d_lse_of_sinks;  // cleared rows of d_lse, each that of its sink
};

SeenGradients of_seeing_rows(const mx::array& d_out,
                             const std::optional<mx::array>& d_lse,
                             const mx::array& out,
                             const mx::array& lse,
                             const std::optional<mx::array>& sinks,
                             mx::Stream s);

}  // namespace mlx_anvil
