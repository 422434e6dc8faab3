// Parameters of the kernels of flash_attention, shared by the host (C++) and the kernels (MSL):
// 64- and 32-bit fields in an order that needs no padding, so that both compilers lay it out alike.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// Strides in elements: batch, head, row, column. Those of arrays that a kernel does not have are 0.
struct AttentionParams {
  int64_t q_strides[4];
  int64_t k_strides[4];
  int64_t v_strides[4];
  int64_t mask_strides[4];
  int64_t out_strides[4];
  int64_t d_out_strides[4];
  int64_t d_q_strides[4];
  int64_t d_k_strides[4];
  int64_t d_v_strides[4];
  int64_t d_lse_strides[3];
  int64_t sinks_strides[2];  // batch, head
  int32_t q_heads;
  int32_t kv_heads;
  int32_t q_len;
  int32_t kv_len;
  int32_t head_dim;
  int32_t v_head_dim;
  // Query i sees the keys p - window_left to p + window_right, p = i + kv_len - q_len.
  int32_t window_left;
  int32_t window_right;
  float scale;
  float softcap;
  int32_t splits;      // of the keys of a decode
  int32_t split_keys;  // in each of them but the last
};

static_assert(sizeof(AttentionParams) == 8 * (9 * 4 + 3 + 2) + 4 * 12,
              "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
