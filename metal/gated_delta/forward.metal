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
// but the last, in `states`, for the backward; 16: there is one step, and the grid covers the
// batch; 17: all rows of the grid exist. Rows are dense; alignment: constant 0.
//
//   sum() is over the lanes of a row
//   s = the lane's share of a row of the state
//   for each step:
//     load q, k, g and beta; normalising q and k multiplies sums, not their numbers
//     s *= g; error = v - sum(s k), or v; s += beta error k; y = sum(s q), with skip and gate
//     store s if the state of this step is returned
//   store s
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/gated_delta/state.h"

constant bool takes_one_step [[function_constant(16)]];  // of one batch row: no loops
constant bool rows_are_full [[function_constant(17)]];   // value_dim is a multiple of a block's

// What scales a row of q or k to the length `scale`, if it is normalised. All rows of a simdgroup
// share it: in a single step each sums up a part of it, without a loop where loads would wait.
template <typename T, typename Share>
METAL_FUNC float key_factor(thread const Share& share,
                            const device T* own,
                            thread float4 (&x)[Share::kPacks],
                            int row_in_simdgroup,
                            constant GatedDeltaParams& params,
                            float scale) {
  if (!normalizes) {
    return 1.0f;
  }
  float total = 0.0f;
  if (takes_one_step) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < Share::kPacks; i += Share::kRows) {
      const int pack = i + row_in_simdgroup;
      if (pack < Share::kPacks && share.has(pack)) {
        const float4 part = Four<T>::load(own + Share::kApart * pack);
        total += metal::dot(part, part);
      }
    }
    total = metal::simd_sum(total);
  } else {
    total = share.sum(share.dot(x, x));
  }
  return scale * metal::precise::rsqrt(total + params.eps);
}

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
  share.lane = int(thread_lane % kLanes);
  share.columns = params.key_dim;
  const int row_in_simdgroup = int(thread_lane / kLanes);
  const uint row = (group.x * kDeltaSimdgroups + simdgroup) * Share::kRows + row_in_simdgroup;
  const bool exists = rows_are_full || row < uint(params.value_dim);
  const uint head = group.y;
  // head / group, exact for fewer than a million heads: integers take twice as many instructions.
  const uint key_head = uint((float(head) + 0.5f) * (1.0f / float(params.group)));
  const uint column = uint(share.column(0));
  // What the loops use is read before any branch, so that it stays in uniform registers.
  const ArrayStrides q_strides = ArrayStrides::of(params.q_strides);
  const ArrayStrides k_strides = ArrayStrides::of(params.k_strides);
  const ArrayStrides v_strides = ArrayStrides::of(params.v_strides);
  const ArrayStrides g_strides = ArrayStrides::of(params.g_strides);
  const ArrayStrides beta_strides = ArrayStrides::of(params.beta_strides);
  const ArrayStrides skip_strides = ArrayStrides::of(params.skip_strides);
  const ArrayStrides gate_strides = ArrayStrides::of(params.gate_strides);
  const int all_steps = takes_one_step ? 1 : params.steps;
  const uint batches = uint(params.batch), value_heads = uint(params.value_heads);
  const uint y_step = value_heads * uint(params.value_dim);
  const uint state_size = uint(params.value_dim) * uint(params.key_dim);
  const ulong y_batch = ulong(y_step) * (takes_one_step ? 1u : uint(params.length));
  const uint own_number = row * uint(params.key_dim) + column;  // of a state
  uint batch = group.z;
  do {
    const int steps = steps_of(params, lengths, int(batch));
    const Positions returned = positions_of(params, positions, int(batch));
    int next = returned.after(-1);
    // Of this lane in a step.
    const device T* own_q = q + (q_strides.place(batch, key_head) + column);
    const device T* own_k = k + (k_strides.place(batch, key_head) + column);
    const device T* own_v = v + (v_strides.place(batch, head) + row);
    long g_at = g_strides.place(batch, head) + (g_is_per_channel ? column : 0);
    long beta_at = beta_strides.place(batch, head);
    const ulong own_state = ulong(batch * value_heads + head) * state_size + own_number;
    device T* own_y = y + (batch * y_batch + (head * uint(params.value_dim) + row));
    float4 s[Share::kPacks];
    share.load(state + own_state, has_state && exists, s);
    for (int t = 0; t < all_steps; ++t) {
      float out = 0.0f;
      if (!has_lengths || t < steps) {
        float4 x[Share::kPacks], decay[Share::kPacks];
        share.load_decay(g, g_at, decay);
        share.load(own_k, true, x);
        const float k_factor = key_factor(share, own_k, x, row_in_simdgroup, params, 1.0f);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < Share::kPacks; ++i) {
          s[i] *= decay[i];
        }
        const float found = corrects ? k_factor * share.sum(share.dot(s, x)) : 0.0f;
        const float value = exists ? float(*own_v) : 0.0f;
        const float rate = k_factor * load_gate(beta, beta_is_float32, beta_at);
        const float change = rate * (value - found);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < Share::kPacks; ++i) {
          s[i] += change * x[i];
        }
        if (!keeps_states) {
          share.load(own_q, true, x);
          out = key_factor(share, own_q, x, row_in_simdgroup, params, params.q_scale) *
                share.sum(share.dot(s, x));
          if (has_skip) {
            out += skip[skip_strides.at(batch, t, head)] * value;
          }
          if (is_gated && exists) {
            const float open = float(gate[gate_strides.at(batch, t, head) + row]);
            out *= open * sigmoid(open).value;
          }
        }
      }
      own_q += q_strides.step;
      own_k += k_strides.step;
      own_v += v_strides.step;
      g_at += g_strides.step;
      beta_at += beta_strides.step;
      if (keeps_states) {
        const int chunk = (t + 1) / params.chunk;
        if (exists && chunk * params.chunk == t + 1) {
          const long of_chunk =
              long(chunk - 1) * params.batch * params.value_heads * params.value_dim;
          share.store(states + of_chunk * params.key_dim + own_state, s);
        }
        continue;
      }
      if (exists && share.lane == 0) {
        *own_y = T(out);
      }
      own_y += y_step;
      if (returns_states && t == next) {
        for (int i = 0; i < returned.count; ++i) {
          if (exists && returned.at(i) == t) {
            const long to = returned_row(params, int(batch), i, int(head)) + row;
            share.store(states + to * params.key_dim + column, s);
          }
        }
        next = returned.after(t);
      }
    }
    if (!keeps_states && exists) {
      share.store(state_out + own_state, s);
    }
    batch += groups.z;
  } while (!takes_one_step && batch < batches);
}

// ---- kernels

#define INSTANTIATE(dtype, T, tile, lanes) \
  MLX_ANVIL_KERNEL("gated_delta_forward_" #dtype "_k" #tile, gated_delta_forward<T, tile, lanes>)

#define INSTANTIATE_TILE(tile, lanes, backward_lanes, backward_simdgroups) \
  INSTANTIATE(float32, float, tile, lanes)                                 \
  INSTANTIATE(float16, half, tile, lanes)                                  \
  INSTANTIATE(bfloat16, bfloat, tile, lanes)

MLX_ANVIL_DELTA_TILES(INSTANTIATE_TILE)
