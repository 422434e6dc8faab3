// The op function quantized_experts: router output to block output of a mixture of experts.
#pragma once

#include <optional>

#include "gather_matmul/primitive.h"
#include "quantized_matmul/checks.h"

namespace mlx_anvil {

inline constexpr const char* kQuantizedExperts = "quantized_experts";

struct ExpertArrays {
  mx::array x, ids;
  std::optional<mx::array> weights;
  ExpertMatrix gate, up, down;
  // Added to the sum over a token's experts, as by moe_combine().
  std::optional<mx::array> residual = std::nullopt, shared = std::nullopt,
                           shared_gate = std::nullopt;
};

struct ExpertOptions {
  GateOptions activation;
  QuantizedOptions gate_and_up, down;
};

mx::array quantized_experts(ExpertArrays arrays,
                            const ExpertOptions& options,
                            mx::StreamOrDevice stream);

}  // namespace mlx_anvil
