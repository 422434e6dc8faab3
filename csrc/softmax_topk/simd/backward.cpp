// Backward of softmax_topk on the CPU, with the formulas of metal/softmax_topk/backward.metal.
//
// Chosen elements of several rows are processed side by side. A whole row is read only for a
// softmax that is not normalised over the choice.
#include "softmax_topk/simd/columns.h"
#include "softmax_topk/simd/kernels.h"
#include "softmax_topk/simd/scores.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Scratch memory of a block of rows: one vector per choice and quantity.
struct GradientMemory {
  float* logits;
  float* cotangents;
  float* scores;

  GradientMemory(void* scratch, int64_t chosen)
      : logits(static_cast<float*>(scratch)),
        cotangents(logits + chosen * kLanes),
        scores(cotangents + chosen * kLanes) {}

  static int64_t bytes(int64_t, int64_t chosen) { return 4 * 3 * chosen * kLanes; }
};

template <class T>
class BlockGradient {
 public:
  BlockGradient(const RouterBackwardArgs& args, void* scratch, RowBlock block, int64_t first_row)
      : args_(args),
        memory_(scratch, args.chosen),
        block_(block),
        logits_(static_cast<const T*>(args.logits) + first_row * args.experts),
        indices_(args.indices + first_row * args.chosen),
        d_weights_(static_cast<const T*>(args.d_weights) + first_row * args.chosen),
        d_logits_(static_cast<T*>(args.d_logits) + first_row * args.experts) {}

  void run() {
    const bool whole_row = !args_.is_sigmoid && !args_.is_normalised;
    const f32v highest = gather();
    f32v sum = score(reference_of(args_, highest));
    if (whole_row) {
      sum = exponential_sums(highest);
    } else if (!args_.is_normalised) {
      sum = splat(1.0f);
    }
    const f32v dot = whole_row || args_.is_normalised ? dot_of_cotangents(sum) : f32v{};
    if (whole_row) {
      write_rows(highest, -dot / sum);
    } else {
      std::memset(d_logits_, 0, block_.rows() * args_.experts * sizeof(T));
    }
    scatter(sum, dot);
  }

 private:
  auto expert_of(int64_t choice) const {
    return [this, choice](int64_t row) {
      return static_cast<int64_t>(indices_[row * args_.chosen + choice]);
    };
  }

  // Returns the highest chosen logit, which is also the row's highest. NaN ranks above all.
  f32v gather() {
    f32v highest = {};
    for (int64_t i = 0; i < args_.chosen; ++i) {
      const f32v logit = block_.load(logits_, args_.experts, expert_of(i));
      store_lanes(memory_.logits + i * kLanes, logit);
      store_lanes(memory_.cotangents + i * kLanes,
                  block_.load(d_weights_, args_.chosen, [&](int64_t) { return i; }));
      const i32v higher = (logit > highest) | (logit != logit);
      highest = i == 0 ? logit : higher ? logit : highest;
    }
    return highest;
  }

  // Returns the sum of the scores.
  f32v score(f32v reference) {
    f32v sum = {};
    for (int64_t i = 0; i < args_.chosen; ++i) {
      const f32v logit = load_lanes(memory_.logits + i * kLanes);
      const f32v score = relative_score(args_.is_sigmoid, logit, reference);
      store_lanes(memory_.scores + i * kLanes, score);
      sum += score;
    }
    return sum;
  }

  f32v exponential_sums(f32v highest) const {
    f32v sums = splat(1.0f);
    for (int64_t row = 0; row < block_.rows(); ++row) {
      sums[row] = exponential_sum(logits_ + row * args_.experts, args_.experts, highest[row]);
    }
    return sums;
  }

  f32v dot_of_cotangents(f32v sum) const {
    f32v dot = {};
    for (int64_t i = 0; i < args_.chosen; ++i) {
      const f32v weight = load_lanes(memory_.scores + i * kLanes) / sum;
      dot += load_lanes(memory_.cotangents + i * kLanes) * weight;
    }
    return dot;
  }

  // Writes e^(logit - highest) * factor for all experts.
  void write_rows(f32v highest, f32v factor) {
    for (int64_t row = 0; row < block_.rows(); ++row) {
      const int64_t at = row * args_.experts;
      for_each_vector(args_.experts, [&](int64_t i, int64_t count) {
        const f32v logit = load_some(logits_ + at + i, count);
        store_some(d_logits_ + at + i, count, exp(logit - highest[row]) * factor[row]);
      });
    }
  }

  void scatter(f32v sum, f32v dot) {
    for (int64_t i = 0; i < args_.chosen; ++i) {
      const f32v weight = load_lanes(memory_.scores + i * kLanes) / sum;
      f32v d = weight * (load_lanes(memory_.cotangents + i * kLanes) - dot);
      if (args_.is_sigmoid) {
        // Computes 1 - s as sigmoid(-logit), which does not cancel.
        d = d * relative_score(true, -load_lanes(memory_.logits + i * kLanes), f32v{});
      }
      block_.store(d_logits_, args_.experts, expert_of(i), d);
    }
  }

  const RouterBackwardArgs& args_;
  const GradientMemory memory_;
  const RowBlock block_;
  const T* const logits_;
  const uint32_t* const indices_;
  const T* const d_weights_;
  T* const d_logits_;
};

template <class T>
void backward(const RouterBackwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  for_each_block_of_rows(begin, end, [&](RowBlock block, int64_t first) {
    BlockGradient<T>(args, scratch, block, first).run();
  });
}

}  // namespace

constinit const RouterBackwardTable router_backward_kernels_table = {
    .of = {.float32 = backward<float>, .float16 = backward<f16>, .bfloat16 = backward<bf16>},
    .scratch_bytes = GradientMemory::bytes,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
