// gated_delta: y [batch, length, value_heads, value_dim] and states of the gated delta rule. Per
// step and value head, with a decay g per head or per channel:
//   S = g S;  S = S + beta (v - S k) k^T;  y = S q
// ssd_scan: the same without the correction, S = S + beta v k^T, with y = (S q + skip v)
// silu(gate).
//
// Kernels: gated_delta_forward_<dtype>_k<tile of the key dim>.
// Grid: x covers blocks of rows of the state, y value heads, z batch rows and may be smaller than
// the batch. Threadgroup: 128 x 1 x 1: four SIMD groups, which do not meet. A row has 4 or 8 lanes.
//
// Bindings: q, k, v, g, beta, state, lengths, positions, skip, gate, y, state_out, states, params
// Function constants: 0 to 8 and 10 to 12 as in state.h; 9: only keeps the state after every chunk
// but the last, in `states`, for the backward. Rows are dense; alignment: constant 0.
//
//   sum() is over the lanes of a row
//   s = the lane's share of a row of the state
//   for each step:
//     load q, k, g and beta, normalise q and k
//     s *= g; error = v - sum(s k), or v; s += beta error k; y = sum(s q), with skip and gate
//     store s if the state of this step is returned
//   store s
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/gated_delta/state.h"

template <typename T, int kTile, int kLanes>
[[kernel, max_total_threads_per_threadgroup(32 * kDeltaSimdgroups)]] void gated_delta_forward(
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
    device T* y [[buffer(10)]],
    device float* state_out [[buffer(11)]],
    device float* states [[buffer(12)]],
    constant GatedDeltaParams& params [[buffer(13)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint thread_lane [[thread_index_in_simdgroup]]) {
  using Share = RowShare<kTile, kLanes>;
  Share share;
  share.lane = int(thread_lane) % kLanes;
  share.columns = params.key_dim;
  const int row =
      (int(group.x) * kDeltaSimdgroups + int(simdgroup)) * Share::kRows + int(thread_lane) / kLanes;
  const bool exists = row < params.value_dim;
  const int head = int(group.y);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const HeadPlace place = place_of(params, batch, head);
    const int steps = steps_of(params, lengths, batch);
    const Positions returned = positions_of(params, positions, batch);
    int next = returned.after(-1);
    const long own_row = (place.state + row) * params.key_dim;
    float4 s[Share::kPacks];
    share.load(state + own_row, has_state && exists, s);
    for (int t = 0; t < params.steps; ++t) {
      float out = 0.0f;
      if (t < steps) {
        float4 x[Share::kPacks], decay[Share::kPacks];
        share.load_decay(g, place.g + t * params.g_strides[1], decay);
        share.load_key(k + place.k + t * params.k_strides[1], params, 1.0f, x);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < Share::kPacks; ++i) {
          s[i] *= decay[i];
        }
        const float found = corrects ? share.sum(share.dot(s, x)) : 0.0f;
        const float value = exists ? float(v[place.v + t * params.v_strides[1] + row]) : 0.0f;
        const float rate =
            load_gate(beta, beta_is_float32, place.beta + t * params.beta_strides[1]);
        const float change = rate * (value - found);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < Share::kPacks; ++i) {
          s[i] += change * x[i];
        }
        if (!keeps_states) {
          share.load_key(q + place.q + t * params.q_strides[1], params, params.q_scale, x);
          out = share.sum(share.dot(s, x));
          if (has_skip) {
            out += skip[place.skip + t * params.skip_strides[1]] * value;
          }
          if (is_gated && exists) {
            const float open = float(gate[place.gate + t * params.gate_strides[1] + row]);
            out *= open * sigmoid(open).value;
          }
        }
      }
      if (keeps_states) {
        const int chunk = (t + 1) / params.chunk;
        if (exists && chunk * params.chunk == t + 1) {
          const long of_chunk =
              long(chunk - 1) * params.batch * params.value_heads * params.value_dim;
          share.store(states + (of_chunk + place.state + row) * params.key_dim, s);
        }
        continue;
      }
      if (exists && share.lane == 0) {
        const long token = long(batch) * params.length + t;
        y[(token * params.value_heads + head) * params.value_dim + row] = T(out);
      }
      if (returns_states && t == next) {
        for (int i = 0; i < returned.count; ++i) {
          if (exists && returned.at(i) == t) {
            share.store(states + (returned_row(params, batch, i, head) + row) * params.key_dim, s);
          }
        }
        next = returned.after(t);
      }
    }
    if (!keeps_states && exists) {
      share.store(state_out + own_row, s);
    }
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T, tile, lanes) \
  MLX_ANVIL_KERNEL("gated_delta_forward_" #dtype "_k" #tile, gated_delta_forward<T, tile, lanes>)

#define INSTANTIATE_TILE(tile, lanes, backward_lanes, backward_simdgroups) \
  INSTANTIATE(float32, float, tile, lanes)                                 \
  INSTANTIATE(float16, half, tile, lanes)                                  \
  INSTANTIATE(bfloat16, bfloat, tile, lanes)

MLX_ANVIL_DELTA_TILES(INSTANTIATE_TILE)
