// Launches of selective_scan's Metal kernels.
#pragma once

#include "selective_scan/operands.h"

namespace mlx_anvil {

inline constexpr int kMostGpuStates = 16;

// The outputs of the backward. Null: the call lacks that operand.
struct ScanGradients {
  mx::array *x, *dt, *a, *b, *c, *d, *z, *state;

  ScanGradients(const ScanConfig& config, Arrays& outputs)
      : x(&outputs[0]),
        dt(&outputs[1]),
        a(&outputs[2]),
        b(&outputs[3]),
        c(&outputs[4]),
        d(config.has_d ? &outputs[ScanConfig::kD] : nullptr),
        z(config.has_z ? &outputs[config.z_at()] : nullptr),
        state(config.has_state ? &outputs[config.state_at()] : nullptr) {}
};

void scan_forward_gpu(const ScanConfig& config,
                      const Arrays& inputs,
                      mx::array& y,
                      mx::array& last_state,
                      const mx::Stream& stream);

// The inputs are the operands, then the cotangents of y and of the last state.
void scan_backward_gpu(const ScanConfig& config,
                       const Arrays& inputs,
                       const ScanGradients& gradients,
                       const mx::Stream& stream);

}  // namespace mlx_anvil
