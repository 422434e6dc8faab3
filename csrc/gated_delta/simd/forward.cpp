// The gated delta rule and the sum without its correction, rows of the state apart from each other.
//
// few_steps: a row is read, changed and written as it lies in memory; vectors run along its
// columns. many_steps: a block of rows is transposed into L1 and stays there for all steps; vectors
// run along its rows, so that no step sums over the lanes of a vector.
#include "gated_delta/simd/steps.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// ---- few steps ----------------------------------------------------------------------------------

// Prefetchers of processors stop at the end of a page of 4 KB, so the lines of later rows are asked
// for.
inline constexpr int64_t kAheadNumbers = 4096 / sizeof(float);

// The y of each step goes to `y`, kLanes numbers apart.
template <class T, int kRows, bool kPerChannel, bool kCorrects>
void few_steps_of_rows(const DeltaForwardBlock& block, const Step* steps, int64_t row, float* y) {
  static constexpr float kZeros[kRows * kMaxDeltaKeyDim] = {};
  const int64_t key_dim = block.head.key_dim;
  float* const to = block.state_out + row * key_dim;
  const float* from = block.state_in ? block.state_in + row * key_dim : kZeros;
  const DeltaSaved* saved = block.saved;
  if (block.state_in) {
    for (int64_t line = 0; line < kRows * key_dim; line += 16) {
      __builtin_prefetch(from + kAheadNumbers + line, 0, 3);
    }
  }
  for (int64_t t = 0; t < block.steps; ++t, from = to) {
    float lanes[kLanes];
    const T* const v = static_cast<const T*>(block.head.v) + t * block.head.v_step + row;
    store_lanes(lanes, load_columns(v, 1, 0, kRows));
    const RowResults<kRows> results =
        step_rows<kRows, kPerChannel, kCorrects, true>(from, to, key_dim, steps[t], lanes);
    std::memcpy(y + t * kLanes, results.y, sizeof(results.y));
    for (; saved < block.saved + block.saved_count && saved->step == t; ++saved) {
      std::memcpy(saved->state + row * key_dim, to,
                  static_cast<size_t>(kRows * key_dim) * sizeof(float));
    }
  }
}

template <class T, bool kPerChannel, bool kCorrects>
void few_steps(const DeltaForwardBlock& block) {
  StepBuffer memory[kMostFewSteps];
  Step steps[kMostFewSteps];
  for (int64_t t = 0; t < block.steps; ++t) {
    steps[t] = load_step<T>(block.head, t, memory[t]);
  }
  float y[kMostFewSteps * kLanes] = {};
  const int64_t end = block.first + block.count;
  for (int64_t first = block.first; first < end; first += kLanes) {
    const int64_t count = end - first < kLanes ? end - first : kLanes;
    int64_t row = 0;
    for (; row + kDeltaRows <= count; row += kDeltaRows) {
      few_steps_of_rows<T, kDeltaRows, kPerChannel, kCorrects>(block, steps, first + row, y + row);
    }
    for (; row < count; ++row) {
      few_steps_of_rows<T, 1, kPerChannel, kCorrects>(block, steps, first + row, y + row);
    }
    for (int64_t t = 0; t < block.steps; ++t) {
      const T* const v = static_cast<const T*>(block.head.v) + t * block.head.v_step + first;
      store_columns(static_cast<T*>(block.y) + t * block.y_step + first, 0, count,
                    finished<T>(block.head, t, first, 0, count, load_lanes(y + t * kLanes),
                                load_columns(v, 1, 0, count)));
    }
  }
}

template <class T>
void few_steps_of(const DeltaForwardBlock& block) {
  with_rule(block.head,
            [&](auto per_channel, auto corrects) { few_steps<T, per_channel, corrects>(block); });
}

// ---- many steps ---------------------------------------------------------------------------------

inline constexpr int kBlockRows = kPanel;
inline constexpr int kVectors = kBlockRows / kLanes;

struct Rows {
  f32v part[kVectors];
};

// [key_dim][kBlockRows]
struct alignas(64) TransposedBlock {
  float s[kMaxDeltaKeyDim * kBlockRows];

  Panels panel(int64_t key_dim) { return {s, key_dim}; }
};

// Ends a step and begins the next one: s = g s + change k^T of `now`; y = s q of `now`; found = s
// gk of `next`. Two sums per result hide the latency of additions.
template <bool kPerChannel, bool kUpdates, bool kFinds>
inline void sweep(float* block,
                  int64_t key_dim,
                  const Step& now,
                  const Step& next,
                  const Rows& change,
                  Rows& y,
                  Rows& found) {
  Rows ys[2] = {}, founds[2] = {};
  for (int64_t d = 0; d < key_dim; d += 2) {
    for (int half = 0; half < 2; ++half) {
      float* const column = block + (d + half) * kBlockRows;
      for (int part = 0; part < kVectors; ++part) {
        f32v s = load_lanes(column + part * kLanes);
        if constexpr (kUpdates) {
          const float decay = kPerChannel ? now.g[d + half] : now.decay;
          s = s * decay + change.part[part] * now.k[d + half];
          store_lanes(column + part * kLanes, s);
          ys[half].part[part] += s * now.q[d + half];
        }
        if constexpr (kFinds) {
          founds[half].part[part] += s * next.gk[d + half];
        }
      }
    }
  }
  for (int part = 0; part < kVectors; ++part) {
    y.part[part] = ys[0].part[part] + ys[1].part[part];
    if constexpr (kFinds) {
      found.part[part] = founds[0].part[part] + founds[1].part[part];
    }
    if constexpr (kFinds && !kPerChannel) {
      found.part[part] *= next.decay;
    }
  }
}

template <class T, bool kPerChannel, bool kCorrects>
void steps_of_rows(const DeltaForwardBlock& all, int64_t first, int64_t count) {
  const DeltaHead& head = all.head;
  const int64_t key_dim = head.key_dim;
  TransposedBlock block;
  if (all.state_in) {
    const float* const rows = all.state_in + first * key_dim;
    pack_right_transposed<Words::kFloat32>(Source<float>{rows, key_dim, 1}, count, key_dim,
                                           block.panel(key_dim));
  } else {
    std::memset(block.s, 0, static_cast<size_t>(key_dim * kBlockRows) * sizeof(float));
  }
  StepBuffer memory[2];
  Step now = load_step<T>(head, 0, memory[0]);
  Rows change, y, found = {}, value;
  if constexpr (kCorrects) {
    sweep<kPerChannel, false, true>(block.s, key_dim, now, now, change, y, found);
  }
  int64_t saved = 0;
  for (int64_t t = 0; t < all.steps; ++t) {
    const T* const v = static_cast<const T*>(head.v) + t * head.v_step + first;
    for (int part = 0; part < kVectors; ++part) {
      const int64_t at = part * kLanes;
      value.part[part] = at < count ? load_columns(v, 1, at, count) : f32v{};
      change.part[part] = (value.part[part] - found.part[part]) * now.beta;
    }
    if (t + 1 < all.steps) {
      const Step next = load_step<T>(head, t + 1, memory[(t + 1) % 2]);
      sweep<kPerChannel, true, kCorrects>(block.s, key_dim, now, next, change, y, found);
      now = next;
    } else {
      sweep<kPerChannel, true, false>(block.s, key_dim, now, now, change, y, found);
    }
    for (int part = 0; all.y && part < kVectors && part * kLanes < count; ++part) {
      T* const to = static_cast<T*>(all.y) + t * all.y_step + first;
      store_columns(
          to, part * kLanes, count,
          finished<T>(head, t, first, part * kLanes, count, y.part[part], value.part[part]));
    }
    for (; saved < all.saved_count && all.saved[saved].step == t; ++saved) {
      unpack_transposed(block.panel(key_dim), count, key_dim,
                        all.saved[saved].state + first * key_dim);
    }
  }
  if (all.state_out) {
    unpack_transposed(block.panel(key_dim), count, key_dim, all.state_out + first * key_dim);
  }
}

template <class T>
void many_steps(const DeltaForwardBlock& all) {
  for (int64_t row = 0; row < all.count; row += kBlockRows) {
    const int64_t count = all.count - row < kBlockRows ? all.count - row : kBlockRows;
    with_rule(all.head, [&](auto per_channel, auto corrects) {
      steps_of_rows<T, per_channel, corrects>(all, all.first + row, count);
    });
  }
}

template <class T>
constexpr DeltaForwardKernels kernels() {
  return {few_steps_of<T>, many_steps<T>, kBlockRows};
}

}  // namespace

constinit const PerDtype<DeltaForwardKernels> gated_delta_forward_kernels_table = {
    .float32 = kernels<float>(), .float16 = kernels<f16>(), .bfloat16 = kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
