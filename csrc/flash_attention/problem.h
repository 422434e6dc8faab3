// What an attention kernel is given, in plain numbers and pointers: read by the CPU kernels (which
// include no library code, see common/isa.h), by the dispatch to a GPU and by the primitives.
//
//   s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j]       cap(x) = softcap * tanh(x / softcap)
//   lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]
//
// A row with nothing to attend has out = 0 and gradients of 0; its lse is the sink, or -inf.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

// More than any sequence is long, and far enough from overflow to be added to a position.
inline constexpr int64_t kUnboundedWindow = int64_t{1} << 40;

// Up to so many queries, the kernels are those for decoding.
inline constexpr int kDecodeRows = 8;
// Largest head dims that have kernels: for everything, and for the forward of a decode.
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxDecodeHeadDim = 512;

enum class AttentionMask : int32_t { kNone, kBool, kAdditive };

// The parameters of a call that are not sizes.
struct AttentionConfig {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  // Query i stands at position p = i + kv_len - q_len, so that the last query and the last key are
  // level. It sees the keys p - window_left to p + window_right, both included; causal is
  // window_right = 0.
  int64_t window_left = kUnboundedWindow;
  int64_t window_right = kUnboundedWindow;
  AttentionMask mask = AttentionMask::kNone;
  bool has_sinks = false;

  bool operator==(const AttentionConfig&) const = default;
};

struct AttentionSizes {
  int64_t batch = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;  // divides q_heads; query head h reads kv head h / (q_heads / kv_heads)
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t head_dim = 0;    // of q and k
  int64_t v_head_dim = 0;  // of v and out

  int64_t group() const { return q_heads / kv_heads; }
};

// [batch, head, row, column]; strides in elements, any of them, also 0 (broadcast) and negative.
struct AttentionView {
  const void* data = nullptr;
  int64_t strides[4] = {};
};

// Likewise, written; the last stride is 1 and rows do not overlap.
struct AttentionOutput {
  void* data = nullptr;  // null: not wanted
  int64_t strides[4] = {};
};

struct AttentionOperands {
  KernelDtype dtype;
  AttentionConfig config;
  AttentionSizes sizes;
  AttentionView q, k, v;
  AttentionView mask;            // bool (one byte), or of the operands' dtype
  const float* sinks = nullptr;  // [batch, q_heads], strides in elements:
  int64_t sinks_strides[2] = {};
};

struct AttentionForwardArgs : AttentionOperands {
  AttentionOutput out;   // of the operands' dtype
  float* lse = nullptr;  // dense [batch, q_heads, q_len]; null: not wanted
};

struct AttentionBackwardArgs : AttentionOperands {
  AttentionView out, d_out;      // of the operands' dtype
  const float* lse = nullptr;    // dense [batch, q_heads, q_len]
  const float* d_lse = nullptr;  // [batch, q_heads, q_len], strides in elements; null: zero
  int64_t d_lse_strides[3] = {};
  AttentionOutput d_q;       // of the operands' dtype
  AttentionOutput d_k, d_v;  // likewise; both or none
  float* d_mask = nullptr;   // dense [batch, q_heads, q_len, kv_len]; null: not wanted
  float* d_sinks = nullptr;  // dense [batch, q_heads]; null: not wanted
};

}  // namespace mlx_anvil
