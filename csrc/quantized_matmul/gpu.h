// Quantized products on a GPU, and in the simulator: kernel selection and launches.
#pragma once

#include <string>

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Returns true if the kernels support such a call on `stream`. Otherwise sets *why_not, and MLX's
// own op takes the call.
bool can_launch_quantized(const QuantizedSizes& sizes,
                          const mx::Stream& stream,
                          std::string* why_not,
                          bool stores_results = true);

// True if gemm_matrix.metal or gemm_plain.metal suits a product of these sizes. It takes them if
// the arrays are aligned as well.
bool suits_quantized_gemm(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          mx::Dtype dtype,
                          const mx::Device& device);

// Gives `out` its memory. Neither it nor the summed dimension may be empty.
void quantized_matmul_gpu(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const mx::array& x,
                          const QuantizedWeightArrays& weights,
                          mx::array& out,
                          const mx::Stream& stream);

// Returns true if x W^T runs on tiles.metal: with 3 rows or more, on GPUs that multiply matrices by
// simdgroup_matrix (Apple's).
bool suits_quantized_tiles(const QuantizedSizes& sizes, const mx::Stream& stream);

// x W^T by tiles.metal. `out` must be allocated and not empty, and the summed dimension must not be
// empty.
void quantized_tiles_gpu(const QuantizedFormat& format,
                         const QuantizedSizes& sizes,
                         const mx::array& x,
                         const QuantizedWeightArrays& weights,
                         mx::array& out,
                         const mx::Stream& stream);

// True if a product of up to kQuantizedGemvRows rows takes matrix units.
bool gemv_takes_matrix_units(const QuantizedFormat& format,
                             const QuantizedSizes& sizes,
                             const mx::array& x,
                             const QuantizedWeightArrays& weights,
                             const mx::Stream& stream);

// x W^T. `out` must be allocated and not empty, and the summed dimension must not be empty.
void quantized_gemv_gpu(const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const mx::array& x,
                        const QuantizedWeightArrays& weights,
                        mx::array& out,
                        const mx::Stream& stream);

// `out` must be allocated and not empty, and the summed dimension must not be empty.
void quantized_swiglu_gpu(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          const mx::array& x,
                          const QuantizedWeightArrays& gate,
                          const QuantizedWeightArrays& up,
                          const GateOptions& activation,
                          mx::array& out,
                          const mx::Stream& stream);

}  // namespace mlx_anvil
