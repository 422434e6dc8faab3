// Products with matrices in GGUF's own blocks of bytes, in plain numbers and pointers. The CPU
// kernels (which include no library code, see common/isa.h), the GPU dispatch and the primitives
// all read this header.
//
//   product kTransposed:  out[m, n] = sum over k of x[m, k] W[n, k]     x [rows, K], out [rows, N]
//   product kPlain:       out[m, k] = sum over n of x[m, n] W[n, k]     x [rows, N], out [rows, K]
//
// Row n of w is K / gguf_block_columns() blocks without padding. Numbers are little-endian. A block
// holds these arrays, in this order:
//
//   q4_0     half d, u8 q[16]                          W = d * (code - 8)
//   q8_0     half d, i8 q[32]                          W = d * q
//   q4_k     half d, half dmin, u8 s[12], u8 q[128]    W = (d * scale) * code - dmin * min
//   q5_k     half d, half dmin, u8 s[12], u8 h[32], u8 q[128]   likewise
//   q6_k     u8 q[128], u8 h[64], i8 scale[16], half d          W = (d * scale) * (code - 32)
//   iq4_nl   half d, u8 q[16]                          W = d * kIq4Values[code]
//   iq4_xs   half d, u16 h, u8 s[4], u8 q[128]         W = (d * (scale - 32)) * kIq4Values[code]
//
// Codes of column k, and its scale and min, which q6_k has for 16 columns and the others for 32:
//
//   q4_0, iq4_nl, iq4_xs   q[16 (k / 32) + k % 16], the low half for k % 32 < 16, else the high one
//   q4_k, q5_k             q[32 (k / 64) + k % 32], the low half for k % 64 < 32, else the high
//   one;
//                          of q5_k, bit k / 32 of h[k % 32] is bit 4
//   q6_k                   q[64 (k / 128) + k % 64], the low half for k % 128 < 64, else the high
//                          one; bits 2 (k / 32 % 4) and above of h[32 (k / 128) + k % 32] are bits
//                          4 and 5
//   q4_k, q5_k    j = k / 32 < 4: scale = s[j] & 63, min = s[j + 4] & 63; else
//                 scale = s[j + 4] & 15 | s[j - 4] >> 6 << 4, min = s[j + 4] >> 4 | s[j] >> 6 << 4
//   iq4_xs        j = k / 32: scale = (s[j / 2] >> 4 (j % 2)) & 15 | ((h >> 2 j) & 3) << 4
#pragma once

#include <cstdint>

#include "common/gate_options.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

enum class GgufKind : int32_t { kQ4_0, kQ8_0, kQ4K, kQ5K, kQ6K, kIq4Nl, kIq4Xs };

constexpr bool gguf_has_short_blocks(GgufKind kind) {
  return kind == GgufKind::kQ4_0 || kind == GgufKind::kQ8_0 || kind == GgufKind::kIq4Nl;
}

constexpr int gguf_block_columns(GgufKind kind) {
  return gguf_has_short_blocks(kind) ? 32 : 256;
}

constexpr int gguf_block_bytes(GgufKind kind) {
  switch (kind) {
    case GgufKind::kQ8_0:
      return 34;
    case GgufKind::kQ4K:
      return 144;
    case GgufKind::kQ5K:
      return 176;
    case GgufKind::kQ6K:
      return 210;
    case GgufKind::kIq4Xs:
      return 136;
    default:  // q4_0, iq4_nl
      return 18;
  }
}

// The values of the codes of iq4_nl and iq4_xs.
inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

struct GgufMatmulArgs {
  KernelDtype dtype;  // of x and out
  GgufKind kind;
  int32_t activation_bits;  // as in QuantizedFormat
  QuantizedProduct product;
  QuantizedSizes sizes;
  const uint8_t* w;  // [batch, N, bytes of a row]
  const void* x;
  void* out;
};

// out = activation(x Wg^T) * (x Wu^T), of up to kQuantizedGemvRows rows and one batch.
struct GgufSwigluArgs {
  KernelDtype dtype;  // of x and out
  GgufKind kind;
  int32_t activation_bits;  // as in QuantizedFormat
  QuantizedSizes sizes;
  const uint8_t *gate, *up;  // [N, bytes of a row]
  GateOptions options;
  const void* x;
  void* out;
};

}  // namespace mlx_anvil
