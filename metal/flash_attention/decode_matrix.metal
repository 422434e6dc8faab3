// flash_attention of at most 8 queries, as in decode.metal, for several rows to a kv head on GPUs
// with units for matrix products: each key and value is multiplied with 8 rows at once.
//
// flash_attention_decode_matrix_<dtype>_d<head dim>. Bindings, function constants, grid and
// threadgroup: those of flash_attention_decode with 8 rows; the parts of the keys are added up by
// the same kernel. Assumes: rows_are_vectors.
#include "metal/flash_attention/decode_matrix.h"
#include "metal/flash_attention/tiles.h"

enum { kRows = 8, kSimdgroups = 4, kThreads = 32 * kSimdgroups };

template <typename T, int kDim>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void flash_attention_decode_matrix(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    device T* out [[buffer(5)]],
    device float* lse [[buffer(6)]],
    constant AttentionForwardParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kStride = TileRow<T, kDim>::kStride };
  threadgroup T q_tile[kRows * kStride];
  threadgroup float shares_out[kSimdgroups][kRows][kDim];
  threadgroup OnlineSoftmax shares[kSimdgroups][kRows];

  constant AttentionParams& common = params.common;
  const int row_count = common.group * common.q_len;
  const int blocks = (row_count + kRows - 1) / kRows;
  const int batch = group.z, kv_head = group.y / blocks;
  const int first_row = group.y % blocks * kRows;

  for (int i = thread_index; i < kRows * kDim; i += kThreads) {
    const int r = i / kDim, column = i % kDim;
    const DecodeRow row = decode_row(common, batch, kv_head, first_row + r);
    const device T* from = q + batch * common.q_strides[0] + row.head * common.q_strides[1] +
                           row.query * common.q_strides[2];
    q_tile[r * kStride + place_of_column(column)] = column < common.head_dim ? from[column] : T(0);
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  DecodeMatrixRows<T, kDim> rows;
  rows.place = fragment_place(lane);
  rows.begin(q_tile, kStride);
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    rows.at[e] = decode_row(common, batch, kv_head, first_row + rows.place.column + e);
  }
  const device T* keys = k + batch * common.k_strides[0] + kv_head * common.k_strides[1];
  const device T* values = v + batch * common.v_strides[0] + kv_head * common.v_strides[1];
  const KeyRange visible = visible_keys(common, 0, common.q_len - 1);
  const int part_begin = visible.begin + group.x * params.keys_per_part;
  const int part_end = metal::min(visible.end, part_begin + params.keys_per_part);
  enum { kKeys = DecodeMatrixRows<T, kDim>::kKeys };
  for (int begin = part_begin + simdgroup * kKeys; begin < part_end; begin += kSimdgroups * kKeys) {
    rows.attend(keys, values, begin, part_end, mask, common);
  }

  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    rows.softmax[e].sum = column_sum(rows.softmax[e].sum);
    if (rows.place.row == 0) {
      shares[simdgroup][rows.place.column + e] = rows.softmax[e];
    }
  }
  MLX_ANVIL_UNROLL
  for (int d = 0; d < kDim / 8; ++d) {
    *reinterpret_cast<threadgroup float2*>(
        &shares_out[simdgroup][rows.place.row][column_of_pair(d, rows.place)]) =
        elements_of(rows.out[d]);
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  const int own_rows = metal::min(int(kRows), row_count - first_row);
  for (int r = 0; r < own_rows; ++r) {
    const DecodeRow row = decode_row(common, batch, kv_head, first_row + r);
    OnlineSoftmax all;
    all.clear();
    float sink = -INFINITY;
    if (has_sinks && !keys_are_in_parts) {
      sink = row.sink(sinks, common);
      all.highest = sink;
    }
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kSimdgroups; ++s) {
      all.highest = metal::max(all.highest, shares[s][r].highest);
    }
    float factors[kSimdgroups];
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kSimdgroups; ++s) {
      factors[s] = metal::fast::exp2(shares[s][r].highest - all.base());
      all.sum += factors[s] * shares[s][r].sum;
    }
    const float total = has_sinks ? all.add_sink(sink, all.sum) : all.sum;
    const float inverse = keys_are_in_parts ? 1.0f : inverse_of_total(total);
    const long part = row.index(common) * params.parts + group.x;
    for (int column = thread_index; column < common.v_head_dim; column += kThreads) {
      float sum = 0.0f;
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kSimdgroups; ++s) {
        sum += factors[s] * shares_out[s][r][column];
      }
      if (keys_are_in_parts) {
        reinterpret_cast<device float*>(out)[part * common.v_head_dim + column] = sum;
      } else {
        out[row.out_offset(params) + column] = static_cast<T>(sum * inverse);
      }
    }
    if (thread_index == 0 && keys_are_in_parts) {
      lse[2 * part] = all.highest;
      lse[2 * part + 1] = all.sum;
    } else if (thread_index == 0 && stores_lse) {
      lse[row.index(common)] = all.log_sum_exp(total);
    }
  }
}

#define INSTANTIATE_DECODE_MATRIX(dtype, type, d)                                    \
  template [[host_name("flash_attention_decode_matrix_" #dtype "_d" #d)]] [[kernel]] \
  decltype(flash_attention_decode_matrix<type, d>) flash_attention_decode_matrix<type, d>;

MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(INSTANTIATE_DECODE_MATRIX, float16, half)
MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(INSTANTIATE_DECODE_MATRIX, bfloat16, bfloat)
