// Parameters of the quantized_embedding kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct QuantizedEmbeddingParams {
  int64_t ids;             // number of ids
  int32_t rows;            // rows of w
  int32_t columns;         // codes per row of w
  int32_t group_shift;     // log2 of the group size
  int32_t words_per_id;    // 32-bit words per id: 1 or 2
  int32_t ids_are_signed;  // negative ids count from the last row
  int32_t unused;
};

static_assert(sizeof(QuantizedEmbeddingParams) == 8 + 4 * 6, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
