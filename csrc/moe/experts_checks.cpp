#include "moe/experts_checks.h"

#include <algorithm>
#include <string>

#include "common/checks.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {

void check_ids(const char* op, const mx::array& ids, const mx::array& x, int experts) {
  const bool fits = x.ndim() > 0 && ids.ndim() == x.ndim() &&
                    std::equal(x.shape().begin(), x.shape().end() - 1, ids.shape().begin());
  if (!fits) {
    throw_value_error(op, shape_text("ids", ids) + " and " + shape_text("x", x) +
                              "; allowed: ids [..., k] with the leading axes of x.");
  }
  if (ids.shape(-1) > experts) {
    throw_value_error(op, shape_text("ids", ids) + ", k = " + std::to_string(ids.shape(-1)) +
                              ", and gate w has " + std::to_string(experts) +
                              " experts; allowed: k at most that.");
  }
}

void check_bias(const char* op, const char* name, const ExpertMatrix& projection) {
  if (!projection.bias) {
    return;
  }
  require_kernel_dtypes(op, {{name, *projection.bias}});
  const mx::array& w = projection.matrix.w;
  const mx::Shape wanted = {w.shape(0), w.shape(1)};
  if (projection.bias->shape() != wanted) {
    throw_value_error(op,
                      shape_text(name, *projection.bias) + "; allowed: " + to_text(wanted) + ".");
  }
}

// The arrays that are added to the sum over experts.
void check_terms(const char* op, const ExpertArrays& arrays) {
  mx::Shape wanted = arrays.x.shape();
  const auto check = [&](const char* name, const std::optional<mx::array>& x, int last) {
    if (!x) {
      return;
    }
    if (!arrays.weights) {
      throw_value_error(op, std::string(name) + " is given without weights; allowed: both.");
    }
    require_kernel_dtypes(op, {{name, *x}});
    wanted.back() = last;
    if (x->shape() != wanted) {
      throw_value_error(op, shape_text(name, *x) + "; allowed: " + to_text(wanted) + ".");
    }
  };
  const int outputs = arrays.down.matrix.w.shape(1);
  check("residual", arrays.residual, outputs);
  check("shared", arrays.shared, outputs);
  check("shared_gate", arrays.shared_gate, 1);
  if (arrays.shared_gate && !arrays.shared) {
    throw_value_error(op, "shared_gate is given without shared; allowed: both, or shared alone.");
  }
}

}  // namespace

void check_experts(const char* op,
                   const ExpertArrays& arrays,
                   const QuantizedFormat& gate_and_up,
                   const QuantizedFormat& down) {
  const auto& [x, ids, weights, gate_side, up_side, down_side, residual, shared, shared_gate] =
      arrays;
  const QuantizedMatrix& gate = gate_side.matrix;
  require_kernel_dtypes(op, {{"x", x}});
  check_matrix(op, "gate ", gate_and_up, gate, columns_of(x));
  check_matrix(op, "up ", gate_and_up, up_side.matrix, columns_of(x));
  if (gate.w.ndim() != 3 || gate.w.shape() != up_side.matrix.w.shape()) {
    throw_value_error(op, shape_text("gate w", gate.w) + " and " +
                              shape_text("up w", up_side.matrix.w) +
                              "; allowed: equal shapes of rank 3, [E, H, packed D].");
  }
  check_x(op, x, "gate w", gate, columns_of(gate_and_up, gate));
  const mx::array& down_w = down_side.matrix.w;
  check_matrix(op, "down ", down, down_side.matrix, gate.w.shape(1));
  if (down_w.ndim() != 3 || down_w.shape(0) != gate.w.shape(0) ||
      columns_of(down, down_side.matrix) != gate.w.shape(1)) {
    throw_value_error(
        op, shape_text("down w", down_w) + " and " + shape_text("gate w", gate.w) +
                "; allowed: down w [E, N, packed H] with E = " + std::to_string(gate.w.shape(0)) +
                " and H = " + std::to_string(gate.w.shape(1)) + ".");
  }
  check_bias(op, "gate_bias", gate_side);
  check_bias(op, "up_bias", up_side);
  check_bias(op, "down_bias", down_side);
  check_ids(op, ids, x, gate.w.shape(0));
  if (weights) {
    require_kernel_dtypes(op, {{"weights", *weights}});
    if (weights->shape() != ids.shape()) {
      throw_value_error(op, shape_text("weights", *weights) + " and " + shape_text("ids", ids) +
                                "; allowed: equal shapes.");
    }
  }
  check_terms(op, arrays);
}

mx::Dtype experts_dtype(const ExpertArrays& arrays) {
  return result_dtype(arrays.x, {&arrays.gate.matrix, &arrays.up.matrix, &arrays.down.matrix});
}

}  // namespace mlx_anvil
