// CPU driver of the backward: some value heads of a key head, of a batch row, are the work of one
// thread, which adds up what they and the rows of their states contribute, in one order. Where key
// heads are few, their value heads are split, and the sums of the parts are added up at the end.
#include <algorithm>
#include <cstring>
#include <memory>

#include "common/integers.h"
#include "common/parallel.h"
#include "common/sum_rows.h"
#include "common/thread_scratch.h"
#include "gated_delta/cpu.h"

namespace mlx_anvil {

namespace {

// Pieces of work that keep most machines busy. The number of parts depends on sizes only, and so
// do the bits of the sums.
constexpr int64_t kLeastPieces = 16;

int64_t parts_of(const DeltaSizes& sizes) {
  const int64_t keys = std::max<int64_t>(1, sizes.batch * sizes.key_heads);
  return std::min(sizes.group(), ceil_div(kLeastPieces, keys));
}

// Where the gradients of the keys go: to those of the call, or to a part of their own.
struct KeyGradients {
  void *d_q, *d_k;
  int64_t bytes;  // of a number
};

class ValueHeads {
 public:
  ValueHeads(const DeltaBackwardArgs& args,
             const KeyGradients& of_keys,
             int64_t batch,
             int64_t key_head,
             int64_t begin,
             int64_t end)
      : args_(args),
        of_keys_(of_keys),
        sizes_(args.sizes),
        batch_(batch),
        key_head_(key_head),
        first_head_(key_head * args.sizes.group() + begin),
        heads_(end - begin),
        steps_(steps_of(args, batch)),
        chunks_(ceil_div(steps_, kDeltaChunk)),
        positions_(positions_of(args, batch)) {
    const int64_t scratch = round_up(delta_backward_scratch(sizes_.key_dim, sizes_.value_dim), 16);
    const int64_t kept = heads_ * std::max<int64_t>(0, chunks_ - 1) * sizes_.state();
    const int64_t own = args.d_state ? 0 : heads_ * sizes_.state();
    scratch_ = static_cast<float*>(
        thread_scratch((scratch + kept + own) * static_cast<int64_t>(sizeof(float))));
    kept_ = scratch_ + scratch;
    d_states_ = args.d_state ? args.d_state + of_state(batch_) : kept_ + kept;
  }

  void run() {
    std::memcpy(d_states_, args_.d_state_out + of_state(batch_),
                static_cast<size_t>(heads_ * sizes_.state()) * sizeof(float));
    keep_states();
    for (int64_t chunk = chunks_ - 1; chunk >= 0; --chunk) {
      run_chunk(chunk);
    }
    for (const DeltaPosition& position : positions_) {
      const float* const more =
          args_.d_states + of_state(batch_ * sizes_.positions + position.index);
      for (int64_t i = 0; position.step < 0 && i < heads_ * sizes_.state(); ++i) {
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
    for (int64_t head = 0; chunks_ > 1 && head < heads_; ++head) {
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
    head.skip = head.skip ? head.skip + first * head.skip_step : nullptr;
    head.gate = head.gate ? moved(head.gate, head.gate_step, bytes) : nullptr;
    work.heads = heads_;
    work.v_head = args_.v.strides[2];
    work.g_head = args_.g.strides[2];
    work.beta_head = args_.beta.strides[2];
    work.skip_head = args_.skip.strides[2];
    work.gate_head = args_.gate.strides[2];
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
    work.d_q = static_cast<char*>(of_keys_.d_q) + of_key * of_keys_.bytes;
    work.d_k = static_cast<char*>(of_keys_.d_k) + of_key * of_keys_.bytes;
    work.d_keys_are_parts = of_keys_.d_q != args_.d_q;
    const int64_t of_value = (token * work.d_v_step + first_head_ * sizes_.value_dim) * bytes;
    work.d_v = static_cast<char*>(args_.d_v) + of_value;
    work.d_gate = args_.d_gate ? static_cast<char*>(args_.d_gate) + of_value : nullptr;
    work.d_g = args_.d_g + token * work.d_g_step + first_head_ * gates;
    const int64_t of_head = token * work.d_beta_step + first_head_;
    work.d_beta = args_.d_beta + of_head;
    work.d_skip = args_.d_skip ? args_.d_skip + of_head : nullptr;
    work.scratch = scratch_;
    gated_delta_backward_kernels()[args_.dtype](work);
  }

  // Steps that change nothing have no gradients.
  void clear_padding() const {
    const int64_t bytes = element_size(args_.dtype);
    const int64_t gates = sizes_.is_per_channel ? sizes_.key_dim : 1;
    // `count` heads from `first` on
    const auto clear = [](void* x, int64_t first, int64_t count, int64_t row_bytes) {
      if (x) {
        std::memset(static_cast<char*>(x) + first * row_bytes, 0,
                    static_cast<size_t>(count * row_bytes));
      }
    };
    for (int64_t t = steps_; t < sizes_.length; ++t) {
      const int64_t token = batch_ * sizes_.length + t;
      const int64_t key = token * sizes_.key_heads + key_head_;
      const int64_t value = token * sizes_.value_heads + first_head_;
      clear(of_keys_.d_q, key, 1, sizes_.key_dim * of_keys_.bytes);
      clear(of_keys_.d_k, key, 1, sizes_.key_dim * of_keys_.bytes);
      clear(args_.d_v, value, heads_, sizes_.value_dim * bytes);
      clear(args_.d_gate, value, heads_, sizes_.value_dim * bytes);
      clear(args_.d_g, value, heads_, gates * 4);
      clear(args_.d_beta, value, heads_, 4);
      clear(args_.d_skip, value, heads_, 4);
    }
  }

  const DeltaBackwardArgs& args_;
  const KeyGradients& of_keys_;
  const DeltaSizes& sizes_;
  const int64_t batch_, key_head_, first_head_, heads_, steps_, chunks_;
  const std::vector<DeltaPosition> positions_;
  float* scratch_;
  float* kept_;      // [heads, chunks - 1, value_dim, key_dim]
  float* d_states_;  // of our value heads
};

}  // namespace

void gated_delta_backward_cpu(const DeltaBackwardArgs& args) {
  const DeltaSizes& sizes = args.sizes;
  const int64_t key_heads = sizes.key_heads, parts = parts_of(sizes);
  const int64_t count = sizes.batch * sizes.length * key_heads * sizes.key_dim;
  const auto sums =
      parts > 1 ? std::make_unique_for_overwrite<float[]>(2 * parts * count) : nullptr;
  parallel_for(sizes.batch * key_heads * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t key = i / parts, part = i % parts;
      const KeyGradients of_keys =
          sums ? KeyGradients{&sums[part * count], &sums[(parts + part) * count], 4}
               : KeyGradients{args.d_q, args.d_k, element_size(args.dtype)};
      ValueHeads(args, of_keys, key / key_heads, key % key_heads, part * sizes.group() / parts,
                 (part + 1) * sizes.group() / parts)
          .run();
    }
  });
  if (sums) {
    sum_rows({1, parts, count, &sums[0], args.d_q, KernelDtype::kFloat32, args.dtype});
    sum_rows({1, parts, count, &sums[parts * count], args.d_k, KernelDtype::kFloat32, args.dtype});
  }
}

}  // namespace mlx_anvil
