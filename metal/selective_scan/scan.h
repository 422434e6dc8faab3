// The recurrence of selective_scan. Eight lanes share a channel; each has two of its states.
#pragma once

#include <metal_stdlib>

#include "metal/common/activation.h"
#include "metal/common/over_lanes.h"
#include "metal/common/unroll.h"
#include "metal/selective_scan/params.h"

constant bool has_d [[function_constant(0)]];
constant bool has_gate [[function_constant(1)]];
constant bool has_state [[function_constant(2)]];
constant bool has_lengths [[function_constant(3)]];
constant bool has_softplus [[function_constant(4)]];

enum { kScanLanes = 8, kOwnStates = 2, kMostStates = kScanLanes * kOwnStates };
enum { kChunkSteps = 16 };  // between kept states

// Returns the sum over the lanes of a channel.
METAL_FUNC float over_states(float x) {
  return over_lanes<false, 1, kScanLanes>(x);
}

// What a step reads of one channel.
struct ScanStep {
  float x;
  float given;  // dt
  float step;
};

// Where a lane is.
struct ScanPlace {
  int batch;
  int channel;  // clamped
  bool exists;
  int lane;    // of the channel
  int length;  // steps of the batch that count

  METAL_FUNC int state(int i) const thread { return lane + i * kScanLanes; }

  template <typename T>
  METAL_FUNC const device T* row(const device T* data, ScanRowParams strides, int t) const thread {
    return data + batch * strides.batch + t * strides.step;
  }

  // Index in [batch, channels, states].
  METAL_FUNC long state_at(constant SelectiveScanParams& params, int i) const thread {
    return (long(batch) * params.channels + channel) * params.states + state(i);
  }

  // Index in [batch, chunks, channels, states].
  METAL_FUNC long kept_at(constant SelectiveScanParams& params, int chunk, int i) const thread {
    const long row = (long(batch) * params.chunks + chunk) * params.channels + channel;
    return row * params.states + state(i);
  }
};

METAL_FUNC ScanPlace scan_place(constant SelectiveScanParams& params,
                                const device int* lengths,
                                int group,
                                int batch,
                                int thread_index,
                                int threads) {
  const int channel = (group * threads + thread_index) / kScanLanes;
  const int length =
      has_lengths ? metal::clamp(lengths[batch], 0, params.steps) : int(params.steps);
  return {batch, metal::min(channel, int(params.channels) - 1), channel < params.channels,
          thread_index % kScanLanes, length};
}

// Steps past the last one that counts leave the state alone.
template <typename T>
METAL_FUNC ScanStep read_step(const device T* x,
                              const device T* dt,
                              ScanPlace place,
                              int t,
                              constant SelectiveScanParams& params) {
  const bool counts = t < place.length;
  const int near = counts ? t : 0;
  ScanStep result;
  result.x = counts ? static_cast<float>(place.row(x, params.x, near)[place.channel]) : 0.0f;
  result.given = static_cast<float>(place.row(dt, params.dt, near)[place.channel]);
  result.step = has_softplus ? softplus(result.given) : result.given;
  result.step = counts ? result.step : 0.0f;
  return result;
}

// Element n of a row of B or C, or 0.
template <typename T>
METAL_FUNC float read_state(const device T* data,
                            ScanRowParams strides,
                            ScanPlace place,
                            int t,
                            int i,
                            constant SelectiveScanParams& params) {
  const bool counts = t < place.length && place.state(i) < params.states;
  const device T* const row = place.row(data, strides, counts ? t : 0);
  return counts ? static_cast<float>(row[place.state(i)]) : 0.0f;
}

// e^x
METAL_FUNC float decay_of(float step, float rate) {
  return metal::precise::exp(step * rate);
}
