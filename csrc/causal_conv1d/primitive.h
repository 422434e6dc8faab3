// The base class of causal_conv1d's primitives, and the nodes that they make.
#pragma once

#include <string>
#include <utility>

#include "causal_conv1d/causal_conv1d.h"
#include "causal_conv1d/compose.h"
#include "causal_conv1d/problem.h"
#include "common/checks.h"
#include "common/launch_arrays.h"
#include "common/run_on_cpu.h"

namespace mlx_anvil {

// The first inputs are x, weight, bias, state and lengths, without those that the call lacks.
class ConvPrimitive : public FusedPrimitive {
 public:
  ConvPrimitive(mx::Stream stream, const ConvConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kCausalConv1d; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const ConvPrimitive&>(other).config_;
  }

 protected:
  size_t state_at() const { return 2 + config_.has_bias; }
  size_t lengths_at() const { return state_at() + config_.has_state; }
  size_t operand_count() const { return lengths_at() + config_.has_lengths; }

  // Arrays with batch and time are read in place if their channels are adjacent.
  bool wants_dense(size_t) const override { return true; }
  bool takes(size_t i, const mx::array& x) const override {
    return is_of_rows(i) && x.ndim() == 3 && (x.strides(-1) == 1 || x.shape(-1) == 1);
  }
  bool copies_primal(size_t) const override { return false; }

  ConvView view(const Arrays& inputs) const;
  ConvProblem problem_of(const Arrays& inputs) const;
  static ConvRows rows_of(const mx::array& x) {
    return {x.data<void>(), x.strides(0), x.strides(1)};
  }

  template <class Work>
  void dispatch_cpu(const char* variant, const Arrays& inputs, Arrays& outputs, Work work) {
    run_on_cpu(*this, inputs, outputs, std::move(work),
               [&] { return std::string(op()) + "_" + variant + "_" + dtype_name(inputs[0]); });
  }

  // Folds vmap's axis into the batch. Weight and bias get a group per element, unless all share
  // one and `may_share` permits it.
  Arrays fold(const Arrays& inputs, const std::vector<int>& axes, bool may_share);

  const ConvConfig config_;

 private:
  bool is_vector(size_t i) const { return i >= 1 && i < state_at(); }
  bool is_of_rows(size_t i) const {
    return !is_vector(i) && !(config_.has_lengths && i == lengths_at());
  }
};

// The gradients that were asked for, in the order of the backward primitive's outputs.
Arrays apply_conv_backward(const ConvConfig& config, bool sums, Arrays inputs, mx::Stream stream);

// `inputs` in the order of ConvPrimitive, of one dtype, with int32 lengths. Returns y and the new
// state.
Arrays apply_conv(const ConvConfig& config, Arrays inputs, mx::Stream stream);

}  // namespace mlx_anvil
