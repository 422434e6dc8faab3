// The end of a decode with matrix products: merges the simdgroups of a threadgroup, and stores.
#pragma once

#include "metal/flash_attention/decode_matrix_state.h"

// Final states of half of the simdgroups, in the layout of their lanes.
template <typename State, int kSimdgroups>
struct DecodeShares {
  enum { kShares = kSimdgroups / 2 };
  float2 out[kShares][State::kOutFragments][32];
  OnlineSoftmax softmax[kShares][2][32];
};

template <typename State, int kSimdgroups>
METAL_FUNC void store_share(threadgroup DecodeShares<State, kSimdgroups>& shares,
                            int share,
                            const thread State& state,
                            uint lane) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < State::kOutFragments; ++f) {
    shares.out[share][f][lane] = elements_of(state.out.block(f, 0));
  }
  shares.softmax[share][0][lane] = state.softmax[0];
  shares.softmax[share][1][lane] = state.softmax[1];
}

template <typename State, int kSimdgroups>
METAL_FUNC void add_share(thread State& state,
                          const threadgroup DecodeShares<State, kSimdgroups>& shares,
                          int share,
                          uint lane) {
  float2 own, other;
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    const OnlineSoftmax theirs = shares.softmax[share][e][lane];
    own[e] = state.softmax[e].begin_piece(theirs.highest);
    other[e] = metal::fast::exp2(theirs.highest - state.softmax[e].base());
    state.softmax[e].sum = metal::fma(theirs.sum, other[e], state.softmax[e].sum);
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < State::kOutFragments; ++f) {
    state.out.fragments[f][0] = fragment_of<float>(
        metal::fma(shares.out[share][f][lane], other, elements_of(state.out.block(f, 0)) * own));
  }
}

// Merges the simdgroups, and stores the result of the rows from `first_row` on. It is a partial one
// if the keys are in parts, of which this is number `part`.
template <typename T, int kSimdgroups, typename State>
METAL_FUNC void finish_decode(thread State& state,
                              threadgroup DecodeShares<State, kSimdgroups>& shares,
                              int first_row,
                              int part,
                              const device float* sinks,
                              device T* out,
                              device float* lse,
                              constant AttentionForwardParams& params,
                              uint simdgroup,
                              uint lane) {
  constant AttentionParams& common = params.common;
  const int row_count = common.group * common.q_len;
  MLX_ANVIL_UNROLL
  for (int left = kSimdgroups / 2; left > 0; left /= 2) {
    if (int(simdgroup) >= left && int(simdgroup) < 2 * left) {
      store_share(shares, simdgroup - left, state, lane);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (int(simdgroup) < left) {
      add_share(state, shares, simdgroup, lane);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  if (simdgroup != 0) {
    return;
  }

  float totals[2];
  float2 weights = float2(1.0f);  // parts are weighted by the combine kernel
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    totals[e] = column_sum(state.softmax[e].sum);
    if (!keys_are_in_parts) {
      if (has_sinks) {
        const float sink = state.at[e].sink(sinks, common);
        weights[e] = state.softmax[e].begin_piece(sink);
        totals[e] = state.softmax[e].add_sink(sink, totals[e] * weights[e]);
      }
      weights[e] *= inverse_of_total(totals[e]);
    }
  }
  state.scale(weights);
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    if (first_row + state.place.column + e >= row_count) {
      continue;
    }
    const DecodeRow row = state.at[e];
    const long stored = row.index(common) * params.parts + part;
    if (keys_are_in_parts) {
      state.store(e, reinterpret_cast<device float*>(out) + stored * common.v_head_dim,
                  common.v_head_dim);
    } else {
      state.store(e, out + row.out_offset(params), common.v_head_dim);
    }
    if (state.place.row != 0) {
      continue;
    }
    if (keys_are_in_parts) {
      lse[2 * stored] = state.softmax[e].highest;
      lse[2 * stored + 1] = totals[e];
    } else if (stores_lse) {
      lse[row.index(common)] = state.softmax[e].log_sum_exp(totals[e]);
    }
  }
}
