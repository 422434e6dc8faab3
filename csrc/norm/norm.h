// The op functions rms_norm and layer_norm. Formulas: the docstrings in python.cpp.
#pragma once

#include <optional>
#include <utility>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Options of both norms, apart from x and the weight.
struct NormOptions {
  float eps = 1e-5f;
  float weight_offset = 0;
  std::optional<mx::array> bias = {};
  std::optional<mx::array> residual = {};
  std::optional<mx::array> gate = {};
  bool gate_is_sigmoid = false;  // else silu
};

// y, and x + residual if there is a residual.
using NormResult = std::pair<mx::array, std::optional<mx::array>>;

NormResult rms_norm(const mx::array& x,
                    std::optional<mx::array> weight,
                    NormOptions options,
                    mx::StreamOrDevice stream = {});

NormResult layer_norm(const mx::array& x,
                      std::optional<mx::array> weight,
                      NormOptions options,
                      mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil
