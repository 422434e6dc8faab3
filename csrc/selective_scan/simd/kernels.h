// Interface of the CPU kernels (common/isa.h).
#pragma once

#include "common/isa.h"
#include "selective_scan/problem.h"

namespace mlx_anvil {

struct ScanForwardArgs : ScanArgs {
  void* y;            // [batch, steps, channels]
  float* last_state;  // [batch, channels, states]
};

// All outputs are dense. Gradients of B and C are sums over channels: a task of some blocks of
// channels has its own sums, float32 [batch, steps, states].
struct ScanBackwardArgs : ScanArgs {
  ScanRows d_y;
  const float* d_last_state;
  void *d_x, *d_dt;  // [batch, steps, channels]
  void* d_z;         // likewise, or null
  float* d_a;        // [channels, states]
  float* d_d;        // [channels], or null
  float* d_state;    // [batch, channels, states], or null
};

// Sums of a task, zeroed by the caller.
struct ScanSums {
  float *b, *c;
};

struct ScanKernels {
  // Computes a block of channels of one batch.
  void (*forward)(const ScanForwardArgs& args, int64_t batch, int64_t block, void* scratch);

  // Computes blocks [begin, end) of channels of all batches, one after the other.
  void (*backward)(const ScanBackwardArgs& args,
                   int64_t begin,
                   int64_t end,
                   const ScanSums& sums,
                   void* scratch);

  int64_t (*forward_scratch_bytes)(const ScanSizes& sizes);
  int64_t (*backward_scratch_bytes)(const ScanSizes& sizes);
  int64_t block_channels;
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<ScanKernels>, scan_kernels)

}  // namespace mlx_anvil
