// CPU driver of the backward: a key head of a batch row is the work of one thread, which adds up
// what its value heads and the rows of their states contribute, in one order.
#include <algorithm>
#include <cstring>

#include "common/integers.h"
#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "gated_delta/cpu.h"

namespace mlx_anvil {

namespace {

class KeyHead {
 public:
  KeyHead(const DeltaBackwardArgs& args, int64_t batch, int64_t key_head)
      : args_(args),
        sizes_(args.sizes),
        batch_(batch),
        key_head_(key_head),
        first_head_(key_head * args.sizes.group()),
        steps_(steps_of(args, batch)),
        chunks_(ceil_div(steps_, kDeltaChunk)),
        positions_(positions_of(args, batch)) {
    const int64_t scratch = round_up(delta_backward_scratch(sizes_.key_dim, sizes_.value_dim), 16);
    const int64_t kept = sizes_.group() * std::max<int64_t>(0, chunks_ - 1) * sizes_.state();
    const int64_t own = args.d_state ? 0 : sizes_.group() * sizes_.state();
    scratch_ = static_cast<float*>(
        thread_scratch((scratch + kept + own) * static_cast<int64_t>(sizeof(float))));
    kept_ = scratch_ + scratch;
    d_states_ = args.d_state ? args.d_state + of_state(batch_) : kept_ + kept;
  }

  void run() {
    std::memcpy(d_states_, args_.d_state_out + of_state(batch_),
                static_cast<size_t>(sizes_.group() * sizes_.state()) * sizeof(float));
    keep_states();
    for (int64_t chunk = chunks_ - 1; chunk >= 0; --chunk) {
      run_chunk(chunk);
    }
    for (const DeltaPosition& position : positions_) {
      const float* const more =
          args_.d_states + of_state(batch_ * sizes_.positions + position.index);
      for (int64_t i = 0; position.step < 0 && i < sizes_.group() * sizes_.state(); ++i) {
        d_states_[i] += more[i];
      }
    }
    clear_padding();
  }

 private:
  // The states of our value heads among `row` batch rows.
  int64_t of_state(int64_t row) const {
    return (row * sizes_.value_heads + first_head_) * sizes_.state();
  }

  // Computes the state after each chunk but the last.
  void keep_states() const {
    std::vector<DeltaSaved> saved;
    for (int64_t head = 0; chunks_ > 1 && head < sizes_.group(); ++head) {
      saved.clear();
      for (int64_t chunk = 0; chunk < chunks_ - 1; ++chunk) {
        const int64_t at = (head * (chunks_ - 1) + chunk) * sizes_.state();
        saved.push_back({(chunk + 1) * kDeltaChunk - 1, kept_ + at});
      }
      DeltaForwardBlock block{};
      block.head = head_of(args_, batch_, first_head_ + head);
      block.steps = (chunks_ - 1) * kDeltaChunk;
      block.count = sizes_.value_dim;
      block.state_in =
          args_.state ? args_.state + of_state(batch_) + head * sizes_.state() : nullptr;
      block.saved = saved.data();
      block.saved_count = chunks_ - 1;
      gated_delta_forward_kernels()[args_.dtype].many_steps(block);
    }
  }

  void run_chunk(int64_t chunk) const {
    const int64_t bytes = element_size(args_.dtype), first = chunk * kDeltaChunk;
    const auto bytes_of = [&](bool is_float32) { return is_float32 ? int64_t{4} : bytes; };
    const auto moved = [&](const void* x, int64_t step, int64_t size) -> const void* {
      return static_cast<const char*>(x) + first * step * size;
    };
    DeltaBackwardChunk work{};
    work.head = head_of(args_, batch_, first_head_);
    DeltaHead& head = work.head;
    head.q = moved(head.q, head.q_step, bytes);
    head.k = moved(head.k, head.k_step, bytes);
    head.v = moved(head.v, head.v_step, bytes);
    head.g = moved(head.g, head.g_step, bytes_of(head.g_is_float32));
    head.beta = moved(head.beta, head.beta_step, bytes_of(head.beta_is_float32));
    work.heads = sizes_.group();
    work.v_head = args_.v.strides[2];
    work.g_head = args_.g.strides[2];
    work.beta_head = args_.beta.strides[2];
    work.steps = std::min(kDeltaChunk, steps_ - first);
    work.d_y_step = args_.d_y.strides[1];
    work.d_y_head = args_.d_y.strides[2];
    work.d_y =
        static_cast<const char*>(args_.d_y.data) +
        (batch_ * args_.d_y.strides[0] + first * work.d_y_step + first_head_ * work.d_y_head) *
            bytes;
    if (chunk > 0) {
      work.states = kept_ + (chunk - 1) * sizes_.state();
      work.state_head = (chunks_ - 1) * sizes_.state();
    } else {
      work.states = args_.state ? args_.state + of_state(batch_) : nullptr;
      work.state_head = sizes_.state();
    }
    work.d_states = d_states_;
    std::vector<DeltaSavedGradient> d_saved;
    for (auto position = positions_.rbegin(); position != positions_.rend(); ++position) {
      if (position->step >= first && position->step < first + work.steps) {
        d_saved.push_back({position->step - first,
                           args_.d_states + of_state(batch_ * sizes_.positions + position->index)});
      }
    }
    work.d_saved = d_saved.data();
    work.d_saved_count = static_cast<int64_t>(d_saved.size());
    work.d_saved_head = sizes_.state();
    const int64_t gates = sizes_.is_per_channel ? sizes_.key_dim : 1;
    const int64_t token = batch_ * sizes_.length + first;
    work.d_q_step = work.d_k_step = sizes_.key_heads * sizes_.key_dim;
    work.d_v_step = sizes_.value_heads * sizes_.value_dim;
    work.d_g_step = sizes_.value_heads * gates;
    work.d_beta_step = sizes_.value_heads;
    const int64_t of_key = token * work.d_q_step + key_head_ * sizes_.key_dim;
    work.d_q = static_cast<char*>(args_.d_q) + of_key * bytes;
    work.d_k = static_cast<char*>(args_.d_k) + of_key * bytes;
    work.d_v = static_cast<char*>(args_.d_v) +
               (token * work.d_v_step + first_head_ * sizes_.value_dim) * bytes;
    work.d_g = args_.d_g + token * work.d_g_step + first_head_ * gates;
    work.d_beta = args_.d_beta + token * work.d_beta_step + first_head_;
    work.scratch = scratch_;
    gated_delta_backward_kernels()[args_.dtype](work);
  }

  // Steps that change nothing have no gradients.
  void clear_padding() const {
    const int64_t bytes = element_size(args_.dtype), group = sizes_.group();
    const int64_t gates = sizes_.is_per_channel ? sizes_.key_dim : 1;
    const auto clear = [&](void* x, int64_t heads, int64_t columns, int64_t size, int64_t token) {
      const int64_t own = heads / sizes_.key_heads * columns;
      std::memset(static_cast<char*>(x) + (token * heads * columns + key_head_ * own) * size, 0,
                  static_cast<size_t>(own * size));
    };
    for (int64_t t = steps_; t < sizes_.length; ++t) {
      const int64_t token = batch_ * sizes_.length + t;
      clear(args_.d_q, sizes_.key_heads, sizes_.key_dim, bytes, token);
      clear(args_.d_k, sizes_.key_heads, sizes_.key_dim, bytes, token);
      clear(args_.d_v, group * sizes_.key_heads, sizes_.value_dim, bytes, token);
      clear(args_.d_g, group * sizes_.key_heads, gates, 4, token);
      clear(args_.d_beta, group * sizes_.key_heads, 1, 4, token);
    }
  }

  const DeltaBackwardArgs& args_;
  const DeltaSizes& sizes_;
  const int64_t batch_, key_head_, first_head_, steps_, chunks_;
  const std::vector<DeltaPosition> positions_;
  float* scratch_;
  float* kept_;      // [group, chunks - 1, value_dim, key_dim]
  float* d_states_;  // of our value heads
};

}  // namespace

void gated_delta_backward_cpu(const DeltaBackwardArgs& args) {
  const int64_t key_heads = args.sizes.key_heads;
  parallel_for(args.sizes.batch * key_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      KeyHead(args, i / key_heads, i % key_heads).run();
    }
  });
}

}  // namespace mlx_anvil
