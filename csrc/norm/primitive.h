// Base class of the norms' primitives.
#pragma once

#include <algorithm>
#include <string>

#include "common/checks.h"
#include "common/launch_arrays.h"
#include "common/run_on_cpu.h"
#include "norm/compose.h"
#include "norm/cpu.h"
#include "norm/operands.h"

namespace mlx_anvil {

// The first inputs are x (or h), residual, gate, weight and bias, without those that the call
// lacks.
class NormPrimitive : public FusedPrimitive {
 public:
  NormPrimitive(mx::Stream stream, const NormConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return config_.op(); }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const NormPrimitive&>(other).config_;
  }

 protected:
  size_t gate_at() const { return 1 + config_.has_residual; }
  size_t weight_at() const { return gate_at() + config_.has_gate; }
  size_t bias_at() const { return weight_at() + config_.has_weight; }
  size_t operand_count() const { return bias_at() + config_.has_bias; }

  NormView view(const Arrays& inputs) const {
    size_t next = 1;
    const auto take = [&](bool exists) { return exists ? &inputs[next++] : nullptr; };
    NormView in{&inputs[0]};
    in.residual = take(config_.has_residual);
    in.gate = take(config_.has_gate);
    in.weight = take(config_.has_weight);
    in.bias = take(config_.has_bias);
    return in;
  }

  NormInputs operands(const Arrays& inputs) const {
    const auto copy = [](const mx::array* x) { return x ? std::optional(*x) : std::nullopt; };
    const NormView in = view(inputs);
    return {*in.x, copy(in.residual), copy(in.gate), copy(in.weight), copy(in.bias)};
  }

  // Returns true if input `i` has one row per row of x, rather than one per group.
  bool is_of_rows(size_t i) const { return i < weight_at() || i >= operand_count(); }

  // The output may still include weight gradients, which are zero without rows.
  static bool are_empty(const Arrays& outputs) {
    return std::all_of(outputs.begin(), outputs.end(),
                       [](const mx::array& x) { return x.size() == 0; });
  }

  static NormOperand operand_of(const mx::array* x) {
    return x ? NormOperand{x->data<void>(), norm_rows_of(*x)} : NormOperand{};
  }

  NormProblem problem_of(const NormView& in) const {
    const mx::array* const vector = in.vector();
    NormProblem problem;
    problem.dtype = kernel_dtype_of(*in.x);
    problem.centred = config_.centred;
    problem.rows = static_cast<int64_t>(in.x->size()) / in.x->shape(-1);
    problem.groups = vector && vector->ndim() == 2 ? std::max(1, vector->shape(0)) : 1;
    problem.vectors.weight = operand_of(in.weight);
    problem.vectors.bias = operand_of(in.bias);
    problem.vectors.are_float32 = vector && vector->dtype() == mx::float32;
    problem.vectors.weight_offset = config_.weight_offset;
    return problem;
  }

  template <class Work>
  void dispatch_cpu(const char* variant, const Arrays& inputs, Arrays& outputs, Work work) {
    run_on_cpu(*this, inputs, outputs, std::move(work),
               [&] { return std::string(op()) + "_" + variant + "_" + dtype_name(inputs[0]); });
  }

  // Moves vmap's axis of the inputs in front of the rows. Weight and bias get one row per group and
  // batch element, unless they are shared by all rows and `may_share` permits it.
  Arrays fold(const Arrays& inputs, const std::vector<int>& axes, bool may_share);

  const NormConfig config_;
};

}  // namespace mlx_anvil
