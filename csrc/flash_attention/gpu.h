// Attention on GPUs and in the simulator: kernel selection and launches. Called by the primitives.
#pragma once

#include "common/primitive.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// The arrays of a call, with mask and sinks broadcast and outputs allocated. Absent ones are null.
struct AttentionForwardArrays {
  const AttentionInputs& in;
  mx::array* out;
  mx::array* lse = nullptr;
};

struct AttentionBackwardArrays {
  const AttentionInputs& in;
  const mx::array* out;
  const mx::array* lse;
  const mx::array* d_out;
  const mx::array* d_lse = nullptr;
  mx::array* d_q = nullptr;
  mx::array* d_k = nullptr;
  mx::array* d_v = nullptr;
  mx::array* d_mask = nullptr;   // float32, dense
  mx::array* d_sinks = nullptr;  // float32 [batch, q_heads], dense
};

// True if the kernels for few queries serve the call.
bool is_decode(const AttentionConfig& config, const AttentionSizes& sizes);

void attention_forward_gpu(const AttentionConfig& config,
                           const AttentionSizes& sizes,
                           const AttentionForwardArrays& arrays,
                           const mx::Stream& stream);

void attention_backward_gpu(const AttentionConfig& config,
                            const AttentionSizes& sizes,
                            const AttentionBackwardArrays& arrays,
                            const mx::Stream& stream);

}  // namespace mlx_anvil
