// What gated_delta's CPU kernels share: loads of a step's operands, and steps of a few rows. For
// kernel files only (see common/simd/simd.h).
#pragma once

#include <type_traits>

#include "common/simd/arena.h"
#include "common/simd/math.h"
#include "gated_delta/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// g and beta have one of two dtypes.
template <class T>
inline f32v load_gates(const void* from, bool is_float32, int64_t at) {
  return is_float32 ? load_lanes(static_cast<const float*>(from) + at)
                    : load_lanes(static_cast<const T*>(from) + at);
}
template <class T>
inline float load_gate(const void* from, bool is_float32, int64_t at) {
  return is_float32 ? static_cast<const float*>(from)[at]
                    : load_columns(static_cast<const T*>(from) + at, 1, 0, 1)[0];
}

// `use(kPerChannel, kCorrects)` with both as constants. A rule that does not correct has a decay
// per head.
template <class Use>
inline void with_rule(const DeltaHead& head, Use use) {
  if (!head.corrects) {
    use(std::false_type{}, std::false_type{});
  } else if (head.is_per_channel) {
    use(std::true_type{}, std::true_type{});
  } else {
    use(std::false_type{}, std::true_type{});
  }
}

// (y + skip v) silu(gate), for some of the `count` rows from `row` on: those from row + at.
template <class T>
inline f32v finished(
    const DeltaHead& head, int64_t t, int64_t row, int64_t at, int64_t count, f32v y, f32v v) {
  if (head.skip) {
    y += v * head.skip[t * head.skip_step];
  }
  if (head.gate) {
    const T* const gate = static_cast<const T*>(head.gate) + t * head.gate_step + row;
    const f32v open = load_columns(gate, 1, at, count);
    y = times_sigmoid<kAccuracyOf<T>>(y * open, open);
  }
  return y;
}

// The operands of a step in float32, and how the state decays before it: by `decay`, or per channel
// by the numbers of `g`.
struct Step {
  const float *q, *k;
  const float *g, *gk;  // per channel: g, and its product with k. Else gk is k.
  float decay, beta;
};

// Memory of a step.
struct alignas(64) StepBuffer {
  float q[kMaxDeltaKeyDim], k[kMaxDeltaKeyDim], g[kMaxDeltaKeyDim], gk[kMaxDeltaKeyDim];
};

// Widens a row, and normalises it if `eps` is given. Returns the factor.
template <class T>
inline float load_row(const T* from, int64_t columns, const float* eps, float scale, float* to) {
  f32v squares = {};
  for (int64_t d = 0; d < columns; d += kLanes) {
    const f32v x = load_lanes(from + d);
    squares += x * x;
    store_lanes(to + d, x);
  }
  if (!eps) {
    return 1.0f;
  }
  const float factor = scale / __builtin_sqrtf(lane_sum(squares) + *eps);
  for (int64_t d = 0; d < columns; d += kLanes) {
    store_lanes(to + d, load_lanes(to + d) * factor);
  }
  return factor;
}

template <class T>
inline float load_query(const DeltaHead& head, int64_t t, float* to) {
  return load_row(static_cast<const T*>(head.q) + t * head.q_step, head.key_dim,
                  head.normalizes ? &head.eps : nullptr, head.q_scale, to);
}
template <class T>
inline float load_key(const DeltaHead& head, int64_t t, float* to) {
  return load_row(static_cast<const T*>(head.k) + t * head.k_step, head.key_dim,
                  head.normalizes ? &head.eps : nullptr, 1.0f, to);
}

// Completes a step whose q and k are loaded. `g` and `gk` are memory for factors per channel.
template <class T>
inline Step with_gates(
    const DeltaHead& head, int64_t t, const float* q, const float* k, float* g, float* gk) {
  Step step = {q, k, g, k, 1.0f, load_gate<T>(head.beta, head.beta_is_float32, t * head.beta_step)};
  if (!head.is_per_channel) {
    step.decay = load_gate<T>(head.g, head.g_is_float32, t * head.g_step);
    return step;
  }
  for (int64_t d = 0; d < head.key_dim; d += kLanes) {
    const f32v factor = load_gates<T>(head.g, head.g_is_float32, t * head.g_step + d);
    store_lanes(g + d, factor);
    store_lanes(gk + d, factor * load_lanes(k + d));
  }
  step.gk = gk;
  return step;
}

template <class T>
inline Step load_step(const DeltaHead& head, int64_t t, StepBuffer& memory) {
  load_query<T>(head, t, memory.q);
  load_key<T>(head, t, memory.k);
  return with_gates<T>(head, t, memory.q, memory.k, memory.g, memory.gk);
}

template <bool kPerChannel>
inline f32v decay_at(const Step& step, int64_t d) {
  if constexpr (kPerChannel) {
    return load_lanes(step.g + d);
  } else {
    return splat(step.decay);
  }
}

// ---- sums of several vectors --------------------------------------------------------------------

typedef float f32x4 __attribute__((vector_size(16)));

// Adds the quarters of a vector up, pairwise.
inline f32x4 fold(f32v x) {
  f32x4 parts[kLanes / 4];
  std::memcpy(parts, &x, sizeof(x));
  for (int width = kLanes / 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      parts[i] += parts[i + width];
    }
  }
  return parts[0];
}

// to[r] = the sum of x[r]
inline void sums_of(const f32v (&x)[4], float (&to)[4]) {
  const f32x4 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
  const f32x4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) +  // two sums of a and of b
                   __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const f32x4 cd =
      __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const f32x4 sums =
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  std::memcpy(to, &sums, sizeof(sums));
}
inline void sums_of(const f32v (&x)[1], float (&to)[1]) {
  to[0] = lane_sum(x[0]);
}

// ---- steps of a few rows ------------------------------------------------------------------------

// The results of kRows rows.
template <int kRows>
struct RowResults {
  float error[kRows];  // v - S' k, or v
  float y[kRows];
};

// to = g from + beta (v - g from k) k^T, and y = to q; v alone is written unless kCorrects. Rows
// are key_dim apart. `to` may be `from`.
template <int kRows, bool kPerChannel, bool kCorrects, bool kWantsY>
inline RowResults<kRows> step_rows(
    const float* from, float* to, int64_t key_dim, const Step& step, const float* v) {
  RowResults<kRows> results;
  float found[kRows] = {};
  if constexpr (kCorrects) {
    f32v sums[kRows] = {};
    for (int64_t d = 0; d < key_dim; d += kLanes) {
      const f32v gk = load_lanes(step.gk + d);
      for (int r = 0; r < kRows; ++r) {
        sums[r] += load_lanes(from + r * key_dim + d) * gk;
      }
    }
    sums_of(sums, found);
  }
  float change[kRows];
  f32v outputs[kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    results.error[r] = !kCorrects ? v[r] : v[r] - (kPerChannel ? found[r] : step.decay * found[r]);
    change[r] = step.beta * results.error[r];
  }
  for (int64_t d = 0; d < key_dim; d += kLanes) {
    const f32v k = load_lanes(step.k + d), decay = decay_at<kPerChannel>(step, d);
    f32v q = {};
    if constexpr (kWantsY) {
      q = load_lanes(step.q + d);
    }
    for (int r = 0; r < kRows; ++r) {
      const f32v s = load_lanes(from + r * key_dim + d) * decay + k * change[r];
      store_lanes(to + r * key_dim + d, s);
      outputs[r] += s * q;
    }
  }
  if constexpr (kWantsY) {
    sums_of(outputs, results.y);
  }
  return results;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
