// Products of gathered matrices, in plain numbers and pointers, as of a mixture of experts. The CPU
// kernels (which include no library code, see common/isa.h), the GPU dispatch and the primitives
// all read this header.
//
//   out[p] = x[left(p)] times w[expert(p)],   p < pairs
//
//   x [lefts, rows, *], w [experts, N, K] (or quantized), out [pairs, rows, *]
//   product kTransposed:  * is K of x and N of out:  out[p] = x[left] w[expert]^T
//   product kPlain:       * is N of x and K of out:  out[p] = x[left] w[expert]
//
// Ids are 32 bits. Negative ones count from the end; ids still out of range clamp to the first or
// the last, so no id reads other memory. `lhs` may be null: equal runs of pairs then share a matrix
// of x, left(p) = p / (pairs / lefts).
#pragma once

#include <cstdint>

#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// The index that an id means, of `count` at least 1.
inline int64_t gather_index(int32_t id, int64_t count) {
  const int64_t index = id < 0 ? id + count : id;
  return index < 0 ? 0 : index < count ? index : count - 1;
}

struct GatherSizes {
  int64_t pairs = 0;
  int64_t rows = 0;  // of each matrix of x
  int64_t lefts = 0;
  int64_t experts = 0;
  int64_t columns = 0;  // K: columns (or codes per row) of w
  int64_t outputs = 0;  // N: rows of w
};

struct GatherIds {
  const int32_t* lhs = nullptr;  // [pairs]; may be null
  const int32_t* rhs = nullptr;  // [pairs]
};

inline int64_t gather_left(const GatherSizes& sizes, const GatherIds& ids, int64_t pair) {
  return ids.lhs ? gather_index(ids.lhs[pair], sizes.lefts) : pair / (sizes.pairs / sizes.lefts);
}

inline int64_t gather_expert(const GatherSizes& sizes, const GatherIds& ids, int64_t pair) {
  return gather_index(ids.rhs[pair], sizes.experts);
}

struct GatherQuantizedArgs {
  KernelDtype dtype;  // of x and out
  QuantizedFormat format;
  QuantizedProduct product;
  GatherSizes sizes;
  GatherIds ids;
  QuantizedWeights weights;  // [experts, N, ...]
  const void* x;
  void* out;
};

// The gradients of such a product in scales and biases (affine), of each expert's pairs.
struct GatherScaleGradientArgs {
  KernelDtype dtype;  // of all arrays but w
  QuantizedFormat format;
  QuantizedProduct product;
  GatherSizes sizes;
  GatherIds ids;
  const uint32_t* w;  // [experts, N, ...]
  const void* x;
  const void* dy;  // like out
  void* d_scales;  // [experts, N, K / group]; null if not wanted
  void* d_biases;
};

// activation(x Wg^T + gate_bias) * (x Wu^T + up_bias). A bias, [experts, N] of `dtype`, may be
// null.
struct GatherSwigluArgs {
  KernelDtype dtype;
  QuantizedFormat format;
  GatherSizes sizes;
  GatherIds ids;
  QuantizedWeights gate, up;
  const void* gate_bias;
  const void* up_bias;
  GateOptions options;
  const void* x;
  void* out;
};

// Dense w, [experts, N, K], row-contiguous, of `dtype`. The summed dimension is K (kTransposed) or
// N (kPlain).
struct GatherDenseArgs {
  KernelDtype dtype;
  QuantizedProduct product;
  GatherSizes sizes;
  GatherIds ids;
  const void* w;
  const void* x;
  void* out;
};

// out[e] = sum over the pairs p of expert e, in order, of y[p]^T x[left(p)]
// y [pairs, rows, N], x [lefts, rows, K], out [experts, N, K]
struct GatherOuterArgs {
  KernelDtype dtype;
  GatherSizes sizes;
  GatherIds ids;
  const void* y;
  const void* x;
  void* out;
};

// out[i] = sum over the pairs p with id i, in order, of x[p]
// x [pairs, columns], out [count, columns]
struct SumPairsArgs {
  KernelDtype dtype;
  int64_t pairs, count, columns;
  const int32_t* ids;
  const void* x;
  void* out;
};

}  // namespace mlx_anvil
