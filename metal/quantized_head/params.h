// Parameters of the kernels of quantized_argmax and quantized_topk, shared by the host (C++) and
// the kernels (MSL). All numbers of slots are powers of two.
#pragma once

#include "metal/quantized_matmul/params.h"

#ifndef __METAL__
namespace mlx_anvil {
#endif

// What a threadgroup does to the candidates of a block.
struct BestParams {
  int32_t slots;       // candidates of a row of x that it looks at
  int32_t run;         // candidates that it keeps, of which
  int32_t kept;        // are asked for
  int32_t candidates;  // of a row of x, among which the blocks are (merge)
};

struct QuantizedHeadParams {
  QuantizedParams product;
  BestParams best;
};

static_assert(sizeof(BestParams) == 4 * 4, "same layout in C++ and MSL");
static_assert(sizeof(QuantizedHeadParams) == 4 * 10, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
