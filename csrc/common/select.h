// Some of a primitive's arrays, by their places: what derivatives are taken in.
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

inline std::vector<mx::array> select(const std::vector<mx::array>& arrays,
                                     const std::vector<int>& places) {
  std::vector<mx::array> selected;
  selected.reserve(places.size());
  for (int place : places) {
    selected.push_back(arrays[place]);
  }
  return selected;
}

// `arrays` with those at `places` replaced by `values`.
inline std::vector<mx::array> substitute(std::vector<mx::array> arrays,
                                         const std::vector<int>& places,
                                         const std::vector<mx::array>& values) {
  for (size_t i = 0; i < places.size(); ++i) {
    arrays[places[i]] = values[i];
  }
  return arrays;
}

}  // namespace mlx_anvil
