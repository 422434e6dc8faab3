// The operands of a call as a list of arrays: x, dt, A, B and C, then D, z, state and lengths,
// without those that the call lacks.
#pragma once

#include <cstddef>

#include "common/primitive.h"
#include "selective_scan/selective_scan.h"

namespace mlx_anvil {

struct ScanConfig {
  bool softplus = false;
  bool has_d = false, has_z = false, has_state = false, has_lengths = false;

  bool operator==(const ScanConfig&) const = default;

  static constexpr size_t kD = 5;
  size_t z_at() const { return kD + has_d; }
  size_t state_at() const { return z_at() + has_z; }
  size_t lengths_at() const { return state_at() + has_state; }
  size_t count() const { return lengths_at() + has_lengths; }
  size_t differentiable() const { return lengths_at(); }

  // True for x, dt, B, C and z, which have rows of any strides.
  bool is_rows(size_t i) const { return (i < kD && i != 2) || (has_z && i == z_at()); }
};

// A view of a call's operands. Null: the call lacks it.
struct ScanView {
  const mx::array *x, *dt, *a, *b, *c, *d, *z, *state, *lengths;

  ScanView(const ScanConfig& config, const Arrays& inputs)
      : x(&inputs[0]),
        dt(&inputs[1]),
        a(&inputs[2]),
        b(&inputs[3]),
        c(&inputs[4]),
        d(config.has_d ? &inputs[ScanConfig::kD] : nullptr),
        z(config.has_z ? &inputs[config.z_at()] : nullptr),
        state(config.has_state ? &inputs[config.state_at()] : nullptr),
        lengths(config.has_lengths ? &inputs[config.lengths_at()] : nullptr) {}

  mx::Shape state_shape() const { return {x->shape(0), x->shape(2), a->shape(1)}; }
};

}  // namespace mlx_anvil
