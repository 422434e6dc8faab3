// gated_delta and ssd_scan: gradients of a chunk of steps. The host goes from the last chunk to the
// first.
//
//   d_S += d_y q^T;  d_q = S^T d_y;  d_v = beta d_S k;  d_beta = (v - S' k) d_S k
//   d_S' = d_S - d_v k^T;  d_k = d_S^T u - S'^T d_v;  d_g = d_S' * S_before;  d_S_before = g d_S'
// with u = beta (v - S' k) and S' = g S_before. d_q, d_k, d_g and d_beta are sums over the rows of
// the state, d_q and d_k also over the value heads that share a key head.
//
// A rule that does not correct has u = beta v, and no d_v in d_S' and d_k. With y = o silu(gate)
// and o = S q + skip v, d_o = silu(gate) d_y takes the place of d_y;
//   d_gate = silu'(gate) d_y o;  d_skip = d_o v, a sum over rows;  d_v += skip d_o
//
// Kernels: gated_delta_backward_<dtype>_k<tile of the key dim>.
// Grid: x covers blocks of rows, y value heads, z batch rows and may be smaller than the batch.
// Threadgroup: 256 x 1 x 1, or 128 for a tile of 256.
//
// Bindings: q, k, v, g, beta, state, lengths, positions, skip, gate, kept, d_y, d_state_out,
//           d_states, d_state, before, parts, d_v, d_state, d_gate, params. `before` is memory
//           for the states of the chunk. The gradient of the state goes from chunk to chunk in
//           d_state.
// Function constants: 0 to 8 and 10 to 12 as in state.h. Rows are dense; alignment: constant 0.
//
//   for each step: store the share of S_before; step as in forward.metal
//   for each step from the last: load S_before; the formulas above in registers;
//     sum over the SIMD group's rows by exchanges, and store to threadgroup memory
//     one barrier (two buffers alternate); add up over SIMD groups; store the part
// sum.metal adds up the parts.
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/gated_delta/parts.h"
#include "metal/gated_delta/state.h"

// The sum over the rows of the simdgroup, in all their lanes.
template <int kLanes>
METAL_FUNC float4 over_rows(float4 x) {
  MLX_ANVIL_UNROLL
  for (int j = 0; j < 4; ++j) {
    x[j] = over_lanes<false, kLanes, 32>(x[j]);
  }
  return x;
}

template <typename T, int kTile, int kLanes, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void gated_delta_backward(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device T* g [[buffer(3)]],
    const device T* beta [[buffer(4)]],
    const device float* state [[buffer(5)]],
    const device int* lengths [[buffer(6)]],
    const device int* positions [[buffer(7)]],
    const device float* skip [[buffer(8)]],
    const device T* gate [[buffer(9)]],
    const device float* kept [[buffer(10)]],
    const device T* d_y [[buffer(11)]],
    const device float* d_state_out [[buffer(12)]],
    const device float* d_states [[buffer(13)]],
    const device float* d_state_in [[buffer(14)]],
    device float* before [[buffer(15)]],
    device float* parts [[buffer(16)]],
    device T* d_v [[buffer(17)]],
    device float* d_state [[buffer(18)]],
    device T* d_gate [[buffer(19)]],
    constant GatedDeltaParams& params [[buffer(20)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint thread_lane [[thread_index_in_simdgroup]]) {
  using Share = RowShare<kTile, kLanes>;
  threadgroup float shares[2][kSimdgroups][3 * kTile + 3];
  Share share;
  share.lane = int(thread_lane) % kLanes;
  share.columns = params.key_dim;
  const int row_in_simdgroup = int(thread_lane) / kLanes;
  const int row = (int(group.x) * kSimdgroups + int(simdgroup)) * Share::kRows + row_in_simdgroup;
  const bool exists = row < params.value_dim;
  const int head = int(group.y);
  int turn = 0;
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    HeadPlace place = place_of(params, batch, head);
    place.q += share.column(0);
    place.k += share.column(0);
    place.g += g_is_per_channel ? share.column(0) : 0;
    const int steps = steps_of(params, lengths, batch) - params.first;  // of the chunk, or none
    const Positions returned = positions_of(params, positions, batch);
    const long own_row = (place.state + row) * params.key_dim + share.column(0);
    const long rows_of_states = long(params.batch) * params.value_heads * params.value_dim;

    float4 s[Share::kPacks], x[Share::kPacks], decay[Share::kPacks];
    if (params.first > 0) {
      const long chunk = params.first / params.chunk - 1;
      share.load(kept + chunk * rows_of_states * params.key_dim + own_row, exists, s);
    } else {
      share.load(state + own_row, has_state && exists, s);
    }
    for (int i = 0; i < params.steps && i < steps; ++i) {
      const long t = params.first + i;
      if (exists) {
        share.store(before + i * rows_of_states * params.key_dim + own_row, s);
      }
      share.load_decay(g, place.g + t * params.g_strides[1], decay);
      share.load_key(k + place.k + t * params.k_strides[1], params, 1.0f, x);
      MLX_ANVIL_UNROLL
      for (int j = 0; j < Share::kPacks; ++j) {
        s[j] *= decay[j];
      }
      const float found = corrects ? share.sum(share.dot(s, x)) : 0.0f;
      const float value = exists ? float(v[place.v + t * params.v_strides[1] + row]) : 0.0f;
      const float rate = load_gate(beta, beta_is_float32, place.beta + t * params.beta_strides[1]);
      const float change = rate * (value - found);
      MLX_ANVIL_UNROLL
      for (int j = 0; j < Share::kPacks; ++j) {
        s[j] += change * x[j];
      }
    }

    float4 d_s[Share::kPacks];
    share.load((params.is_last != 0 ? d_state_out : d_state_in) + own_row, exists, d_s);
    const int end = params.first + params.steps;
    int next = returned.before(end);
    for (int i = params.steps - 1; i >= 0; --i) {
      const int t = params.first + i;
      if (returns_states && t == next) {
        for (int j = 0; j < returned.count; ++j) {
          if (returned.at(j) == t) {
            float4 more[Share::kPacks];
            const long from = returned_row(params, batch, j, head) + row;
            share.load(d_states + from * params.key_dim + share.column(0), exists, more);
            MLX_ANVIL_UNROLL
            for (int n = 0; n < Share::kPacks; ++n) {
              d_s[n] += more[n];
            }
          }
        }
        next = returned.before(t);
      }
      threadgroup float* const own = shares[turn][simdgroup];
      float d_value = 0.0f, d_open = 0.0f;
      if (i < steps) {
        float4 old[Share::kPacks], q_sums[Share::kPacks];
        share.load(before + i * rows_of_states * params.key_dim + own_row, exists, old);
        share.load_decay(g, place.g + t * params.g_strides[1], decay);
        share.load_key(q + place.q + t * params.q_strides[1], params, params.q_scale, x);
        float d_out = exists ? float(d_y[batch * params.d_y_strides[0] + t * params.d_y_strides[1] +
                                         head * params.d_y_strides[2] + row])
                             : 0.0f;
        const float value = exists ? float(v[place.v + t * params.v_strides[1] + row]) : 0.0f;
        const float skipped = has_skip ? skip[place.skip + t * params.skip_strides[1]] : 0.0f;
        if (is_gated) {
          const float closed =
              exists ? float(gate[place.gate + t * params.gate_strides[1] + row]) : 0.0f;
          const Sigmoid open = sigmoid(closed);
          float out = share.sum(share.dot(s, x));
          out += has_skip ? skipped * value : 0.0f;
          d_open = d_out * out * silu_derivative(closed, open);
          d_out *= closed * open.value;
        }
        MLX_ANVIL_UNROLL
        for (int j = 0; j < Share::kPacks; ++j) {
          d_s[j] += d_out * x[j];
          q_sums[j] = over_rows<kLanes>(d_out * s[j]);
          s[j] = decay[j] * old[j];
        }
        share.load_key(k + place.k + t * params.k_strides[1], params, 1.0f, x);
        const float d_change = share.sum(share.dot(d_s, x));
        const float error = corrects ? value - share.sum(share.dot(s, x)) : value;
        const float rate =
            load_gate(beta, beta_is_float32, place.beta + t * params.beta_strides[1]);
        d_value = rate * d_change;
        const float change = rate * error;
        float d_decay = 0.0f;
        MLX_ANVIL_UNROLL
        for (int j = 0; j < Share::kPacks; ++j) {
          float4 of_key = change * d_s[j], d_decayed = d_s[j];
          if (corrects) {
            of_key -= d_value * s[j];
            d_decayed -= d_value * x[j];
          }
          const float4 k_sum = over_rows<kLanes>(of_key);
          float4 d_factor = d_decayed * old[j];
          d_decay += d_factor.x + d_factor.y + d_factor.z + d_factor.w;
          d_factor = g_is_per_channel ? over_rows<kLanes>(d_factor) : d_factor;
          if (row_in_simdgroup == 0) {
            const int column = share.column(j);
            MLX_ANVIL_UNROLL
            for (int n = 0; n < 4; ++n) {
              own[column + n] = q_sums[j][n];
              own[kTile + column + n] = k_sum[n];
              if (g_is_per_channel) {
                own[2 * kTile + column + n] = d_factor[n];
              }
            }
          }
          d_s[j] = decay[j] * d_decayed;
          s[j] = old[j];
        }
        const float d_rate = metal::simd_sum(share.lane == 0 ? d_change * error : 0.0f);
        d_decay = metal::simd_sum(d_decay);
        if (thread_lane == 0) {
          own[3 * kTile] = d_decay;
          own[3 * kTile + 1] = d_rate;
        }
        if (has_skip) {
          const float d_skipped = metal::simd_sum(share.lane == 0 ? d_out * value : 0.0f);
          if (thread_lane == 0) {
            own[3 * kTile + 2] = d_skipped;
          }
          d_value += skipped * d_out;
        }
      }
      if (exists && share.lane == 0) {
        const long token = long(batch) * params.length + t;
        const long at = (token * params.value_heads + head) * params.value_dim + row;
        d_v[at] = T(d_value);
        if (is_gated) {
          d_gate[at] = T(d_open);
        }
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      device float* const part = parts + (part_of(params, batch, i, head) + int(group.x)) *
                                             delta_part_size(part_vectors(), params.key_dim);
      const int vectors = part_vectors();
      for (int place = int(simdgroup * 32 + thread_lane);
           place < vectors * params.key_dim + part_numbers(); place += 32 * kSimdgroups) {
        const int vector = place / params.key_dim;
        const int at = vector < vectors ? vector * kTile + place % params.key_dim
                                        : 3 * kTile + place - vectors * params.key_dim;
        float sum = 0.0f;
        for (int n = 0; n < kSimdgroups && i < steps; ++n) {
          sum += shares[turn][n][at];
        }
        part[place] = sum;
      }
      turn ^= 1;
    }
    if (exists) {
      share.store(d_state + own_row, d_s);
    }
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T, tile, lanes, simdgroups)        \
  MLX_ANVIL_KERNEL("gated_delta_backward_" #dtype "_k" #tile, \
                   gated_delta_backward<T, tile, lanes, simdgroups>)

#define INSTANTIATE_TILE(tile, forward_lanes, lanes, simdgroups) \
  INSTANTIATE(float32, float, tile, lanes, simdgroups)           \
  INSTANTIATE(float16, half, tile, lanes, simdgroups)            \
  INSTANTIATE(bfloat16, bfloat, tile, lanes, simdgroups)

MLX_ANVIL_DELTA_TILES(INSTANTIATE_TILE)
