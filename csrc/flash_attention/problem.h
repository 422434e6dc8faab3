// The attention problem as plain data. Read by the CPU kernels (which include no library code, see
// common/isa.h), the GPU launches and the primitives.
//
//   s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j]       cap(x) = softcap * tanh(x / softcap)
//   lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]
//
// A row without visible keys has out = 0 and zero gradients; its lse is the sink, or -inf.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

// Longer than any sequence, yet far enough from overflow to be added to a position.
inline constexpr int64_t kUnboundedWindow = int64_t{1} << 40;

// The decode kernels serve up to this many queries.
inline constexpr int kDecodeRows = 8;
// The largest head dims with GPU kernels: for everything; for a decode; and for any other forward
// over arrays, of keys and of values.
inline constexpr int kMaxGpuHeadDim = 256;
inline constexpr int kMaxGpuDecodeHeadDim = 512;
inline constexpr int kMaxGpuKeyDim = 576;
inline constexpr int kMaxGpuValueDim = 512;

// True if the GPU decode kernels support this many queries and this head_dim. Pass the larger
// head_dim of keys and values.
inline bool suits_gpu_decode(int64_t q_len, int64_t head_dim) {
  return q_len <= kDecodeRows && head_dim <= kMaxGpuDecodeHeadDim;
}

// The CPU kernels take larger ones. This bounds their arrays on the stack.
inline constexpr int kMaxHeadDim = 1024;

enum class AttentionMask : int32_t { kNone, kBool, kAdditive };

// The parameters of a call other than sizes.
struct AttentionConfig {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  // Query i is at position p = i + kv_len - q_len, which aligns the last query with the last key.
  // It sees keys p - window_left to p + window_right, inclusive. A causal mask is window_right = 0.
  int64_t window_left = kUnboundedWindow;
  int64_t window_right = kUnboundedWindow;
  AttentionMask mask = AttentionMask::kNone;
  bool has_sinks = false;
  bool is_ragged = false;      // lengths are those of AttentionSequences
  bool is_packed = false;      // these follow one another; otherwise each is a batch, in order
  bool has_own_keys = false;   // packed, and a sequence has as many keys as queries
  bool has_starts = false;     // batches whose keys do not start at the first
  bool is_paged = false;       // keys and values are those of a PageTable
  bool row_invariant = false;  // the bits of a row do not depend on other rows and later keys

  // Whether the rows of a sequence start where the table says.
  bool starts_anywhere() const { return is_packed || has_starts; }

  bool operator==(const AttentionConfig&) const = default;
};

// The requested gradients. Those of k and v always come together.
struct AttentionGradients {
  bool q = false, kv = false, mask = false, sinks = false;
  bool operator==(const AttentionGradients&) const = default;
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

// A sequence of a ragged batch: rows that belong together. Positions are relative to its own
// lengths.
struct AttentionSequence {
  int32_t batch;
  int32_t first_query;
  int32_t queries;
  int32_t first_key;
  int32_t keys;
};
enum class AttentionSequenceColumn { kBatch, kFirstQuery, kQueries, kFirstKey, kKeys };

// The pages of each sequence's keys and values, in order. Then these have page ids in place of
// batches, and each page has `page_size` rows.
struct PageTable {
  const int32_t* ids = nullptr;  // [batch, columns]; null: keys and values are not in pages
  int64_t columns = 0;
  int64_t page_size = 0;
  int64_t page_count = 0;  // ids are clamped
};

// [batch, head, row, column]. Strides in elements; 0 (broadcast) and negative ones are allowed.
struct AttentionView {
  const void* data = nullptr;
  int64_t strides[4] = {};
};

// An output in the same layout. Its last stride is 1 and its rows do not overlap.
struct AttentionOutput {
  void* data = nullptr;  // null: not wanted
  int64_t strides[4] = {};
};

struct AttentionOperands {
  KernelDtype dtype;
  AttentionConfig config;
  AttentionSizes sizes;
  AttentionView q, k, v;
  PageTable pages;               // of k and v
  AttentionView mask;            // bool (one byte), or of the operands' dtype
  const float* sinks = nullptr;  // [batch, q_heads], strides in elements:
  int64_t sinks_strides[2] = {};
  const AttentionSequence* sequences = nullptr;  // of a ragged batch; in any order
  int64_t sequence_count = 0;
};

struct AttentionForwardArgs : AttentionOperands {
  AttentionOutput out;     // of the operands' dtype
  float* lse = nullptr;    // [batch, q_heads, q_len]; null: not wanted
  int64_t lse_stride = 0;  // from head to head
};

struct AttentionBackwardArgs : AttentionOperands {
  AttentionView out, d_out;      // of the operands' dtype
  const float* lse = nullptr;    // [batch, q_heads, q_len]
  int64_t lse_stride = 0;        // from head to head
  const float* d_lse = nullptr;  // [batch, q_heads, q_len], strides in elements; null: zero
  int64_t d_lse_strides[3] = {};
  AttentionOutput d_q;       // of the operands' dtype
  AttentionOutput d_k, d_v;  // of the operands' dtype; both or neither
  bool adds = false;         // these three are float32 instead, and the gradients are added to them
  float* d_mask = nullptr;   // [batch, q_heads, q_len, kv_len]; null: not wanted
  int64_t d_mask_strides[3] = {};
  float* d_sinks = nullptr;  // dense [batch, q_heads]; null: not wanted
};

}  // namespace mlx_anvil
