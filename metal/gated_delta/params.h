// Parameters of gated_delta's kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// Strides are in elements: batch, step, head.
struct GatedDeltaParams {
  int64_t q_strides[3];
  int64_t k_strides[3];
  int64_t v_strides[3];
  int64_t g_strides[3];
  int64_t beta_strides[3];
  int64_t skip_strides[3];
  int64_t gate_strides[3];
  int64_t d_y_strides[3];
  int32_t batch;
  int32_t length;
  int32_t key_heads;
  int32_t value_heads;
  int32_t group;  // value heads that share a key head
  int32_t key_dim;
  int32_t value_dim;
  int32_t positions;       // states that are returned besides the last
  int32_t positions_step;  // to those of the next batch row
  int32_t first;           // step of a chunk
  int32_t steps;           // of a chunk, or of all
  int32_t chunk;           // steps of every chunk but the last
  int32_t blocks;          // of rows, each with a part of the sums over rows
  int32_t first_chunk;     // of 64 steps, of those that a launch prepares or walks along
  int32_t end_chunk;       // after the last of them
  int32_t part_heads;      // value heads whose gradients of q and k are one part, by chunks
  int32_t token_parts;     // of these parts
  int32_t is_last;         // 1 for the last chunk
  float eps;
  float q_scale;
};

static_assert(sizeof(GatedDeltaParams) == 8 * 24 + 4 * 20, "same layout in C++ and MSL");

// A threadgroup of gated_delta_gates' backward: its columns, and SIMD groups with rows of their
// own.
enum { kGateColumns = 32, kGateSimdgroups = 8 };

struct GatedDeltaGatesParams {
  int64_t rows;
  int64_t rows_per_part;  // of the backward
  int32_t heads;
  int32_t channels;  // of a head
  float lower_bound;
  float rate_scale;
};

static_assert(sizeof(GatedDeltaGatesParams) == 2 * 8 + 4 * 4, "same layout in C++ and MSL");

struct GatedDeltaGatesSumParams {
  uint32_t parts;
  uint32_t columns;
};

static_assert(sizeof(GatedDeltaGatesSumParams) == 2 * 4, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
