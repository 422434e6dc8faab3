// A quantized product in plain numbers and pointers. The CPU kernels (which include no library
// code, see common/isa.h), the GPU dispatch and the primitives all read this header.
//
//   W[n, k] = scales[n, k / group] * value(code[n, k]) (+ biases[n, k / group], affine only)
//
//   product kTransposed:  out[m, n] = sum over k of x[m, k] W[n, k]     x [rows, K], out [rows, N]
//   product kPlain:       out[m, k] = sum over n of x[m, n] W[n, k]     x [rows, N], out [rows, K]
//   swiglu:               out = activation(x Wg^T) * (x Wu^T)
//
// Packing: row n of w is one little-endian bit stream without padding. Code k takes bits [k * bits,
// (k + 1) * bits), counted from the lowest bit of the row's first 32-bit word. Codes of 3, 5 and 6
// bits straddle words; 32 codes always take `bits` words. K is a multiple of the group size.
//
//   format  bits           group       value(code)                scales
//   affine  2 3 4 5 6 8    32 64 128   the unsigned integer       floating point; biases likewise
//   mxfp4   4              32          e2m1: 0 .5 1 1.5 2 3 4 6   uint8 e8m0: 2^(s - 127)
//   mxfp8   8              32          e4m3 (0x7f, 0xff: NaN)     uint8 e8m0
//   nvfp4   4              16          e2m1                       uint8 e4m3
//
// The top bit of e2m1 and e4m3 is the sign. Affine scales and biases have the dtype of x. On the
// CPU they may be float16 or bfloat16 where x is float32.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/gate_options.h"

namespace mlx_anvil {

// Up to this many rows of x, GEMV kernels read w once for all rows. Row i of the result has the
// same bits for every number of rows up to this, and at every position.
inline constexpr int kQuantizedGemvRows = 8;
// gemv_matrix.metal: rows of x, eight at a time, up to which it is faster than a dense product, and
// columns per step of a simdgroup.
inline constexpr int64_t kMostMatrixRows = 48;
inline constexpr int64_t kMatrixColumns = 256;

enum class QuantizedKind : int32_t { kAffine, kMxfp4, kMxfp8, kNvfp4 };
enum class QuantizedProduct : int32_t { kTransposed, kPlain };

struct QuantizedFormat {
  QuantizedKind kind = QuantizedKind::kAffine;
  int32_t bits = 4;
  int32_t group = 64;
  // The most bits that the CPU keeps of an element of x in x W^T: 8 or 16; 0: what the dtype needs.
  int32_t activation_bits = 0;

  // The format for derivatives and other products that round x no further than its dtype needs.
  QuantizedFormat exact() const { return {kind, bits, group}; }
  bool has_biases() const { return kind == QuantizedKind::kAffine; }
  bool operator==(const QuantizedFormat&) const = default;
};

// All arrays are dense and row-contiguous. With batch > 1, each batch has its own w.
struct QuantizedSizes {
  int64_t batch = 1;
  int64_t rows = 0;     // rows of x and out per batch
  int64_t columns = 0;  // K: codes per row of w
  int64_t outputs = 0;  // N: rows of w
};

struct QuantizedWeights {
  const uint32_t* w = nullptr;                      // [batch, N, K * bits / 32]
  const void* scales = nullptr;                     // [batch, N, K / group]
  const void* biases = nullptr;                     // [batch, N, K / group]; null unless affine
  KernelDtype scale_dtype = KernelDtype::kFloat32;  // of affine scales and biases
};

// Bytes of a scale or bias.
[[gnu::always_inline]] inline int64_t scale_size(const QuantizedFormat& format,
                                                 const QuantizedWeights& weights) {
  return format.has_biases() ? element_size(weights.scale_dtype) : 1;
}

struct QuantizedMatmulArgs {
  KernelDtype dtype;  // of x and out
  QuantizedFormat format;
  QuantizedProduct product;
  QuantizedSizes sizes;
  QuantizedWeights weights;
  const void* x;
  void* out;
};

// Gradients in scales and biases (affine), with G[n, k] = sum over m of y[m, n] x[m, k]:
//   d_scales[n, g] = sum over k in group g of G[n, k] code[n, k]
//   d_biases[n, g] = sum over k in group g of G[n, k]
struct QuantizedScaleGradientArgs {
  KernelDtype dtype;  // of all arrays but w
  QuantizedFormat format;
  QuantizedSizes sizes;
  const uint32_t* w;
  const void* y;   // [batch, rows, N]
  const void* x;   // [batch, rows, K]
  void* d_scales;  // [batch, N, K / group]; null if not wanted
  void* d_biases;
};

// Product kTransposed with w of rank 2 and up to kQuantizedGemvRows rows.
struct QuantizedSwigluArgs {
  KernelDtype dtype;
  QuantizedFormat format;
  QuantizedSizes sizes;
  QuantizedWeights gate, up;
  GateOptions options;
  const void* x;
  void* out;
};

}  // namespace mlx_anvil
