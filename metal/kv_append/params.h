// Parameters of the kv_append kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#include "metal/rope/params.h"

#ifndef __METAL__
namespace mlx_anvil {
#endif

struct KvAppendParams {
  RopeParams rotation;    // pairs, turns and direction; pairs is 0 without a rotation
  int64_t strides[2][4];  // of keys and values, in elements: batch, head, token, column
  int32_t batch;
  int32_t heads;
  int32_t length;
  int32_t columns[2];  // of keys and values
  int32_t packs;       // threads per row: of 8 columns each
  int32_t page_size;   // rows per head of a page
  int32_t pages;       // per batch row
  int32_t group;
  int32_t bits[2];
  int32_t row_step;       // from a batch row to the next
  int32_t row_counts;     // 1 if rows count from the only one of a batch row
  int32_t position_step;  // likewise
  int32_t position_counts;
  int32_t distinct;  // 1 if no two tokens of a batch row have one row
};

static_assert(sizeof(KvAppendParams) == sizeof(RopeParams) + 8 * 8 + 4 * 16,
              "same layout in C++ and MSL");

struct KvCopyParams {
  int64_t bytes;
};

static_assert(sizeof(KvCopyParams) == 8, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
