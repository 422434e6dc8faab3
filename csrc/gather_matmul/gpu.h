// Gathered products on a GPU, and in the simulator: kernel selection and launches.
#pragma once

#include <string>

#include "gather_matmul/primitive.h"

namespace mlx_anvil {

// Returns true if our kernels take such a call on `stream`. Otherwise sets *why_not, and a graph of
// MLX ops takes the call.
bool can_launch_gather(const GatherSizes& sizes, const mx::Stream& stream, std::string* why_not);

// The same for dense matrices.
bool can_launch_gather_dense(const GatherSizes& sizes,
                             const mx::Stream& stream,
                             std::string* why_not);

// All arrays are row-contiguous. `out` has no memory yet, and neither it nor the
// summed dimension is empty.
void gather_quantized_matmul_gpu(const QuantizedFormat& format,
                                 const GatherSizes& sizes,
                                 QuantizedProduct product,
                                 const mx::array& x,
                                 const QuantizedWeightArrays& weights,
                                 const PairIds& ids,
                                 mx::array& out,
                                 const mx::Stream& stream);

// The biases of the experts may be null.
void gather_quantized_swiglu_gpu(const QuantizedFormat& format,
                                 const GatherSizes& sizes,
                                 const mx::array& x,
                                 const QuantizedWeightArrays& gate,
                                 const QuantizedWeightArrays& up,
                                 const mx::array* gate_bias,
                                 const mx::array* up_bias,
                                 const GateOptions& activation,
                                 const PairIds& ids,
                                 mx::array& out,
                                 const mx::Stream& stream);

// Dense w: [experts, N, K] (kTransposed), or [experts, N, K] with N summed over (kPlain).
void gather_matmul_gpu(const GatherSizes& sizes,
                       QuantizedProduct product,
                       const mx::array& x,
                       const mx::array& w,
                       const PairIds& ids,
                       mx::array& out,
                       const mx::Stream& stream);

// Sums the rows of x [pairs, ...] with the same id (sum_pairs.h). `order` has the pairs sorted by
// id, and `sorted` their ids, all in range. `out` has no memory yet, and nothing is empty.
void sum_pairs_gpu(const mx::array& x,
                   const mx::array& order,
                   const mx::array& sorted,
                   mx::array& out,
                   const mx::Stream& stream);

}  // namespace mlx_anvil
