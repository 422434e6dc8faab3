// Gradients of selective_scan. With g = d(loss) / d(h[t]), from the last step on:
//   d_s = d_y silu(z);  d_z = d_y s silu'(z);  d_D = sum of d_s x
//   g = g + d_s C[t];  d_C[t] = sum of d_s h[t];  d_B[t] = sum of g d x
//   d_d = sum of g B[t] x + sum of g exp(d A) h[t - 1] A;  d_x = d_s D + sum of g B[t] d
//   d_A = sum of g exp(d A) h[t - 1] d;  g = g exp(d A)
//
// A chunk of steps runs forward from its kept states, which its lanes then have in registers, and
// back.
//
// Kernels: selective_scan_backward_<dtype>. Grid: (groups of 32 channels, batch). Threadgroup: 256,
// eight lanes a channel.
// Bindings: x, dt, A, B, C, D, z, lengths, kept states, d_y, d_last_state, d_x, d_dt, d_z, d_state,
// parts of d_A [batch, channels, states], of d_D [batch, channels], of d_B and of d_C [groups,
// batch, steps, states], params.
// Kernels: selective_scan_sum_parts_<dtype>, which adds up parts in a fixed order. Grid: blocks of
// 32 sums. Threadgroup: 1024. Bindings: parts, sums, params.
// Function constants: scan.h. Alignment: none.
#include "metal/common/kernel.h"
#include "metal/common/sum_parts.h"
#include "metal/selective_scan/scan.h"

enum { kBackwardThreads = 256, kSimdgroups = kBackwardThreads / 32 };

// The terms of a chunk, summed over the channels of a simdgroup.
struct ChunkSums {
  float b[kSimdgroups][kChunkSteps][kMostStates];
  float c[kSimdgroups][kChunkSteps][kMostStates];
};

// Returns the sum over the channels of a simdgroup.
METAL_FUNC float over_channels(float x) {
  return over_lanes<false, kScanLanes>(x);
}

// The sum of all SIMD groups of one of the two arrays.
METAL_FUNC float over_simdgroups(
    const threadgroup float (&terms)[kSimdgroups][kChunkSteps][kMostStates], int step, int n) {
  float sum = 0.0f;
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kSimdgroups; ++s) {
    sum += terms[s][step][n];
  }
  return sum;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kBackwardThreads)]] void selective_scan_backward(
    const device T* x [[buffer(0)]],
    const device T* dt [[buffer(1)]],
    const device float* a [[buffer(2)]],
    const device T* b [[buffer(3)]],
    const device T* c [[buffer(4)]],
    const device float* d [[buffer(5)]],
    const device T* z [[buffer(6)]],
    const device int* lengths [[buffer(7)]],
    const device float* kept [[buffer(8)]],
    const device T* d_y [[buffer(9)]],
    const device float* d_last_state [[buffer(10)]],
    device T* d_x [[buffer(11)]],
    device T* d_dt [[buffer(12)]],
    device T* d_z [[buffer(13)]],
    device float* d_state [[buffer(14)]],
    device float* parts_of_a [[buffer(15)]],
    device float* parts_of_d [[buffer(16)]],
    device float* parts_of_b [[buffer(17)]],
    device float* parts_of_c [[buffer(18)]],
    constant SelectiveScanParams& params [[buffer(19)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ChunkSums sums;
  const ScanPlace place =
      scan_place(params, lengths, group.x, group.y, thread_index, kBackwardThreads);
  const float own_d = has_d ? d[place.channel] : 0.0f;
  float rate[kOwnStates], g[kOwnStates], d_rate[kOwnStates], d_own_d = 0.0f;
  bool holds[kOwnStates];
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kOwnStates; ++i) {
    holds[i] = place.exists && place.state(i) < params.states;
    rate[i] = holds[i] ? a[place.channel * params.states + place.state(i)] : 0.0f;
    g[i] = holds[i] ? d_last_state[place.state_at(params, i)] : 0.0f;
    d_rate[i] = 0.0f;
  }

  for (int chunk = params.chunks - 1; chunk >= 0; --chunk) {
    const int first = chunk * kChunkSteps;
    float before[kChunkSteps + 1][kOwnStates], sum[kChunkSteps];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwnStates; ++i) {
      before[0][i] = holds[i] ? kept[place.kept_at(params, chunk, i)] : 0.0f;
    }
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kChunkSteps; ++s) {
      const ScanStep now = read_step(x, dt, place, first + s, params);
      sum[s] = 0.0f;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kOwnStates; ++i) {
        const float of_b = read_state(b, params.b, place, first + s, i, params);
        before[s + 1][i] =
            metal::fma(decay_of(now.step, rate[i]), before[s][i], now.step * now.x * of_b);
        if (has_gate) {
          const float of_c = read_state(c, params.c, place, first + s, i, params);
          sum[s] = metal::fma(before[s + 1][i], of_c, sum[s]);
        }
      }
      if (has_gate) {
        sum[s] = metal::fma(own_d, now.x, over_states(sum[s]));
      }
    }

    float d_rate_of_chunk[kOwnStates];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwnStates; ++i) {
      d_rate_of_chunk[i] = 0.0f;
    }
    MLX_ANVIL_UNROLL
    for (int back = 0; back < kChunkSteps; ++back) {
      const int s = kChunkSteps - 1 - back, t = first + s;
      const bool counts = place.exists && t < place.length;
      const ScanStep now = read_step(x, dt, place, t, params);
      const int near = counts ? t : 0;
      float d_s =
          counts ? static_cast<float>(place.row(d_y, params.d_y, near)[place.channel]) : 0.0f;
      float own_d_z = 0.0f;
      if (has_gate) {
        const float gate = static_cast<float>(place.row(z, params.z, near)[place.channel]);
        const Sigmoid open = sigmoid(gate);
        own_d_z = d_s * sum[s] * silu_derivative(gate, open);
        d_s = counts ? d_s * gate * open.value : 0.0f;
      }
      float d_input = 0.0f, d_step = 0.0f;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kOwnStates; ++i) {
        const float of_b = read_state(b, params.b, place, t, i, params);
        const float of_c = read_state(c, params.c, place, t, i, params);
        g[i] = metal::fma(d_s, of_c, g[i]);
        const float own_b = over_channels(g[i] * (now.step * now.x));
        const float own_c = over_channels(d_s * before[s + 1][i]);
        if (lane < uint(kScanLanes)) {
          sums.b[simdgroup][s][place.state(i)] = own_b;
          sums.c[simdgroup][s][place.state(i)] = own_c;
        }
        d_input = metal::fma(g[i], of_b, d_input);
        g[i] *= decay_of(now.step, rate[i]);
        const float of_decay = g[i] * before[s][i];
        d_step = metal::fma(of_decay, rate[i], d_step);
        d_rate_of_chunk[i] = metal::fma(of_decay, now.step, d_rate_of_chunk[i]);
      }
      d_input = over_states(d_input);
      d_step = metal::fma(d_input, now.x, over_states(d_step));
      d_own_d = metal::fma(d_s, now.x, d_own_d);
      if (place.exists && place.lane == 0 && t < params.steps) {
        const long at = (long(place.batch) * params.steps + t) * params.channels + place.channel;
        const float slope = has_softplus ? sigmoid(now.given).value : 1.0f;
        d_x[at] = static_cast<T>(metal::fma(d_input, now.step, d_s * own_d));
        d_dt[at] = static_cast<T>(counts ? d_step * slope : 0.0f);
        if (has_gate) {
          d_z[at] = static_cast<T>(counts ? own_d_z : 0.0f);
        }
      }
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwnStates; ++i) {
      d_rate[i] += d_rate_of_chunk[i];
    }

    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int at = thread_index; at < kChunkSteps * kMostStates; at += kBackwardThreads) {
      const int s = at / kMostStates, n = at % kMostStates;
      if (first + s < params.steps && n < params.states) {
        const long row = (long(group.x) * params.batch + place.batch) * params.steps + first + s;
        parts_of_b[row * params.states + n] = over_simdgroups(sums.b, s, n);
        parts_of_c[row * params.states + n] = over_simdgroups(sums.c, s, n);
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  MLX_ANVIL_UNROLL
  for (int i = 0; i < kOwnStates; ++i) {
    if (holds[i]) {
      parts_of_a[place.state_at(params, i)] = d_rate[i];
      if (has_state) {
        d_state[place.state_at(params, i)] = g[i];
      }
    }
  }
  if (has_d && place.exists && place.lane == 0) {
    parts_of_d[long(place.batch) * params.channels + place.channel] = d_own_d;
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSumThreads)]] void selective_scan_sum_parts(
    const device float* parts [[buffer(0)]],
    device T* sums [[buffer(1)]],
    constant SelectiveScanSumParams& params [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shares[kSumThreads];
  sum_parts(parts, params.parts, params.count, sums, group.x, simdgroup, lane, shares);
}

// ---- kernels

#define INSTANTIATE_SCAN_BACKWARD(dtype, type)                                       \
  MLX_ANVIL_KERNEL("selective_scan_backward_" #dtype, selective_scan_backward<type>) \
  MLX_ANVIL_KERNEL("selective_scan_sum_parts_" #dtype, selective_scan_sum_parts<type>)

INSTANTIATE_SCAN_BACKWARD(float32, float)
INSTANTIATE_SCAN_BACKWARD(float16, half)
INSTANTIATE_SCAN_BACKWARD(bfloat16, bfloat)
