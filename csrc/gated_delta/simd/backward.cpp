// Gradients of the recurrence over a chunk of steps, for value heads of one key head.
//
// For each few rows of the state: the chunk's states are computed again and kept in scratch memory;
// then d_S, the gradient of the state, goes back through the chunk:
//   d_S += d_y q^T;  d_q += S^T d_y;  d_v = beta d_S k;  d_beta += (v - S' k) d_S k
//   d_S' = d_S - d_v k^T;  d_k += d_S^T u - S'^T d_v;  d_g += d_S' * S_before
//   d_S_before = g d_S'
// with u = beta (v - S' k) and S' = g S_before. A rule that does not correct has u = beta v, and no
// d_v in d_S' and d_k. Sums over rows run in their order, so that results do not depend on threads.
//
// With y = o silu(gate) and o = S q + skip v, d_o = silu(gate) d_y takes the place of d_y;
//   d_gate = silu'(gate) d_y o;  d_skip = d_o v;  d_v += skip d_o
#include "gated_delta/simd/steps.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

inline void clear(float* x, int64_t count) {
  std::memset(x, 0, static_cast<size_t>(count) * sizeof(float));
}

// The arrays of a chunk in float32, one row per step.
template <class T, bool kPerChannel, bool kCorrects>
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
    for (float** of_values : {&v_, &d_y_, &d_v_, &d_gate_}) {
      *of_values = arena.take<float>(kDeltaChunk * value_row_);
    }
    states_ = arena.take<float>((kDeltaChunk + 1) * kDeltaRows * key_dim_);
    errors_ = arena.take<float>(kDeltaChunk * kDeltaRows);
    for (float** of_steps : {&q_factor_, &k_factor_, &d_beta_, &d_skip_}) {
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
      store_row(d_q_ + t * key_dim_, q_ + t * key_dim_, q_factor_[t], args_.head.q_scale, args_.d_q,
                t * args_.d_q_step);
      store_row(d_k_ + t * key_dim_, k_ + t * key_dim_, k_factor_[t], 1.0f, args_.d_k,
                t * args_.d_k_step);
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
    head_.skip = head_.skip ? head_.skip + head * args_.skip_head : nullptr;
    head_.gate = head_.gate ? moved(head_.gate, false, head * args_.gate_head) : nullptr;
    const T* const d_y = static_cast<const T*>(args_.d_y) + head * args_.d_y_head;
    for (int64_t t = 0; t < args_.steps; ++t) {
      steps_[t] = with_gates<T>(head_, t, q_ + t * key_dim_, k_ + t * key_dim_, g_ + t * key_dim_,
                                gk_ + t * key_dim_);
      load_values(static_cast<const T*>(head_.v) + t * head_.v_step, v_ + t * value_row_);
      load_values(d_y + t * args_.d_y_step, d_y_ + t * value_row_);
      if (head_.gate) {
        go_back_through_gate(t);
      }
    }
    clear(d_beta_, args_.steps);
    clear(d_skip_, args_.steps);
    kPerChannel ? clear(d_g_, args_.steps * key_dim_) : clear(d_decay_, args_.steps * kLanes);
  }

  // Makes d_o of d_y, and d_gate but for the factor o.
  void go_back_through_gate(int64_t t) {
    const T* const gate = static_cast<const T*>(head_.gate) + t * head_.gate_step;
    for (int64_t r = 0; r < value_dim_; r += kLanes) {
      float* const d_y = d_y_ + t * value_row_ + r;
      const Silu open =
          silu_with_derivative<Accuracy::kFloat32>(load_columns(gate, 1, r, value_dim_));
      store_lanes(d_gate_ + t * value_row_ + r, load_lanes(d_y) * open.derivative);
      store_lanes(d_y, load_lanes(d_y) * open.value);
    }
  }

  void store_values(const float* from, T* to) const {
    for (int64_t r = 0; r < value_dim_; r += kLanes) {
      store_columns(to, r, value_dim_, load_lanes(from + r));
    }
  }

  void store_head(int64_t head) const {
    for (int64_t t = 0; t < args_.steps; ++t) {
      const int64_t at = t * args_.d_v_step + head * value_dim_;
      store_values(d_v_ + t * value_row_, static_cast<T*>(args_.d_v) + at);
      if (head_.gate) {
        store_values(d_gate_ + t * value_row_, static_cast<T*>(args_.d_gate) + at);
      }
      if (head_.skip) {
        args_.d_skip[t * args_.d_beta_step + head] = d_skip_[t];
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
  void store_row(const float* d_normalised,
                 const float* normalised,
                 float factor,
                 float scale,
                 void* to,
                 int64_t at) const {
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
      const f32v gradient = (load_lanes(d_normalised + d) - own * shift) * factor;
      args_.d_keys_are_parts ? store_lanes(static_cast<float*>(to) + at + d, gradient)
                             : store_lanes(static_cast<T*>(to) + at + d, gradient);
    }
  }

  template <int kRows, bool kIsGated>
  void run_rows(int64_t row) {
    const int64_t block = kRows * key_dim_;
    for (int64_t t = 0; t < args_.steps; ++t) {
      const float* const v = v_ + t * value_row_ + row;
      const RowResults<kRows> results = step_rows<kRows, kPerChannel, kCorrects, kIsGated>(
          states_ + t * block, states_ + (t + 1) * block, key_dim_, steps_[t], v);
      std::memcpy(errors_ + t * kRows, results.error, sizeof(results.error));
      for (int r = 0; kIsGated && r < kRows; ++r) {
        d_gate_[t * value_row_ + row + r] *= results.y[r] + skip_of(t, v[r]);
      }
    }
  }

  // skip v
  float skip_of(int64_t t, float v) const {
    return head_.skip ? head_.skip[t * head_.skip_step] * v : 0.0f;
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
    head_.gate ? run_rows<kRows, true>(row) : run_rows<kRows, false>(row);
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
      d_v_[t * value_row_ + row + r] = d_v[r] + skip_of(t, d_y[r]);
      d_skip_[t] += d_y[r] * v_[t * value_row_ + row + r];
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
        f32v d_decayed = d_s;
        if constexpr (kCorrects) {
          of_state += s * d_v[r];
          d_decayed -= k * d_v[r];
        }
        d_g += d_decayed * s;
        store_lanes(d_state + r * key_dim_ + d, d_decayed * decay);
      }
      store_lanes(d_k + d, kCorrects ? of_change - of_state * decay : of_change);
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
  float *v_, *d_y_, *d_v_, *d_gate_;
  float* states_;  // of some rows, before each step and after the last
  float* errors_;  // v - S' k of some rows, or v
  float *q_factor_, *k_factor_, *d_beta_, *d_skip_;
  float* d_decay_;  // not yet summed over lanes
};

template <class T>
void backward(const DeltaBackwardChunk& chunk) {
  with_rule(chunk.head,
            [&](auto per_channel, auto corrects) { Chunk<T, per_channel, corrects>(chunk).run(); });
}

}  // namespace

constinit const PerDtype<DeltaBackwardKernel> gated_delta_backward_kernels_table = {
    .float32 = backward<float>, .float16 = backward<f16>, .bfloat16 = backward<bf16>};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
