// Base class of flash_attention's primitives.
#pragma once

#include "common/broadcast.h"
#include "common/checks.h"
#include "common/run_on_cpu.h"
#include "common/vmap_axis.h"
#include "flash_attention/gpu.h"
#include "flash_attention/operands.h"
#include "flash_attention/sequences.h"

namespace mlx_anvil {

// Folds vmap's axis into the batch: [n, batch, ...] -> [n * batch, ...].
class BatchFold {
 public:
  BatchFold(const Arrays& inputs, const std::vector<int>& axes, mx::Stream stream)
      : count_(vmap_length(inputs, axes)),
        batch_(inputs[0].shape(axes[0] == 0 ? 1 : 0)),
        stream_(stream) {}

  // Repeats an input without vmap's axis, unless it may keep length 1 (`stretches`).
  mx::array fold(const mx::array& x, int axis, bool stretches) const {
    if (axis < 0 && stretches && x.shape(0) == 1) {
      return x;
    }
    const mx::array front = with_vmap_axis(x, axis, 0, stream_);
    mx::Shape shape = front.shape();
    shape[0] = count_;
    shape[1] = batch_;
    return mx::flatten(stretch(front, shape, stream_), 0, 1, stream_);
  }

  // A table of sequences.
  mx::array fold_table(const mx::array& sequences, int axis) const {
    const mx::array front = with_vmap_axis(sequences, axis, 0, stream_);
    mx::Shape shape = front.shape();
    shape[0] = count_;
    return fold_sequences(stretch(front, shape, stream_), batch_, stream_);
  }

  mx::array unfold(const mx::array& x) const {
    return mx::unflatten(x, 0, {count_, batch_}, stream_);
  }

 private:
  int count_;
  int batch_;
  mx::Stream stream_;
};

// The first inputs are q, k, v, mask, sinks, sequences and pages, without those that the call
// lacks.
class AttentionPrimitive : public FusedPrimitive {
 public:
  AttentionPrimitive(mx::Stream stream, const AttentionConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return "flash_attention"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const AttentionPrimitive&>(other).config_;
  }

 protected:
  bool has_mask() const { return config_.mask != AttentionMask::kNone; }
  size_t mask_at() const { return 3; }
  size_t sinks_at() const { return 3 + has_mask(); }
  size_t sequences_at() const { return sinks_at() + config_.has_sinks; }
  size_t pages_at() const { return sequences_at() + config_.is_ragged; }
  size_t operand_count() const { return pages_at() + config_.is_paged; }

  // The kernels read dense tables.
  bool wants_dense(size_t input) const override {
    return sequences_at() <= input && input < operand_count();
  }

  AttentionInputs operands(const Arrays& inputs) const {
    AttentionInputs in{inputs[0],    inputs[1],    inputs[2],   std::nullopt,
                       std::nullopt, std::nullopt, std::nullopt};
    if (has_mask()) {
      in.mask = inputs[mask_at()];
    }
    if (config_.has_sinks) {
      in.sinks = inputs[sinks_at()];
    }
    if (config_.is_ragged) {
      in.sequences = inputs[sequences_at()];
    }
    if (config_.is_paged) {
      in.pages = inputs[pages_at()];
    }
    return in;
  }

  Arrays fold(const BatchFold& batch, const Arrays& inputs, const std::vector<int>& axes) const {
    Arrays folded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool stretches = i >= 3 && i < operand_count();
      const bool is_table = config_.is_ragged && i == sequences_at();
      folded.push_back(is_table ? batch.fold_table(inputs[i], axes[i])
                                : batch.fold(inputs[i], axes[i], stretches));
    }
    return folded;
  }

  template <class Args>
  void dispatch_cpu(const char* variant,
                    const Arrays& inputs,
                    Arrays& outputs,
                    const Args& args,
                    void (*kernel)(const Args&)) {
    run_on_cpu(
        *this, inputs, outputs, [args, kernel] { kernel(args); },
        [&] {
          return std::string(op()) + "_" + variant + "_" + to_text(inputs[0].dtype()) + "_d" +
                 std::to_string(inputs[0].shape(3));
        });
  }

  const AttentionConfig config_;
};

}  // namespace mlx_anvil
