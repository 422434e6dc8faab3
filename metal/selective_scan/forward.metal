// selective_scan: for each channel and state n, over the steps t,
//   h[n] = exp(d A[n]) h[n] + d x B[t, n];  y = (sum of h[n] C[t, n] + D x) silu(z)
// with d = dt or softplus(dt).
//
// Kernels: selective_scan_forward_<dtype>, and selective_scan_keep_<dtype>, which stores the states
// before each chunk of steps instead of y, for the backward.
// Grid: (groups of channels, batch). Threadgroup: 256, eight lanes a channel.
// Bindings: x, dt, A, B, C, D, z, state, lengths, y, last state, params; keep: x, dt, A, B, state,
// lengths, kept states, params.
// Function constants: scan.h. Alignment: none.
#include "metal/common/kernel.h"
#include "metal/selective_scan/scan.h"

enum { kForwardThreads = 256 };
enum { kStepsAtOnce = 4 };  // whose loads are in flight together

// The states of a lane.
struct LaneStates {
  float h[kOwnStates];
  float rate[kOwnStates];

  METAL_FUNC void begin(const device float* a,
                        const device float* state,
                        ScanPlace place,
                        constant SelectiveScanParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwnStates; ++i) {
      const bool exists = place.state(i) < params.states;
      rate[i] = exists ? a[place.channel * params.states + place.state(i)] : 0.0f;
      h[i] = exists && has_state ? state[place.state_at(params, i)] : 0.0f;
    }
  }

  METAL_FUNC void advance(ScanStep now, const thread float (&b)[kOwnStates]) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwnStates; ++i) {
      h[i] = metal::fma(decay_of(now.step, rate[i]), h[i], now.step * now.x * b[i]);
    }
  }
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kForwardThreads)]] void selective_scan_forward(
    const device T* x [[buffer(0)]],
    const device T* dt [[buffer(1)]],
    const device float* a [[buffer(2)]],
    const device T* b [[buffer(3)]],
    const device T* c [[buffer(4)]],
    const device float* d [[buffer(5)]],
    const device T* z [[buffer(6)]],
    const device float* state [[buffer(7)]],
    const device int* lengths [[buffer(8)]],
    device T* y [[buffer(9)]],
    device float* last_state [[buffer(10)]],
    constant SelectiveScanParams& params [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const ScanPlace place =
      scan_place(params, lengths, group.x, group.y, thread_index, kForwardThreads);
  LaneStates states;
  states.begin(a, state, place, params);
  const float own_d = has_d ? d[place.channel] : 0.0f;
  for (int first = 0; first < params.steps; first += kStepsAtOnce) {
    ScanStep steps[kStepsAtOnce];
    float of_b[kStepsAtOnce][kOwnStates], of_c[kStepsAtOnce][kOwnStates], gates[kStepsAtOnce];
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kStepsAtOnce; ++s) {
      const int t = first + s;
      steps[s] = read_step(x, dt, place, t, params);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kOwnStates; ++i) {
        of_b[s][i] = read_state(b, params.b, place, t, i, params);
        of_c[s][i] = read_state(c, params.c, place, t, i, params);
      }
      gates[s] = 1.0f;
      if (has_gate) {
        const int near = metal::min(t, int(params.steps) - 1);
        gates[s] = static_cast<float>(place.row(z, params.z, near)[place.channel]);
        gates[s] *= sigmoid(gates[s]).value;
      }
    }
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kStepsAtOnce; ++s) {
      const int t = first + s;
      states.advance(steps[s], of_b[s]);
      float sum = 0.0f;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kOwnStates; ++i) {
        sum = metal::fma(states.h[i], of_c[s][i], sum);
      }
      sum = metal::fma(own_d, steps[s].x, over_states(sum));
      if (place.exists && place.lane == 0 && t < params.steps) {
        const long row = long(place.batch) * params.steps + t;
        y[row * params.channels + place.channel] =
            static_cast<T>(t < place.length ? sum * gates[s] : 0.0f);
      }
    }
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kOwnStates; ++i) {
    if (place.exists && place.state(i) < params.states) {
      last_state[place.state_at(params, i)] = states.h[i];
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kForwardThreads)]] void selective_scan_keep(
    const device T* x [[buffer(0)]],
    const device T* dt [[buffer(1)]],
    const device float* a [[buffer(2)]],
    const device T* b [[buffer(3)]],
    const device float* state [[buffer(4)]],
    const device int* lengths [[buffer(5)]],
    device float* kept [[buffer(6)]],
    constant SelectiveScanParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const ScanPlace place =
      scan_place(params, lengths, group.x, group.y, thread_index, kForwardThreads);
  LaneStates states;
  states.begin(a, state, place, params);
  for (int chunk = 0; chunk < params.chunks; ++chunk) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwnStates; ++i) {
      if (place.exists && place.state(i) < params.states) {
        kept[place.kept_at(params, chunk, i)] = states.h[i];
      }
    }
    for (int first = chunk * kChunkSteps; first < (chunk + 1) * kChunkSteps;
         first += kStepsAtOnce) {
      ScanStep steps[kStepsAtOnce];
      float of_b[kStepsAtOnce][kOwnStates];
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kStepsAtOnce; ++s) {
        steps[s] = read_step(x, dt, place, first + s, params);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kOwnStates; ++i) {
          of_b[s][i] = read_state(b, params.b, place, first + s, i, params);
        }
      }
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kStepsAtOnce; ++s) {
        states.advance(steps[s], of_b[s]);
      }
    }
  }
}

// ---- kernels

#define INSTANTIATE_SCAN(dtype, type)                                              \
  MLX_ANVIL_KERNEL("selective_scan_forward_" #dtype, selective_scan_forward<type>) \
  MLX_ANVIL_KERNEL("selective_scan_keep_" #dtype, selective_scan_keep<type>)

INSTANTIATE_SCAN(float32, float)
INSTANTIATE_SCAN(float16, half)
INSTANTIATE_SCAN(bfloat16, bfloat)
