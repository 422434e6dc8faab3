// Parameters of the kernels of quantized_embedding, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct QuantizedEmbeddingParams {
  int64_t ids;             // how many
  int32_t rows;            // of w
  int32_t columns;         // codes in a row of w
  int32_t group_shift;     // log2 of the codes that share a scale
  int32_t words_per_id;    // 32-bit words: 1 or 2
  int32_t ids_are_signed;  // then negative ones count from the last row
  int32_t unused;
};

static_assert(sizeof(QuantizedEmbeddingParams) == 8 + 4 * 6, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
