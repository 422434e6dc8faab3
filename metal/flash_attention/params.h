// Parameters of the attention kernels, shared by the host (C++) and the kernels (MSL): plain 32-
// and 64-bit fields in an order that needs no padding, so that both compilers lay it out alike.
//
// Bindings. Forward and decode:   q k v mask sinks | out lse | params
//           of a decode in parts: q k v mask sinks | partial_out partial_sums | params
// Where a call has no mask, sinks or lse, the host binds q or out in their place.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// What all attention kernels need. Strides are in elements, [batch, head, row, column].
struct AttentionParams {
  int64_t q_strides[4];
  int64_t k_strides[4];
  int64_t v_strides[4];
  int64_t mask_strides[4];
  int64_t sinks_strides[2];  // [batch, head]

  int32_t q_heads;
  int32_t kv_heads;
  int32_t group;  // query heads of a kv head
  int32_t q_len;
  int32_t kv_len;
  int32_t head_dim;
  int32_t v_head_dim;

  // Query i sees keys i + band_low to i + band_high, both included. Limits that reach beyond all
  // keys are clamped to such, so that sums with positions stay far from overflow.
  int32_t band_low;
  int32_t band_high;

  // Scores are in units of log2, so these hold a factor of log2(e): a score is (q . k) *
  // score_scale, or with softcap softcap * tanh((q . k) * score_scale), where the factor is in
  // softcap instead.
  float score_scale;
  float softcap;
  float scale;  // that of the call
};

struct AttentionForwardParams {
  AttentionParams common;
  int64_t out_strides[3];  // [batch, head, row]; columns are neighbours
  int32_t parts;           // of the keys, in a decode
  int32_t keys_per_part;
};

struct AttentionBackwardParams {
  AttentionParams common;
  int64_t out_strides[4];
  int64_t d_out_strides[4];
  int64_t d_lse_strides[3];  // [batch, head, row]
  int64_t d_q_strides[3];    // of outputs: [batch, head, row]; columns are neighbours
  int64_t d_k_strides[3];
  int64_t d_v_strides[3];
};

static_assert(sizeof(AttentionParams) == 8 * 18 + 4 * 12, "same layout in C++ and MSL");
static_assert(sizeof(AttentionForwardParams) == sizeof(AttentionParams) + 8 * 4,
              "same layout in C++ and MSL");
static_assert(sizeof(AttentionBackwardParams) == sizeof(AttentionParams) + 8 * 20,
              "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
