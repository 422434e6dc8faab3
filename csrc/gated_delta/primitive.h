// The graph nodes of gated_delta and ssd_scan.
#pragma once

#include <string>

#include "common/primitive.h"
#include "gated_delta/compose.h"
#include "gated_delta/problem.h"

namespace mlx_anvil {

DeltaSizes sizes_of(const GatedDeltaInputs& in);

// The arguments of a call, for kernels.
void fill_arguments(DeltaArgs& args, const GatedDeltaConfig& config, const GatedDeltaInputs& in);
DeltaView delta_view_of(const mx::array& x);

// The first inputs are the arrays of GatedDeltaInputs, without those that the call lacks.
class GatedDeltaPrimitive : public FusedPrimitive {
 public:
  GatedDeltaPrimitive(mx::Stream stream, const GatedDeltaConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return config_.op; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const GatedDeltaPrimitive&>(other).config_;
  }

 protected:
  GatedDeltaInputs operands(const Arrays& inputs) const;

  // Rows are dense in kernels, and states altogether.
  bool wants_dense(size_t) const override { return true; }
  bool takes(size_t i, const mx::array& x) const override;
  bool copies_primal(size_t i) const override {
    return i >= GatedDeltaConfig::kState && !config_.is_gate(i);
  }

  // All inputs with vmap's axis as part of the batch.
  Arrays fold(const Arrays& inputs, const std::vector<int>& axes);
  std::pair<Arrays, std::vector<int>> unfold(Arrays outputs, int length);

  const GatedDeltaConfig config_;
};

// Returns y, the last state, and the states of `in.positions`.
Arrays apply_gated_delta(const GatedDeltaConfig& config, GatedDeltaInputs in, mx::Stream stream);

// `inputs`: those of the call, then the gradients of its results. Returns the gradients of q, k, v
// and the gate in their dtype, and those of g, beta, the state and the skip in float32.
Arrays apply_gated_delta_backward(const GatedDeltaConfig& config,
                                  const Arrays& inputs,
                                  mx::Stream stream);

}  // namespace mlx_anvil
