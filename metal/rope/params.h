// Parameters of the rope kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct RopeParams {
  int64_t strides[2][4];  // input strides in elements: batch, head, position, column
  int32_t heads[2];       // heads of each tensor; 0 if there is no second tensor
  int32_t batch;
  int32_t length;
  int32_t head_dim;
  int32_t pairs;
  int32_t chunk;        // heads per thread, counted over both tensors
  int32_t chunks;       // chunks that cover all heads
  int32_t offset_step;  // 1 if each batch row has its offset, else 0
  float turns_high;     // turns of a position: position * (turns_high + turns_low) / freq
  float turns_low;
  float direction;  // 1, or -1 for the inverse rotation
};

static_assert(sizeof(RopeParams) == 8 * 8 + 4 * 12, "same layout in C++ and MSL");

struct RopeCacheParams {
  RopeParams rope;           // of queries and keys; chunks cover the values' heads too
  int64_t value_strides[4];  // as RopeParams::strides
  int64_t first[3];          // first element of q, k and v
  int32_t capacity;          // rows per head of the caches
  int32_t columns;           // packs of a row: of pairs, then of elements that are not rotated
  int32_t rotating;          // threads per batch row that rotate, or move values
  int32_t copying;           // threads per batch row that copy the caches' other rows
  int32_t copied[2];         // 1 for a cache that is copied
};

static_assert(sizeof(RopeCacheParams) == sizeof(RopeParams) + 8 * 7 + 4 * 6,
              "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
