// Primitives of gathered products (problem.h). x is [..., M, *] and w [..., N, *] with any leading
// axes, counted as one in row-contiguous order. The result is [*rhs.shape, M, *].
#pragma once

#include <optional>

#include "gather_matmul/problem.h"
#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// The ids of the pairs: int32, or uint32 read as such. Without `lhs`, the leading axes of x
// broadcast to the shape of `rhs`, and only the last of them may be stretched.
struct PairIds {
  mx::array rhs;
  std::optional<mx::array> lhs = std::nullopt;  // of the shape of `rhs`
  bool sorted = false;  // a promise that `rhs` ascends; kernels may use it, but not rely on it
};

// One projection of the experts: a quantized matrix [..., N, *] and a bias [..., N] to add.
struct ExpertMatrix {
  QuantizedMatrix matrix;
  std::optional<mx::array> bias = std::nullopt;
};

// x, scales, biases and the experts' biases share one dtype, except uint8 scales and what
// convert_for_product() leaves as it is. `op` is the name that trace() shows.
mx::array apply_gather_quantized_matmul(const char* op,
                                        const QuantizedFormat& format,
                                        QuantizedProduct product,
                                        mx::array x,
                                        QuantizedMatrix matrix,
                                        PairIds ids,
                                        mx::Stream s);

// x W^T + bias of one projection.
mx::array apply_gather_projection(const char* op,
                                  const QuantizedFormat& format,
                                  mx::array x,
                                  const ExpertMatrix& projection,
                                  const PairIds& ids,
                                  mx::Stream s);

// activation(x Wg^T + gate bias) * (x Wu^T + up bias)
mx::array apply_gather_quantized_swiglu(const char* op,
                                        const QuantizedFormat& format,
                                        mx::array x,
                                        ExpertMatrix gate,
                                        ExpertMatrix up,
                                        const GateOptions& activation,
                                        PairIds ids,
                                        mx::Stream s);

// Dense w, [..., K, N] as of a product of matrices: out = x w. Its last two axes may be those of a
// transposed view, which is not copied.
mx::array apply_gather_matmul(mx::array x, mx::array w, PairIds ids, mx::Stream s);

// The sum over the pairs p of each expert of y[p]^T x[left(p)]: y [*rhs.shape, M, N], x [..., M,
// K], result [experts, N, K]. Deterministic on the CPU.
mx::array apply_gather_outer(mx::array y, mx::array x, PairIds ids, int experts, mx::Stream s);

}  // namespace mlx_anvil
