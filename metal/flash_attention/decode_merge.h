// The end of a decode: the simdgroups of a threadgroup, which saw different keys, add up what they
// have.
#pragma once

#include "metal/flash_attention/decode.h"
#include "metal/flash_attention/decode_row.h"

// What a simdgroup of a decode works on. `kRowGroups` simdgroups share keys, with kRows rows each.
template <int kBlockRows, int kRowGroups>
struct DecodePlace {
  enum { kRows = kBlockRows / kRowGroups };
  int batch;
  int kv_head;
  int row_count;  // of the kv head
  int block_row;  // first of the threadgroup
  int row_group;
  int share;  // of the keys
  uint part;  // likewise, in split-K
  uint simdgroup;
  uint lane;

  METAL_FUNC int first_row() const thread { return block_row + row_group * kRows; }
};

template <int kBlockRows, int kRowGroups>
METAL_FUNC DecodePlace<kBlockRows, kRowGroups> decode_place(constant AttentionParams& params,
                                                            uint3 group,
                                                            uint simdgroup,
                                                            uint lane) {
  const int row_count = params.group * params.q_len;
  const int blocks = (row_count + kBlockRows - 1) / kBlockRows;
  return {int(group.z),
          int(group.y / blocks),
          row_count,
          int(group.y % blocks * kBlockRows),
          int(simdgroup % kRowGroups),
          int(simdgroup / kRowGroups),
          group.x,
          simdgroup,
          lane};
}

// Rows of all simdgroups that pass through threadgroup memory together: as many as fit 16 KB, so
// that a core holds several threadgroups.
template <int kDim, int kRows, int kSimdgroups>
struct DecodeRound {
  enum {
    kMost = (16 << 10) / (4 * kDim * kSimdgroups),
    kRowsAtOnce = kMost < 1 ? 1
    : kMost < kRows         ? kMost
                            : kRows,
  };
};

// Threadgroup memory, and what passes through it.
template <typename T, int kDim, int kBlockRows, int kRowGroups, int kSimdgroups>
struct DecodeMerge {
  using Place = DecodePlace<kBlockRows, kRowGroups>;
  enum { kRows = Place::kRows };
  enum { kShares = kSimdgroups / kRowGroups };  // simdgroups with the same rows
  enum { kAtOnce = DecodeRound<kDim, kRows, kSimdgroups>::kRowsAtOnce };
  static_assert(kRows % kAtOnce == 0, "whole rounds");
  using SharesOut = float[kShares][kRowGroups * kAtOnce][kDim];
  using Shares = OnlineSoftmax[kShares][kRowGroups * kRows];

  // `own` is the lane's row, and `softmax` that of its keys: those of the simdgroup. `rows` are
  // what the simdgroup has of the output.
  METAL_FUNC static void store(threadgroup SharesOut& shares_out,
                               threadgroup Shares& shares,
                               Place at,
                               DecodeRow own,
                               OnlineSoftmax softmax,
                               thread DecodeOutput<kDim, kRows>& rows,
                               const device float* sinks,
                               device T* out,
                               device float* lse,
                               constant AttentionForwardParams& params) {
    constant AttentionParams& common = params.common;
    const int row_of_lane = at.lane % kRows;
    // The simdgroups tell each other the maxima and sums of their rows.
    if (at.lane < kRows) {
      shares[at.share][at.row_group * kRows + row_of_lane] = softmax;
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    enum { kSharesAtOnce = 32 / kRows, kTurns = (kShares + kSharesAtOnce - 1) / kSharesAtOnce };
    OnlineSoftmax others[kTurns];
    OnlineSoftmax all;
    all.clear();
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      const int s = i * kSharesAtOnce + at.lane / kRows;
      others[i].clear();
      if (s < kShares) {
        others[i] = shares[s][at.row_group * kRows + row_of_lane];
      }
      all.highest = metal::fmax(all.highest, others[i].highest);
    }
    all.highest = over_lanes<true, kRows>(all.highest);
    float sink = -INFINITY;
    if (has_sinks && !keys_are_in_parts) {
      sink = own.sink(sinks, common);
      all.highest = metal::max(all.highest, sink);
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      all.sum =
          metal::fma(metal::fast::exp2(others[i].highest - all.base()), others[i].sum, all.sum);
    }
    all.sum = over_lanes<false, kRows>(all.sum);
    const float total = has_sinks && !keys_are_in_parts ? all.add_sink(sink, all.sum) : all.sum;
    const float factor = metal::fast::exp2(softmax.highest - all.base());
    rows.scale(keys_are_in_parts ? factor : factor * inverse_of_total(total));

    if (at.share == 0 && at.lane < kRows && at.first_row() + row_of_lane < at.row_count) {
      if (keys_are_in_parts) {
        const long part = own.index(common) * params.parts + at.part;
        lse[2 * part] = all.highest;
        lse[2 * part + 1] = all.sum;
      } else if (stores_lse) {
        lse[own.index(common)] = all.log_sum_exp(total);
      }
    }

    // Then each thread sums a column of the output at a time.
    MLX_ANVIL_UNROLL
    for (int begin = 0; begin < kRows; begin += kAtOnce) {
      if (begin > 0) {
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      }
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        rows.store(begin + r, shares_out[at.share][at.row_group * kAtOnce + r]);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      for (int i = at.simdgroup * 32 + at.lane; i < kRowGroups * kAtOnce * kDim;
           i += 32 * kSimdgroups) {
        const int r = i / kDim, column = i % kDim;
        const int row = at.block_row + r / kAtOnce * kRows + begin + r % kAtOnce;
        if (row < at.row_count && column < common.v_head_dim) {
          float sum = 0.0f;
          MLX_ANVIL_UNROLL
          for (int s = 0; s < kShares; ++s) {
            sum += shares_out[s][r][column];
          }
          const DecodeRow to = decode_row(common, at.batch, at.kv_head, row);
          if (keys_are_in_parts) {
            const long part = to.index(common) * params.parts + at.part;
            reinterpret_cast<device float*>(out)[part * common.v_head_dim + column] = sum;
          } else {
            out[to.out_offset(params) + column] = static_cast<T>(sum);
          }
        }
      }
    }
  }
};
