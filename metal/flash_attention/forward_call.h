// What the attention forward's kernels are called with, and what they store.
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/common/reg_tile.h"
#include "metal/flash_attention/grid.h"
#include "metal/flash_attention/scores.h"

template <typename T, typename Lengths = EqualLengths>
struct ForwardCall {
  const device T* q;
  const device T* k;
  const device T* v;
  const device uchar* mask;
  const device float* sinks;
  device T* out;
  device float* lse;
  GridPlace grid;
  uint thread_index;
  uint simdgroup;
  uint lane;
  Lengths lengths;

  METAL_FUNC Rows<T> queries(constant AttentionParams& params) const thread {
    return {q + grid.batch * params.q_strides[0] + grid.head * params.q_strides[1] +
                lengths.first_query() * params.q_strides[2],
            params.q_strides[2], params.q_strides[3], lengths.rows(params), params.head_dim};
  }
  METAL_FUNC Rows<T> keys(constant AttentionParams& params) const thread {
    return {k + grid.batch * params.k_strides[0] + kv_head(params) * params.k_strides[1] +
                lengths.first_key() * params.k_strides[2],
            params.k_strides[2], params.k_strides[3], lengths.keys(params), params.head_dim};
  }
  METAL_FUNC Rows<T> values(constant AttentionParams& params) const thread {
    return {v + grid.batch * params.v_strides[0] + kv_head(params) * params.v_strides[1] +
                lengths.first_key() * params.v_strides[2],
            params.v_strides[2], params.v_strides[3], lengths.keys(params), params.v_head_dim};
  }
  METAL_FUNC HeadMask<T> head_mask(constant AttentionParams& params) const thread {
    return mask_of<T>(mask, params, grid.batch, grid.head)
        .from(lengths.first_query(), lengths.first_key());
  }
  METAL_FUNC int kv_head(constant AttentionParams& params) const thread {
    return grid.head / params.group;
  }

  // In units of log2; -inf without sinks.
  METAL_FUNC float sink(constant AttentionParams& params) const thread {
    return has_sinks ? M_LOG2E_F * sinks[grid.batch * params.sinks_strides[0] +
                                         grid.head * params.sinks_strides[1]]
                     : -INFINITY;
  }

  // Stores out and lse of a SIMD group's rows, after the last tile of keys.
  template <typename GroupRows>
  METAL_FUNC void store(thread GroupRows& rows,
                        constant AttentionForwardParams& params) const thread {
    constant AttentionParams& common = params.common;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < int(GroupRows::kRows) / 8; ++i) {
      const int query = rows.query(i);
      float total = row_sum(rows.softmax[i].sum);
      if (has_sinks) {
        total = rows.softmax[i].add_sink(sink(common), total);
      }
      if (query >= lengths.rows(common)) {
        continue;
      }
      if (stores_lse && rows.place.column == 0) {
        lse[(static_cast<long>(grid.batch) * common.q_heads + grid.head) * common.q_len +
            lengths.first_query() + query] = rows.softmax[i].log_sum_exp(total);
      }
      rows.out.scale_row(i, inverse_of_total(total));
      rows.out.store_row(i,
                         out + grid.batch * params.out_strides[0] +
                             grid.head * params.out_strides[1] +
                             (lengths.first_query() + query) * params.out_strides[2],
                         0, common.v_head_dim, rows.place, rows_are_vectors, heads_fill_tile);
    }
  }
};
