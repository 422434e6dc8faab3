// Backward of selective_scan on the CPU. A block runs forward once and keeps its states before each
// chunk of steps; then, from the last chunk on, runs forward through the chunk again and back. For
// kernel files only (see common/simd/simd.h).
#pragma once

#include "selective_scan/simd/forward.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline constexpr int64_t kChunk = 32;  // steps: with 16 states, those of a block fit L2

inline void add_to(float* to, int64_t count, f32v x) {
  if (count >= kLanes) {
    store_lanes(to, load_lanes(to) + x);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    to[i] += x[i];
  }
}

// Memory of a block. Arrays of states are [states, kBlockChannels].
struct ScanBackwardMemory {
  int64_t of_block, padded;
  float *rates, *h, *g, *d_a, *d_a_of_chunk;
  float* starts;           // [chunks], the states before each
  float *before, *decays;  // [kChunk + 1] and [kChunk]
  float* s;                // [kChunk, kBlockChannels]
  float *b, *c;            // [kChunk, padded]
  float *d_b, *d_c;        // [padded, kLanes]: terms of a step
  int64_t bytes;           // of all

  // With a null `scratch` it only counts the bytes.
  ScanBackwardMemory(const ScanSizes& sizes, void* scratch)
      : of_block(sizes.states * kBlockChannels), padded(padded_states(sizes)) {
    Arena arena{static_cast<char*>(scratch)};
    for (float** block : {&rates, &h, &g, &d_a, &d_a_of_chunk}) {
      *block = arena.take<float>(of_block);
    }
    starts = arena.take<float>(chunks_of(sizes) * of_block);
    before = arena.take<float>((kChunk + 1) * of_block);
    decays = arena.take<float>(kChunk * of_block);
    s = arena.take<float>(kChunk * kBlockChannels);
    for (float** of_steps : {&b, &c}) {
      *of_steps = arena.take<float>(kChunk * padded);
    }
    for (float** of_lanes : {&d_b, &d_c}) {
      *of_lanes = arena.take<float>(padded * kLanes);
    }
    bytes = arena.used;
  }

  static int64_t chunks_of(const ScanSizes& sizes) { return ceil_div(sizes.steps, kChunk); }
};

inline int64_t scan_backward_scratch(const ScanSizes& sizes) {
  return ScanBackwardMemory(sizes, nullptr).bytes;
}

template <class T>
class ScanBackwardBlock {
 public:
  ScanBackwardBlock(const ScanBackwardArgs& args, const ScanSums& sums, void* scratch)
      : args_(args), sums_(sums), m_(args.sizes, scratch), states_(args.sizes.states) {}

  void run(int64_t block) {
    first_ = block * kBlockChannels;
    const int64_t channels = args_.sizes.channels;
    to_lanes(args_.a, first_, channels, states_, m_.rates);
    for (int64_t i = 0; i < m_.of_block; ++i) {
      m_.rates[i] *= rate_factor();
      m_.d_a[i] = 0.0f;
    }
    d_ = args_.d ? load_channels(args_.d, first_, channels) : Channels{};
    d_d_ = {};
    for (batch_ = 0; batch_ < args_.sizes.batch; ++batch_) {
      run_batch();
    }
    from_lanes(m_.d_a, first_, channels, states_, args_.d_a);
    if (args_.d_d) {
      store_channels(args_.d_d, first_, channels, d_d_);
    }
  }

 private:
  void run_batch() {
    const int64_t channels = args_.sizes.channels, length = args_.length_of(batch_);
    const int64_t state_at = batch_ * channels * states_;
    const int64_t chunks = (length + kChunk - 1) / kChunk;
    to_lanes(args_.state ? args_.state + state_at : nullptr, first_, channels, states_, m_.h);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      copy_states(m_.starts + chunk * m_.of_block, m_.h);
      for (int64_t t = chunk * kChunk; chunk + 1 < chunks && t < (chunk + 1) * kChunk; ++t) {
        step_forward(t, m_.b, m_.c, m_.h, m_.h, nullptr);
      }
    }
    to_lanes(args_.d_last_state + state_at, first_, channels, states_, m_.g);
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t begin = chunk * kChunk, end = smaller(begin + kChunk, length);
      copy_states(m_.before, m_.starts + chunk * m_.of_block);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t i = t - begin;
        float* const from = m_.before + i * m_.of_block;
        const Channels s = step_forward(t, m_.b + i * m_.padded, m_.c + i * m_.padded, from,
                                        from + m_.of_block, m_.decays + i * m_.of_block);
        store_block_of(m_.s + i * kBlockChannels, s);
      }
      std::memset(m_.d_a_of_chunk, 0, m_.of_block * sizeof(float));
      for (int64_t t = end - 1; t >= begin; --t) {
        step_back(t, t - begin);
      }
      for (int64_t i = 0; i < m_.of_block; ++i) {
        m_.d_a[i] += m_.d_a_of_chunk[i];
      }
    }
    if (args_.d_state) {
      from_lanes(m_.g, first_, channels, states_, args_.d_state + state_at);
    }
    for (int64_t t = length; t < args_.sizes.steps; ++t) {  // padding
      for (void* const out : {args_.d_x, args_.d_dt, args_.d_z}) {
        if (out) {
          store_channels(row_of_result(out, t), first_, channels, Channels{});
        }
      }
    }
  }

  // Returns the sum before the gate. `decays` may be null.
  Channels step_forward(
      int64_t t, float* b, float* c, const float* from, float* to, float* decays) {
    const int64_t next = t + kStepsAhead < args_.sizes.steps ? t + kStepsAhead : t;
    prefetch_step<T>(args_, batch_, next, first_);
    now_.read(args_, batch_, t, first_);
    read_states<T>(args_.b, batch_, t, states_, b);
    read_states<T>(args_.c, batch_, t, states_, c);
    Channels s = per_vector([&](int v) { return d_.of[v] * now_.x.of[v]; });
    for (int64_t n = 0; n < states_; ++n) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = n * kBlockChannels + v * kLanes;
        const f32v decay = decay_of(now_.step.of[v], load_lanes(m_.rates + at));
        const f32v state = decay * load_lanes(from + at) + now_.step.of[v] * now_.x.of[v] * b[n];
        store_lanes(to + at, state);
        if (decays) {
          store_lanes(decays + at, decay);
        }
        s.of[v] += state * c[n];
      }
    }
    return s;
  }

  // Step t, which is step i of its chunk.
  void step_back(int64_t t, int64_t i) {
    const int64_t channels = args_.sizes.channels, next = t >= kStepsAhead ? t - kStepsAhead : t;
    prefetch_step<T>(args_, batch_, next, first_);
    prefetch_channels<T>(args_.d_y, batch_, next, first_);
    for (void* const result : {args_.d_x, args_.d_dt, args_.d_z}) {
      prefetch_channels<T>({result, args_.sizes.steps * channels, channels}, batch_, next, first_);
    }
    now_.read(args_, batch_, t, first_);
    Channels d_s = load_channels(row_of<T>(args_.d_y, batch_, t), first_, channels);
    if (args_.z.data) {
      const Channels z = load_channels(row_of<T>(args_.z, batch_, t), first_, channels);
      const Channels s = load_block_of(m_.s + i * kBlockChannels);
      Channels d_z;
      for (int v = 0; v < kVectors; ++v) {
        const Silu gate = silu_with_derivative<Accuracy::kFloat32>(z.of[v]);
        d_z.of[v] = d_s.of[v] * s.of[v] * gate.derivative;
        d_s.of[v] *= gate.value;
      }
      store_channels(row_of_result(args_.d_z, t), first_, channels, d_z);
    }
    const Channels input = per_vector([&](int v) { return now_.step.of[v] * now_.x.of[v]; });
    Channels d_input = {}, d_step = {};
    const float *const b = m_.b + i * m_.padded, *const c = m_.c + i * m_.padded;
    const float *const before = m_.before + i * m_.of_block, *const after = before + m_.of_block;
    const float* const decays = m_.decays + i * m_.of_block;
    for (int64_t n = 0; n < states_; ++n) {
      f32v of_b = {}, of_c = {};
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = n * kBlockChannels + v * kLanes;
        const f32v g = load_lanes(m_.g + at) + d_s.of[v] * c[n];
        of_b += g * input.of[v];
        of_c += d_s.of[v] * load_lanes(after + at);
        d_input.of[v] += g * b[n];
        const f32v passed = g * load_lanes(decays + at);
        const f32v of_decay = passed * load_lanes(before + at);
        d_step.of[v] += of_decay * load_lanes(m_.rates + at);
        store_lanes(m_.d_a_of_chunk + at,
                    load_lanes(m_.d_a_of_chunk + at) + of_decay * now_.step.of[v]);
        store_lanes(m_.g + at, passed);
      }
      store_lanes(m_.d_b + n * kLanes, of_b);
      store_lanes(m_.d_c + n * kLanes, of_c);
    }
    add_sums(t, m_.d_b, sums_.b);
    add_sums(t, m_.d_c, sums_.c);
    Channels d_x, d_dt;
    for (int v = 0; v < kVectors; ++v) {
      d_d_.of[v] += d_s.of[v] * now_.x.of[v];
      d_x.of[v] = d_s.of[v] * d_.of[v] + d_input.of[v] * now_.step.of[v];
      d_dt.of[v] = d_step.of[v] * (1.0f / rate_factor()) + d_input.of[v] * now_.x.of[v];
      if (args_.softplus) {
        d_dt.of[v] = times_sigmoid<Accuracy::kFloat32>(d_dt.of[v], now_.given.of[v]);
      }
    }
    store_channels(row_of_result(args_.d_x, t), first_, channels, d_x);
    store_channels(row_of_result(args_.d_dt, t), first_, channels, d_dt);
  }

  // Adds the terms of step t, [states, kLanes], up over the lanes.
  void add_sums(int64_t t, float* terms, float* sums) {
    float* const to = sums + (batch_ * args_.sizes.steps + t) * states_;
    for (int64_t n = 0; n < states_; n += kLanes) {
      f32v x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = n + i < states_ ? load_lanes(terms + (n + i) * kLanes) : f32v{};
      }
      add_to(to + n, states_ - n, lane_sums(x));
    }
  }

  T* row_of_result(void* result, int64_t t) const {
    return static_cast<T*>(result) + (batch_ * args_.sizes.steps + t) * args_.sizes.channels;
  }

  void copy_states(float* to, const float* from) const {
    std::memcpy(to, from, m_.of_block * sizeof(float));
  }

  const ScanBackwardArgs& args_;
  const ScanSums& sums_;
  const ScanBackwardMemory m_;
  const int64_t states_;
  int64_t first_ = 0, batch_ = 0;
  Channels d_ = {}, d_d_ = {};
  ScanStep<T> now_;
};

template <class T>
void scan_backward(
    const ScanBackwardArgs& args, int64_t begin, int64_t end, const ScanSums& sums, void* scratch) {
  ScanBackwardBlock<T> blocks(args, sums, scratch);
  for (int64_t block = begin; block < end; ++block) {
    blocks.run(block);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
