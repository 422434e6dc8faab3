// Gradients of the gated delta rule over a chunk of steps, for the value heads of one key head.
//
// For each few rows of the state: the chunk's states are computed again and kept in scratch memory;
// then d_S, the gradient of the state, goes back through the chunk:
//   d_S += d_y q^T;  d_q += S^T d_y;  d_v = beta d_S k;  d_beta += (v - S' k) d_S k
//   d_S' = d_S - d_v k^T;  d_k += d_S^T u - S'^T d_v;  d_g += d_S' * S_before
//   d_S_before = g d_S'
// with u = beta (v - S' k) and S' = g S_before. Sums over rows run in their order, so that results
// do not depend on threads.
#include "gated_delta/simd/steps.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

inline void clear(float* x, int64_t count) {
  std::memset(x, 0, static_cast<size_t>(count) * sizeof(float));
}

// The arrays of a chunk in float32, one row per step.
template <class T, bool kPerChannel>
class Chunk {
 public:
  explicit Chunk(const DeltaBackwardChunk& args)
      : args_(args),
        key_dim_(args.head.key_dim),
        value_dim_(args.head.value_dim),
        value_row_(round_up(value_dim_, 16)) {
    Arena arena{reinterpret_cast<char*>(args.scratch)};
    for (float** of_keys : {&q_, &k_, &g_, &gk_, &d_q_, &d_k_, &d_g_}) {
      *of_keys = arena.take<float>(kDeltaChunk * key_dim_);
    }
    for (float** of_values : {&v_, &d_y_, &d_v_}) {
      *of_values = arena.take<float>(kDeltaChunk * value_row_);
    }
    states_ = arena.take<float>((kDeltaChunk + 1) * kDeltaRows * key_dim_);
    errors_ = arena.take<float>(kDeltaChunk * kDeltaRows);
    for (float** of_steps : {&q_factor_, &k_factor_, &d_beta_}) {
      *of_steps = arena.take<float>(kDeltaChunk);
    }
    d_decay_ = arena.take<float>(kDeltaChunk * kLanes);
  }

  void run() {
    for (int64_t t = 0; t < args_.steps; ++t) {
      q_factor_[t] = load_query<T>(args_.head, t, q_ + t * key_dim_);
      k_factor_[t] = load_key<T>(args_.head, t, k_ + t * key_dim_);
    }
    clear(d_q_, args_.steps * key_dim_);
    clear(d_k_, args_.steps * key_dim_);
    for (int64_t head = 0; head < args_.heads; ++head) {
      load_head(head);
      int64_t row = 0;
      for (; row + kDeltaRows <= value_dim_; row += kDeltaRows) {
        rows<kDeltaRows>(head, row);
      }
      for (; row < value_dim_; ++row) {
        rows<1>(head, row);
      }
      store_head(head);
    }
    for (int64_t t = 0; t < args_.steps; ++t) {
      store_row(d_q_ + t * key_dim_, q_ + t * key_dim_, q_factor_[t], args_.head.q_scale,
                static_cast<T*>(args_.d_q) + t * args_.d_q_step);
      store_row(d_k_ + t * key_dim_, k_ + t * key_dim_, k_factor_[t], 1.0f,
                static_cast<T*>(args_.d_k) + t * args_.d_k_step);
    }
  }

 private:
  void load_values(const T* from, float* to) const {
    for (int64_t r = 0; r < value_dim_; r += kLanes) {
      store_lanes(to + r, load_columns(from, 1, r, value_dim_));
    }
  }

  void load_head(int64_t head) {
    head_ = args_.head;
    const auto moved = [](const void* x, bool is_float32, int64_t elements) -> const void* {
      return static_cast<const char*>(x) + elements * (is_float32 ? 4 : int64_t{sizeof(T)});
    };
    head_.v = moved(head_.v, false, head * args_.v_head);
    head_.g = moved(head_.g, head_.g_is_float32, head * args_.g_head);
    head_.beta = moved(head_.beta, head_.beta_is_float32, head * args_.beta_head);
    const T* const d_y = static_cast<const T*>(args_.d_y) + head * args_.d_y_head;
    for (int64_t t = 0; t < args_.steps; ++t) {
      steps_[t] = with_gates<T>(head_, t, q_ + t * key_dim_, k_ + t * key_dim_, g_ + t * key_dim_,
                                gk_ + t * key_dim_);
      load_values(static_cast<const T*>(head_.v) + t * head_.v_step, v_ + t * value_row_);
      load_values(d_y + t * args_.d_y_step, d_y_ + t * value_row_);
    }
    clear(d_beta_, args_.steps);
    kPerChannel ? clear(d_g_, args_.steps * key_dim_) : clear(d_decay_, args_.steps * kLanes);
  }

  void store_head(int64_t head) const {
    for (int64_t t = 0; t < args_.steps; ++t) {
      T* const d_v = static_cast<T*>(args_.d_v) + t * args_.d_v_step + head * value_dim_;
      for (int64_t r = 0; r < value_dim_; r += kLanes) {
        store_columns(d_v, r, value_dim_, load_lanes(d_v_ + t * value_row_ + r));
      }
      args_.d_beta[t * args_.d_beta_step + head] = d_beta_[t];
      float* const d_g = args_.d_g + t * args_.d_g_step;
      if constexpr (kPerChannel) {
        std::memcpy(d_g + head * key_dim_, d_g_ + t * key_dim_,
                    static_cast<size_t>(key_dim_) * sizeof(float));
      } else {
        d_g[head] = lane_sum(load_lanes(d_decay_ + t * kLanes));
      }
    }
  }

  // The gradient of a row x that was normalised: x n with n = scale / sqrt(sum of squares + eps).
  void store_row(
      const float* d_normalised, const float* normalised, float factor, float scale, T* to) const {
    float shift = 0.0f;
    if (args_.head.normalizes) {
      f32v products = {};
      for (int64_t d = 0; d < key_dim_; d += kLanes) {
        products += load_lanes(d_normalised + d) * load_lanes(normalised + d);
      }
      shift = lane_sum(products) / (scale * scale);
    }
    for (int64_t d = 0; d < key_dim_; d += kLanes) {
      const f32v own = load_lanes(normalised + d);
      store_lanes(to + d, (load_lanes(d_normalised + d) - own * shift) * factor);
    }
  }

  template <int kRows>
  void rows(int64_t head, int64_t row) {
    const float* const start =
        args_.states ? args_.states + head * args_.state_head + row * key_dim_ : nullptr;
    const int64_t block = kRows * key_dim_;
    if (start) {
      std::memcpy(states_, start, static_cast<size_t>(block) * sizeof(float));
    } else {
      clear(states_, block);
    }
    for (int64_t t = 0; t < args_.steps; ++t) {
      const RowResults<kRows> results =
          step_rows<kRows, kPerChannel, false>(states_ + t * block, states_ + (t + 1) * block,
                                               key_dim_, steps_[t], v_ + t * value_row_ + row);
      std::memcpy(errors_ + t * kRows, results.error, sizeof(results.error));
    }
    float* const d_state = args_.d_states + (head * value_dim_ + row) * key_dim_;
    const DeltaSavedGradient* saved = args_.d_saved;
    const DeltaSavedGradient* const end = saved + args_.d_saved_count;
    for (int64_t t = args_.steps - 1; t >= 0; --t) {
      for (; saved < end && saved->step == t; ++saved) {
        const float* const more = saved->d_state + head * args_.d_saved_head + row * key_dim_;
        for (int64_t i = 0; i < block; i += kLanes) {
          store_lanes(d_state + i, load_lanes(d_state + i) + load_lanes(more + i));
        }
      }
      back<kRows>(t, row, d_state);
    }
  }

  template <int kRows>
  void back(int64_t t, int64_t row, float* d_state) {
    const Step& step = steps_[t];
    const float* const before = states_ + t * kRows * key_dim_;
    const float* const after = before + kRows * key_dim_;
    const float* const d_y = d_y_ + t * value_row_ + row;
    float* const d_q = d_q_ + t * key_dim_;
    f32v products[kRows] = {};
    for (int64_t d = 0; d < key_dim_; d += kLanes) {
      const f32v q = load_lanes(step.q + d), k = load_lanes(step.k + d);
      f32v sum = load_lanes(d_q + d);
      for (int r = 0; r < kRows; ++r) {
        const f32v d_s = load_lanes(d_state + r * key_dim_ + d) + q * d_y[r];
        store_lanes(d_state + r * key_dim_ + d, d_s);
        products[r] += d_s * k;
        sum += load_lanes(after + r * key_dim_ + d) * d_y[r];
      }
      store_lanes(d_q + d, sum);
    }
    float d_change[kRows], d_v[kRows], change[kRows];
    sums_of(products, d_change);
    for (int r = 0; r < kRows; ++r) {
      const float error = errors_[t * kRows + r];
      d_beta_[t] += d_change[r] * error;
      d_v[r] = step.beta * d_change[r];
      change[r] = step.beta * error;
      d_v_[t * value_row_ + row + r] = d_v[r];
    }
    float* const d_k = d_k_ + t * key_dim_;
    f32v d_decay = {};
    for (int64_t d = 0; d < key_dim_; d += kLanes) {
      const f32v k = load_lanes(step.k + d), decay = decay_at<kPerChannel>(step, d);
      f32v of_change = load_lanes(d_k + d), of_state = {}, d_g = {};
      for (int r = 0; r < kRows; ++r) {
        const f32v d_s = load_lanes(d_state + r * key_dim_ + d);
        const f32v s = load_lanes(before + r * key_dim_ + d);
        of_change += d_s * change[r];
        of_state += s * d_v[r];
        const f32v d_decayed = d_s - k * d_v[r];
        d_g += d_decayed * s;
        store_lanes(d_state + r * key_dim_ + d, d_decayed * decay);
      }
      store_lanes(d_k + d, of_change - of_state * decay);
      if constexpr (kPerChannel) {
        store_lanes(d_g_ + t * key_dim_ + d, load_lanes(d_g_ + t * key_dim_ + d) + d_g);
      } else {
        d_decay += d_g;
      }
    }
    if constexpr (!kPerChannel) {
      float* const sum = d_decay_ + t * kLanes;
      store_lanes(sum, load_lanes(sum) + d_decay);
    }
  }

  const DeltaBackwardChunk& args_;
  const int64_t key_dim_, value_dim_, value_row_;
  DeltaHead head_;
  Step steps_[kDeltaChunk];
  float *q_, *k_, *g_, *gk_, *d_q_, *d_k_, *d_g_;
  float *v_, *d_y_, *d_v_;
  float* states_;  // of some rows, before each step and after the last
  float* errors_;  // v - S' k of some rows
  float *q_factor_, *k_factor_, *d_beta_;
  float* d_decay_;  // not yet summed over lanes
};

template <class T>
void backward(const DeltaBackwardChunk& chunk) {
  chunk.head.is_per_channel ? Chunk<T, true>(chunk).run() : Chunk<T, false>(chunk).run();
}

}  // namespace

constinit const PerDtype<DeltaBackwardKernel> gated_delta_backward_kernels_table = {
    .float32 = backward<float>, .float16 = backward<f16>, .bfloat16 = backward<bf16>};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
