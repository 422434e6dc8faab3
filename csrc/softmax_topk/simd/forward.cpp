// Forward of softmax_topk on the CPU, as defined in metal/softmax_topk/forward.metal.
//
// Short rows are processed side by side; longer rows, and those with a bias or groups, one at a
// time. The path depends only on the row's length and the options.
#include "softmax_topk/simd/choose.h"
#include "softmax_topk/simd/columns.h"
#include "softmax_topk/simd/kernels.h"
#include "softmax_topk/simd/steer.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

constexpr int64_t kShortRow = 2 * kLanes;

// ---- short rows ---------------------------------------------------------------------------------

template <class T>
class ShortRows {
 public:
  ShortRows(const RouterForwardArgs& args, RowBlock block, int64_t first_row)
      : args_(args), block_(block), row_(first_row) {}

  void run() {
    choose();
    const f32v reference = reference_of(args_, logits_of(chosen_[0]));
    f32v scores[kShortRow], sum = {};
    for (int64_t i = 0; i < args_.chosen; ++i) {
      scores[i] = relative_score(args_.scoring, logits_of(chosen_[i]), reference);
      sum += scores[i];
    }
    if (!args_.is_normalised) {
      sum = args_.scoring == RouterScoring::kSoftmax ? exponential_sum() : splat(1.0f);
    }
    T* const weights = static_cast<T*>(args_.weights) + row_ * args_.chosen;
    for (int64_t i = 0; i < args_.chosen; ++i) {
      int32_t places[kLanes];
      const i32v place = place_of(i);
      std::memcpy(places, &place, sizeof(places));
      block_.store(
          weights, args_.chosen, [&](int64_t row) { return places[row]; },
          scores[i] / sum * args_.scale);
      for (int64_t row = 0; row < block_.rows(); ++row) {
        args_.indices[(row_ + row) * args_.chosen + places[row]] =
            static_cast<uint32_t>(indices_[i][row]);
      }
    }
  }

 private:
  // Insertion sort: each expert is inserted behind the better and equal ones, and the rest shift
  // down.
  void choose() {
    const T* const logits = static_cast<const T*>(args_.logits) + row_ * args_.experts;
    for (int64_t i = 0; i < args_.chosen; ++i) {
      chosen_[i] = splat_key(kNoKey);
      indices_[i] = i32v{};
    }
    for (int64_t expert = 0; expert < args_.experts; ++expert) {
      i32v key = keys_of(block_.load(logits, args_.experts, [&](int64_t) { return expert; }));
      i32v index = i32v{} + static_cast<int32_t>(expert);
      keys_[expert] = key;
      i32v moves = {};
      for (int64_t i = 0; i < args_.chosen; ++i) {
        const i32v other_key = chosen_[i], other_index = indices_[i];
        moves |= key > other_key;
        chosen_[i] = moves ? key : other_key;
        indices_[i] = moves ? index : other_index;
        key = moves ? other_key : key;
        index = moves ? other_index : index;
      }
    }
  }

  // Sums over all experts. Returns 0 if the highest logit is NaN or infinite; the scores are NaN
  // then.
  f32v exponential_sum() const {
    f32v sum = {};
    for (int64_t expert = 0; expert < args_.experts; ++expert) {
      sum += exp_nonpositive<Accuracy::kFloat32>(logits_of(keys_[expert]) - logits_of(chosen_[0]));
    }
    return sum;
  }

  // Returns the position of a choice within its output row.
  i32v place_of(int64_t choice) const {
    if (!args_.in_index_order) {
      return i32v{} + static_cast<int32_t>(choice);
    }
    i32v place = {};
    for (int64_t i = 0; i < args_.chosen; ++i) {
      place -= indices_[i] < indices_[choice];
    }
    return place;
  }

  const RouterForwardArgs& args_;
  const RowBlock block_;
  const int64_t row_;
  i32v keys_[kShortRow];
  i32v chosen_[kShortRow];  // best first
  i32v indices_[kShortRow];
};

// ---- longer rows --------------------------------------------------------------------------------

template <class T>
void read_keys(const T* logits, int64_t experts, int32_t* keys) {
  for_each_vector(experts, [&](int64_t i, int64_t count) {
    const i32v some = keys_of(load_some(logits + i, count));
    std::memcpy(keys + i, &some, sizeof(some));
    for (int64_t beyond = count; beyond < kLanes; ++beyond) {
      keys[i + beyond] = kNoKey;
    }
  });
}

template <class T>
void long_row(const RouterForwardArgs& args, const ChoiceMemory& memory, int64_t row) {
  const T* const logits = static_cast<const T*>(args.logits) + row * args.experts;
  T* const weights = static_cast<T*>(args.weights) + row * args.chosen;
  uint32_t* const indices = args.indices + row * args.chosen;
  read_keys(logits, args.experts, memory.keys);
  if (args.is_steered) {
    Steering(args, memory, row).run(logits);
  }
  choose(memory, args.experts, args.chosen);
  const f32v highest = args.is_steered ? take_logits(args, memory, logits)
                                       : logits_of(splat_key(memory.chosen_keys[0]));
  if (args.in_index_order) {
    sort_by_index(memory, args.chosen);
  }
  const f32v reference = reference_of(args, highest);
  float* const scores = reinterpret_cast<float*>(memory.candidates);
  f32v sum = {};
  for_each_vector(args.chosen, [&](int64_t i, int64_t count) {
    const f32v chosen = logits_of(load_bits<i32v>(memory.chosen_keys + i));
    const f32v some = first_lanes(relative_score(args.scoring, chosen, reference), count);
    store_lanes(scores + i, some);
    sum += some;
  });
  float total = 1.0f;
  if (args.is_normalised) {
    total = lane_sum(sum);
  } else if (args.scoring == RouterScoring::kSoftmax) {
    total = exponential_sum(logits, args.experts, highest[0]);
  }
  for_each_vector(args.chosen, [&](int64_t i, int64_t count) {
    store_some(weights + i, count, load_lanes(scores + i) / splat(total) * args.scale);
  });
  for (int64_t i = 0; i < args.chosen; ++i) {
    indices[i] = static_cast<uint32_t>(memory.chosen_indices[i]);
  }
}

template <class T>
void forward(const RouterForwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  if (args.experts <= kShortRow && !args.is_steered) {
    for_each_block_of_rows(
        begin, end, [&](RowBlock block, int64_t first) { ShortRows<T>(args, block, first).run(); });
    return;
  }
  const ChoiceMemory memory(scratch, args.experts, args.chosen);
  for (int64_t row = begin; row < end; ++row) {
    long_row<T>(args, memory, row);
  }
}

}  // namespace

constinit const RouterForwardTable router_forward_kernels_table = {
    .of = {.float32 = forward<float>, .float16 = forward<f16>, .bfloat16 = forward<bf16>},
    .scratch_bytes = ChoiceMemory::bytes,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
