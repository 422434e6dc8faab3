// The graph nodes of gated_delta_gates.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/run_on_cpu.h"
#include "gated_delta/gates.h"
#include "gated_delta/simd/gates_kernels.h"

namespace mlx_anvil {

// `inputs`: a, b, A_log and dt_bias, then others.
struct GatesSizes {
  explicit GatesSizes(const Arrays& inputs)
      : heads(inputs[1].shape(-1)),
        channels(inputs[0].ndim() > inputs[1].ndim() ? inputs[0].shape(-1) : 1),
        rows(static_cast<int64_t>(inputs[1].size()) / std::max<int64_t>(1, heads)) {}

  int64_t heads, channels, rows;
};

// The definition in MLX ops: g and beta.
Arrays compose_gates(const GatesConfig& config, const Arrays& inputs, mx::Stream stream);

// The first inputs are a, b, A_log and dt_bias.
class GatesPrimitive : public FusedPrimitive {
 public:
  GatesPrimitive(mx::Stream stream, const GatesConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kGatedDeltaGates; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const GatesPrimitive&>(other).config_;
  }

 protected:
  // The same node on other inputs.
  virtual Arrays again(Arrays inputs) = 0;

  bool wants_dense(size_t) const override { return true; }
  bool copies_primal(size_t) const override { return false; }

  // Batch elements that share their weights are rows of one call.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override;

  void fill_arguments(DeltaGatesArgs& args, const Arrays& inputs) const;

  template <class Work>
  void dispatch_cpu(const char* variant, const Arrays& inputs, Arrays& outputs, Work work) {
    run_on_cpu(*this, inputs, outputs, std::move(work),
               [&] { return std::string(op()) + "_" + variant + to_text(inputs[0].dtype()); });
  }

  const GatesConfig config_;

 private:
  static bool is_weight(size_t i) { return i == 2 || i == 3; }
};

// `inputs`: those of the call, then the gradients of g and beta. Returns the gradients of a and b,
// and with `sums` those of A_log and dt_bias.
Arrays apply_gates_backward(const GatesConfig& config, bool sums, Arrays inputs, mx::Stream stream);

}  // namespace mlx_anvil
