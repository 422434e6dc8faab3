// moe_permute and moe_combine as graph nodes. Called by the op functions, and by ops that are built
// from them.
//
// Arrays may have leading axes that vmap added, `batch_axes` of them: each of their elements is one
// call, with places and pairs of its own.
#pragma once

#include <optional>
#include <string>

#include "common/primitive.h"
#include "moe/moe.h"
#include "moe/problem.h"

namespace mlx_anvil {

// The most experts that kernels take.
inline constexpr int64_t kMostMoeExperts = 4096;

// Returns true if kernels take a call of these sizes on `stream`. Otherwise sets *why_not.
bool has_moe_kernels(const MoeSizes& sizes, const mx::Stream& stream, std::string* why_not);

// Adds the sort to the graph, or its composition if no kernel serves. ids: int32 or uint32, [batch,
// tokens.., k]. x [batch, tokens.., columns]. Returns offsets, order, inverse, sorted, rows.
Arrays apply_moe_permute(
    mx::array x, mx::array ids, int64_t experts, int batch_axes, mx::Stream stream);

// out[inverse[t, j]] = x[t]: x [batch, tokens.., columns], inverse [batch, tokens.., k], result
// [batch, pairs, columns].
mx::array apply_moe_spread(mx::array x, mx::array inverse, int batch_axes, mx::Stream stream);

// The terms of moe_combine. All but the integers are of one dtype; weights and shared_gate may be
// float32 instead. y [batch, pairs, columns], inverse and weights [batch, tokens.., k], the others
// [batch, tokens.., columns or 1].
struct MoeCombineArrays {
  mx::array y;
  mx::array inverse;
  std::optional<mx::array> weights = std::nullopt;
  std::optional<mx::array> residual = std::nullopt;
  std::optional<mx::array> shared = std::nullopt;
  std::optional<mx::array> shared_gate = std::nullopt;  // needs `shared`
};

// Which of them a primitive has.
struct MoeTerms {
  bool weights = false;
  bool residual = false;
  bool shared = false;
  bool gate = false;

  bool operator==(const MoeTerms&) const = default;
};

mx::array apply_moe_combine(MoeCombineArrays arrays, int batch_axes, mx::Stream stream);

}  // namespace mlx_anvil
