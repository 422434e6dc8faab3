// Backward of softmax_topk on the CPU, with the formulas of metal/softmax_topk/backward.metal.
//
// Chosen elements of several rows are processed side by side. A whole row is read only for a
// softmax that is not normalised over the choice.
#include "softmax_topk/simd/columns.h"
#include "softmax_topk/simd/kernels.h"
#include "softmax_topk/simd/keys.h"
#include "softmax_topk/simd/scores.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Scratch memory of a block of rows: one vector per choice and quantity.
struct GradientMemory {
  float* logits;
  float* cotangents;
  float* scores;  // then the weights

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
    const bool is_softmax = args_.scoring == RouterScoring::kSoftmax;
    const bool whole_row = is_softmax && !args_.is_normalised;
    f32v highest = gather();
    if (whole_row && args_.is_steered) {
      highest = row_maxima();
    }
    f32v sum = score(reference_of(args_, highest));
    if (whole_row) {
      sum = exponential_sums(highest);
    } else if (!args_.is_normalised) {
      sum = splat(1.0f);
    }
    scores_to_weights(sum);
    if (whole_row) {
      const f32v dot = dot_of_cotangents();
      subtract_from_cotangents(dot);
      write_rows(highest, -dot / sum);
    } else {
      std::memset(d_logits_, 0, block_.rows() * args_.experts * sizeof(T));
    }
    // Twice: the weights add up to 1 only almost, which leaves a share of the first dot product. It
    // is large beside a gradient whose terms cancel, as where one weight is almost 1.
    for (int pass = 0; args_.is_normalised && pass < 2; ++pass) {
      subtract_from_cotangents(dot_of_cotangents());
    }
    scatter();
  }

 private:
  auto expert_of(int64_t choice) const {
    return [this, choice](int64_t row) {
      return static_cast<int64_t>(indices_[row * args_.chosen + choice]);
    };
  }

  // Returns the highest chosen logit: the row's highest, unless something else steers the choice.
  // NaN ranks above all.
  f32v gather() {
    f32v highest = {};
    for (int64_t i = 0; i < args_.chosen; ++i) {
      const f32v logit = block_.load(logits_, args_.experts, expert_of(i));
      store_lanes(memory_.logits + i * kLanes, logit);
      store_lanes(memory_.cotangents + i * kLanes,
                  block_.load(d_weights_, args_.chosen, [&](int64_t) { return i; }) * args_.scale);
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
      const f32v score = relative_score(args_.scoring, logit, reference);
      store_lanes(memory_.scores + i * kLanes, score);
      sum += score;
    }
    return sum;
  }

  f32v row_maxima() const {
    f32v highest = {};
    for (int64_t row = 0; row < block_.rows(); ++row) {
      highest[row] = highest_logit(logits_ + row * args_.experts, args_.experts);
    }
    return highest;
  }

  f32v exponential_sums(f32v highest) const {
    f32v sums = splat(1.0f);
    for (int64_t row = 0; row < block_.rows(); ++row) {
      sums[row] = exponential_sum(logits_ + row * args_.experts, args_.experts, highest[row]);
    }
    return sums;
  }

  void scores_to_weights(f32v sum) {
    for (int64_t i = 0; i < args_.chosen; ++i) {
      float* const score = memory_.scores + i * kLanes;
      store_lanes(score, load_lanes(score) / sum);
    }
  }

  f32v dot_of_cotangents() const {
    f32v dot = {};
    for (int64_t i = 0; i < args_.chosen; ++i) {
      dot += load_lanes(memory_.cotangents + i * kLanes) * load_lanes(memory_.scores + i * kLanes);
    }
    return dot;
  }

  void subtract_from_cotangents(f32v dot) {
    for (int64_t i = 0; i < args_.chosen; ++i) {
      float* const cotangent = memory_.cotangents + i * kLanes;
      store_lanes(cotangent, load_lanes(cotangent) - dot);
    }
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

  void scatter() {
    for (int64_t i = 0; i < args_.chosen; ++i) {
      f32v d =
          load_lanes(memory_.scores + i * kLanes) * load_lanes(memory_.cotangents + i * kLanes);
      if (args_.scoring != RouterScoring::kSoftmax) {
        d = d * log_slope(args_.scoring, load_lanes(memory_.logits + i * kLanes));
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
