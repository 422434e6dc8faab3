// Parameters of the quantized_argmax and quantized_topk kernels, shared by the host (C++) and the
// kernels (MSL). Slot and run counts are powers of two.
#pragma once

#include "metal/quantized_matmul/params.h"

#ifndef __METAL__
namespace mlx_anvil {
#endif

// How a threadgroup reduces the candidates of a block.
struct BestParams {
  int32_t slots;       // candidates per row of x that it reduces
  int32_t run;         // candidates that it keeps
  int32_t kept;        // number of these that the caller asked for
  int32_t candidates;  // merge only: candidates per row of x, over all blocks
};

struct QuantizedHeadParams {
  QuantizedParams product;
  BestParams best;
};

static_assert(sizeof(BestParams) == 4 * 4, "same layout in C++ and MSL");
static_assert(sizeof(QuantizedHeadParams) == 4 * 12, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
