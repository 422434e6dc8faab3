// softmax_topk on the CPU, forward. The definition is that of metal/softmax_topk/forward.metal.
#include "softmax_topk/cpu_choose.h"
#include "softmax_topk/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
void read_keys(const T* logits, int64_t experts, int32_t* keys) {
  for_each_vector(experts, [&](int64_t i, int64_t count) {
    const i32v some = keys_of(load_some(logits + i, count, 0.0f));
    std::memcpy(keys + i, &some, sizeof(some));
    for (int64_t beyond = count; beyond < kLanes; ++beyond) {
      keys[i + beyond] = kNoKey;
    }
  });
}

// The sum of e^(logit - highest) over a row; 0 where `highest` is NaN or infinite, for which scores
// are NaN.
float exponential_sum(const int32_t* keys, int64_t experts, float highest) {
  f32v sum = {};
  for (int64_t i = 0; i < experts; i += kLanes) {
    // The padding gives back a NaN, and that 0.
    const f32v logits = logits_of(load_bits<i32v>(keys + i));
    sum += exp_nonpositive<Accuracy::kFloat32>(logits - highest);
  }
  return lane_sum(sum);
}

template <class T>
void write_weights(const RouterForwardArgs& args, const ChoiceMemory& memory, T* weights) {
  // The first key is still the largest.
  const float highest = logits_of(splat_key(memory.chosen_keys[0]))[0];
  const float reference = reference_of(args, highest);
  const float of_row = args.is_sigmoid || args.is_normalised
                           ? 1.0f
                           : exponential_sum(memory.keys, args.experts, highest);
  if (args.in_index_order) {
    sort_by_index(memory, args.chosen);
  }
  float* const scores = reinterpret_cast<float*>(memory.candidates);
  f32v sum = {};
  for_each_vector(args.chosen, [&](int64_t i, int64_t count) {
    const f32v logits = logits_of(load_bits<i32v>(memory.chosen_keys + i));
    const f32v some = first_lanes(relative_score(args.is_sigmoid, logits, reference), count);
    store_lanes(scores + i, some);
    sum += some;
  });
  const float total = args.is_normalised ? lane_sum(sum) : of_row;
  for_each_vector(args.chosen, [&](int64_t i, int64_t count) {
    store_some(weights + i, count, load_lanes(scores + i) / splat(total));
  });
}

template <class T>
void forward(const RouterForwardArgs& args, int64_t begin, int64_t end, void* scratch) {
  const ChoiceMemory memory(scratch, args.experts, args.chosen);
  for (int64_t row = begin; row < end; ++row) {
    read_keys(static_cast<const T*>(args.logits) + row * args.experts, args.experts, memory.keys);
    choose(memory, args.experts, args.chosen);
    write_weights(args, memory, static_cast<T*>(args.weights) + row * args.chosen);
    uint32_t* const indices = args.indices + row * args.chosen;
    for (int64_t i = 0; i < args.chosen; ++i) {
      indices[i] = static_cast<uint32_t>(memory.chosen_indices[i]);
    }
  }
}

}  // namespace

constinit const RouterForwardTable router_forward_kernels_table = {
    {forward<float>, forward<f16>, forward<bf16>},
    ChoiceMemory::bytes,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
