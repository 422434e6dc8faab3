// The gradient of softmax_topk on the CPU. The formulas are those of
// metal/softmax_topk/backward.metal.
#include "softmax_topk/cpu_scores.h"
#include "softmax_topk/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Memory of a row: its exponentials, and of what was chosen, filled up with zeros.
struct GradientMemory {
  float* exponentials;  // e^(logit - highest) of all experts
  float* logits;
  float* cotangents;
  float* scores;

  GradientMemory(void* scratch, int64_t experts, int64_t chosen)
      : exponentials(static_cast<float*>(scratch)),
        logits(exponentials + padded(experts)),
        cotangents(logits + padded(chosen)),
        scores(cotangents + padded(chosen)) {}

  static int64_t bytes(int64_t experts, int64_t chosen) {
    return 4 * (padded(experts) + 3 * padded(chosen));
  }
};

template <class T>
class RowGradient {
 public:
  RowGradient(const RouterBackwardArgs& args, void* scratch)
      : args_(args), memory_(scratch, args.experts, args.chosen) {}

  void write(int64_t row) {
    const T* const logits = static_cast<const T*>(args_.logits) + row * args_.experts;
    const uint32_t* const indices = args_.indices + row * args_.chosen;
    T* const to = static_cast<T*>(args_.d_logits) + row * args_.experts;
    const float highest =
        gather(logits, indices, static_cast<const T*>(args_.d_weights) + row * args_.chosen);
    const bool whole_row = !args_.is_sigmoid && !args_.is_normalised;
    const float of_chosen = score(reference_of(args_, highest));
    const float sum = whole_row             ? exponentiate(logits, highest)
                      : args_.is_normalised ? of_chosen
                                            : 1.0f;
    const float dot = whole_row || args_.is_normalised ? dot_of_cotangents(sum) : 0.0f;
    const float factor = whole_row ? -dot / sum : 0.0f;
    for_each_vector(args_.experts, [&](int64_t i, int64_t count) {
      store_some(to + i, count, whole_row ? load_lanes(memory_.exponentials + i) * factor : f32v{});
    });
    scatter(indices, sum, dot, to);
  }

 private:
  // Gives the highest of the logits that were chosen, NaN above all, which is that of the row.
  float gather(const T* logits, const uint32_t* indices, const T* d_weights) {
    for_each_vector(args_.chosen, [&](int64_t i, int64_t count) {
      T some[kLanes] = {};
      for (int64_t lane = 0; lane < count; ++lane) {
        some[lane] = logits[indices[i + lane]];
      }
      store_lanes(memory_.logits + i, load_lanes(some));
      store_lanes(memory_.cotangents + i, load_some(d_weights + i, count, 0.0f));
    });
    float highest = memory_.logits[0];
    for (int64_t i = 1; i < args_.chosen; ++i) {
      const float logit = memory_.logits[i];
      highest = logit > highest || logit != logit ? logit : highest;
    }
    return highest;
  }

  // Gives the sum of the scores.
  float score(float reference) {
    f32v sum = {};
    for_each_vector(args_.chosen, [&](int64_t i, int64_t count) {
      const f32v all = relative_score(args_.is_sigmoid, load_lanes(memory_.logits + i), reference);
      const f32v some = first_lanes(all, count);
      store_lanes(memory_.scores + i, some);
      sum += some;
    });
    return lane_sum(sum);
  }

  // Gives the sum of the exponentials.
  float exponentiate(const T* logits, float highest) {
    f32v sum = {};
    for_each_vector(args_.experts, [&](int64_t i, int64_t count) {
      const f32v all = exp(load_some(logits + i, count, 0.0f) - highest);
      const f32v some = first_lanes(all, count);
      store_lanes(memory_.exponentials + i, some);
      sum += some;
    });
    return lane_sum(sum);
  }

  float dot_of_cotangents(float sum) {
    f32v dot = {};
    for (int64_t i = 0; i < args_.chosen; i += kLanes) {
      dot += load_lanes(memory_.cotangents + i) * (load_lanes(memory_.scores + i) / splat(sum));
    }
    return lane_sum(dot);
  }

  void scatter(const uint32_t* indices, float sum, float dot, T* to) {
    for_each_vector(args_.chosen, [&](int64_t i, int64_t count) {
      f32v d =
          load_lanes(memory_.scores + i) / splat(sum) * (load_lanes(memory_.cotangents + i) - dot);
      if (args_.is_sigmoid) {
        // 1 - s as sigmoid(-logit), which does not cancel.
        d = d * relative_score(true, -load_lanes(memory_.logits + i), 0.0f);
      }
      T some[kLanes];
      store_lanes(some, d);
      for (int64_t lane = 0; lane < count; ++lane) {
        to[indices[i + lane]] = some[lane];
      }
    });
  }

  const RouterBackwardArgs& args_;
  const GradientMemory memory_;
};

template <class T>
void backward(const RouterBackwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  RowGradient<T> gradient(args, scratch);
  for (int64_t row = begin; row < end; ++row) {
    gradient.write(row);
  }
}

}  // namespace

constinit const RouterBackwardTable router_backward_kernels_table = {
    {backward<float>, backward<f16>, backward<bf16>},
    GradientMemory::bytes,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
