// Forward of selective_scan on the CPU: a block of channels keeps its states in L1 over all steps.
// For kernel files only (see common/simd/simd.h).
#pragma once

#include "selective_scan/simd/channels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline int64_t padded_states(const ScanSizes& sizes) {
  return round_up(sizes.states, kLanes);
}

inline int64_t scan_forward_scratch(const ScanSizes& sizes) {
  return (2 * sizes.states * kBlockChannels + 2 * padded_states(sizes)) *
         static_cast<int64_t>(sizeof(float));
}

template <class T>
void scan_forward(const ScanForwardArgs& args, int64_t batch, int64_t block, void* scratch) {
  const int64_t steps = args.sizes.steps, channels = args.sizes.channels;
  const int64_t states = args.sizes.states;
  const int64_t first = block * kBlockChannels, length = args.length_of(batch);
  const int64_t of_block = states * kBlockChannels;
  float* const rates = static_cast<float*>(scratch);
  float* const h = rates + of_block;
  float* const b = h + of_block;
  float* const c = b + padded_states(args.sizes);
  to_lanes(args.a, first, channels, states, rates);
  for (int64_t i = 0; i < of_block; ++i) {
    rates[i] *= rate_factor();
  }
  const int64_t state_at = batch * channels * states;
  to_lanes(args.state ? args.state + state_at : nullptr, first, channels, states, h);
  const Channels d = args.d ? load_channels(args.d, first, channels) : Channels{};

  T* out = static_cast<T*>(args.y) + batch * steps * channels;
  const ScanRows results = {args.y, steps * channels, channels};
  ScanStep<T> now;
  for (int64_t t = 0; t < length; ++t, out += channels) {
    if (t + kStepsAhead < length) {
      prefetch_step<T>(args, batch, t + kStepsAhead, first);
      prefetch_channels<T>(results, batch, t + kStepsAhead, first);
    }
    now.read(args, batch, t, first);
    read_states<T>(args.b, batch, t, states, b);
    read_states<T>(args.c, batch, t, states, c);
    const Channels input = per_vector([&](int v) { return now.step.of[v] * now.x.of[v]; });
    Channels y = per_vector([&](int v) { return d.of[v] * now.x.of[v]; });
    float* of_state = h;
    const float* rate = rates;
    for (int64_t n = 0; n < states; ++n) {
      for (int v = 0; v < kVectors; ++v, of_state += kLanes, rate += kLanes) {
        const f32v decay = decay_of(now.step.of[v], load_lanes(rate));
        const f32v state = decay * load_lanes(of_state) + input.of[v] * b[n];
        store_lanes(of_state, state);
        y.of[v] += state * c[n];
      }
    }
    if (args.z.data) {
      const Channels z = load_channels(row_of<T>(args.z, batch, t), first, channels);
      y = per_vector(
          [&](int v) { return times_sigmoid<kAccuracyOf<T>>(y.of[v] * z.of[v], z.of[v]); });
    }
    store_channels(out, first, channels, y);
  }
  for (int64_t t = length; t < steps; ++t, out += channels) {
    store_channels(out, first, channels, Channels{});
  }
  from_lanes(h, first, channels, states, args.last_state + state_at);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
