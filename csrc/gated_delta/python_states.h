// The argument return_states of gated_delta and ssd_scan, and what they return.
#pragma once

#include <utility>

#include "common/python_args.h"
#include "gated_delta/gated_delta.h"

namespace mlx_anvil {

inline ReturnStates to_return_states(const char* op, nb::handle positions) {
  constexpr const char* kName = "return_states";
  constexpr const char* kAllowed = "None, a list of ints, or mlx.core.array";
  if (positions.is_none()) {
    return {};
  }
  if (nb::isinstance<mx::array>(positions)) {
    return nb::cast<mx::array>(positions);
  }
  if (!nb::isinstance<nb::list>(positions) && !nb::isinstance<nb::tuple>(positions)) {
    throw_type_error(op, kName, positions, kAllowed);
  }
  std::vector<int64_t> numbers;
  for (nb::handle position : nb::borrow<nb::sequence>(positions)) {
    numbers.push_back(to_int(op, kName, position, kAllowed));
  }
  return numbers;
}

inline nb::tuple to_tuple(const GatedDeltaResult& result) {
  return result.states ? nb::make_tuple(result.y, result.state, *result.states)
                       : nb::make_tuple(result.y, result.state);
}

}  // namespace mlx_anvil
