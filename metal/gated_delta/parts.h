// Parts of the gradients of a step and a value head, which sum.metal adds up: sums for d_q, d_k
// and, per channel, d_g; then those for d_g per head, d_beta and d_skip.
#pragma once

#include "metal/gated_delta/state.h"

METAL_FUNC int part_vectors() {
  return g_is_per_channel ? 3 : 2;
}
METAL_FUNC int part_numbers() {
  return has_skip ? 3 : 2;
}
// A multiple of four.
METAL_FUNC long delta_part_size(int vectors, int key_dim) {
  return long(vectors) * key_dim + kDeltaPartNumbers;
}
METAL_FUNC long part_of(constant GatedDeltaParams& params, int batch, int step, int head) {
  return ((long(batch) * params.chunk + step) * params.value_heads + head) * params.blocks;
}
