// Launches of the Metal kernels of moe_permute and moe_combine, called by the primitives. Outputs
// have memory.
#pragma once

#include "common/primitive.h"
#include "moe/primitive.h"

namespace mlx_anvil {

// `outputs`: offsets, order, inverse, sorted, rows.
void moe_permute_gpu(const MoeSizes& sizes,
                     int64_t experts,
                     const mx::array& ids,
                     const mx::array& x,
                     Arrays& outputs,
                     const mx::Stream& stream);

void moe_spread_gpu(const MoeSizes& sizes,
                    const mx::array& x,
                    const mx::array& inverse,
                    mx::array& rows,
                    const mx::Stream& stream);

void moe_combine_gpu(const MoeSizes& sizes,
                     const MoeCombineArrays& arrays,
                     mx::array& out,
                     const mx::Stream& stream);

// `outputs`: d_y[, d_weights][, d_shared, d_gate].
void moe_backward_gpu(const MoeSizes& sizes,
                      const mx::array& d_out,
                      const MoeCombineArrays& arrays,
                      Arrays& outputs,
                      const mx::Stream& stream);

}  // namespace mlx_anvil
