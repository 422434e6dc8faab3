// A block of channels, and its recurrence. A lane has one channel. For kernel files only (see
// common/simd/simd.h).
#pragma once

#include "common/simd/arena.h"
#include "common/simd/math.h"
#include "common/simd/panels.h"
#include "selective_scan/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Vectors of a block. Rows of 16 bits then fill a cache line with AVX-512.
inline constexpr int kVectors = 2;
inline constexpr int64_t kBlockChannels = kVectors * kLanes;

// One number of each channel.
struct Channels {
  f32v of[kVectors];
};

template <class Function>
inline Channels per_vector(Function f) {
  Channels result;
  for (int v = 0; v < kVectors; ++v) {
    result.of[v] = f(v);
  }
  return result;
}

// Channels past the last one are 0, and are not stored.
template <class T>
inline Channels load_channels(const T* row, int64_t first, int64_t channels) {
  return per_vector([&](int v) {
    const int64_t at = first + v * kLanes;
    return at < channels ? load_columns(row, 1, at, channels) : f32v{};
  });
}
template <class T>
inline void store_channels(T* row, int64_t first, int64_t channels, const Channels& x) {
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * kLanes < channels) {
      store_columns(row, first + v * kLanes, channels, x.of[v]);
    }
  }
}

inline Channels load_block_of(const float* from) {
  return per_vector([&](int v) { return load_lanes(from + v * kLanes); });
}
inline void store_block_of(float* to, const Channels& x) {
  for (int v = 0; v < kVectors; ++v) {
    store_lanes(to + v * kLanes, x.of[v]);
  }
}

// Copies [channels, states] to [states, kBlockChannels] for a block, and back.
inline void to_lanes(
    const float* from, int64_t first, int64_t channels, int64_t states, float* to) {
  for (int64_t lane = 0; lane < kBlockChannels; ++lane) {
    const bool exists = from && first + lane < channels;
    for (int64_t n = 0; n < states; ++n) {
      to[n * kBlockChannels + lane] = exists ? from[(first + lane) * states + n] : 0.0f;
    }
  }
}
inline void from_lanes(
    const float* from, int64_t first, int64_t channels, int64_t states, float* to) {
  for (int64_t lane = 0; lane < kBlockChannels && first + lane < channels; ++lane) {
    for (int64_t n = 0; n < states; ++n) {
      to[(first + lane) * states + n] = from[n * kBlockChannels + lane];
    }
  }
}

// e^(step * a), where `a` is scaled by rate_factor().
inline f32v decay_of(f32v step, f32v a) {
#if defined(__AVX512F__)
  return exp2_bounded<Accuracy::kFloat32>(step * a);  // here it saturates to infinity
#else
  return exp(step * a);
#endif
}
inline constexpr float rate_factor() {
#if defined(__AVX512F__)
  return 1.44269504088896341f;
#else
  return 1.0f;
#endif
}

template <class T>
inline const T* row_of(const ScanRows& rows, int64_t batch, int64_t step) {
  return static_cast<const T*>(rows.data) + batch * rows.batch_stride + step * rows.step_stride;
}

// The numbers of one step of a block.
template <class T>
struct ScanStep {
  Channels x, given, step;  // `given` is dt

  void read(const ScanArgs& args, int64_t batch, int64_t t, int64_t first) {
    x = load_channels(row_of<T>(args.x, batch, t), first, args.sizes.channels);
    given = load_channels(row_of<T>(args.dt, batch, t), first, args.sizes.channels);
    step = args.softplus ? per_vector([&](int v) { return softplus(given.of[v]); }) : given;
  }
};

// Rows are far apart, so that no hardware prefetcher follows a block from step to step. Prefetches
// the block's part of the row of a later step, into L2: rows whose length is a power of two share
// few sets of L1.
inline constexpr int64_t kStepsAhead = 8;
template <class T>
inline void prefetch_channels(const ScanRows& rows, int64_t batch, int64_t t, int64_t first) {
  constexpr int kToSecondLevel = 2;
  if (rows.data) {
    const char* const from = reinterpret_cast<const char*>(row_of<T>(rows, batch, t) + first);
    for (int64_t byte = 0; byte < kBlockChannels * static_cast<int64_t>(sizeof(T)); byte += 64) {
      __builtin_prefetch(from + byte, 0, kToSecondLevel);
    }
  }
}

template <class T>
inline void prefetch_step(const ScanArgs& args, int64_t batch, int64_t t, int64_t first) {
  for (const ScanRows* rows : {&args.x, &args.dt, &args.z}) {
    prefetch_channels<T>(*rows, batch, t, first);
  }
}

// B or C of one step, as float32, padded to whole vectors.
template <class T>
inline void read_states(const ScanRows& rows, int64_t batch, int64_t t, int64_t states, float* to) {
  const T* const row = row_of<T>(rows, batch, t);
  for (int64_t n = 0; n < states; n += kLanes) {
    store_lanes(to + n, load_columns(row, 1, n, states));
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
