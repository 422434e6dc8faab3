// The op functions moe_permute and moe_combine. Formulas: the docstrings in python.cpp.
#pragma once

#include <cstdint>
#include <optional>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

inline constexpr const char* kMoePermute = "moe_permute";
inline constexpr const char* kMoeCombine = "moe_combine";

// Tokens sorted by expert. A pair is a token with one of its k experts, numbered as in `ids`, read
// row by row. Integers are int32.
struct MoePermuted {
  mx::array rows;     // [pairs, columns]; the row of x of each place
  mx::array offsets;  // [experts + 1]; the places of expert e are offsets[e] to offsets[e + 1]
  mx::array order;    // [pairs]; the pair of each place
  mx::array inverse;  // like `ids`; the place of each pair
  mx::array sorted;   // [pairs]; the expert of each place
};

// x [..., columns], ids [..., k].
MoePermuted moe_permute(const mx::array& x,
                        const mx::array& ids,
                        int64_t experts,
                        mx::StreamOrDevice stream = {});

struct MoeCombineTerms {
  std::optional<mx::array> weights;      // [..., k]
  std::optional<mx::array> residual;     // [..., columns]
  std::optional<mx::array> shared;       // [..., columns]
  std::optional<mx::array> shared_gate;  // [..., 1]; needs `shared`
};

// y [pairs, columns], inverse [..., k], or [pairs] if there are weights. Returns [..., columns].
mx::array moe_combine(const mx::array& y,
                      const mx::array& inverse,
                      const MoeCombineTerms& terms,
                      mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil
