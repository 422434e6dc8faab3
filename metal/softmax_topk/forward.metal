// softmax_topk: finds the `chosen` largest logits of each row (ties go to the lowest index) and
// their weights. With the score e^logit or sigmoid(logit):
//   weight = score / sum; sum: over the chosen (normalised), over the row (softmax), or 1 (sigmoid)
// times scale. With a bias the largest score + bias are chosen; with groups, those of the best
// groups (steering.h).
//
// Kernels: softmax_topk_forward_<dtype>_<elements of a lane>.
// Bindings: logits, bias (anything if there is none), weights, indices, params. All arrays are
// dense.
// Grid: linear_grid of rows, eight to a threadgroup. Threadgroup: 256, one simdgroup per row.
// Function constants: see rows.h and steering.h. No alignment is assumed. A row of up to 32 *
// <elements of a lane> experts stays in registers. At most 64 experts are chosen.
//
//   load the row as keys; with a bias or groups, as those of the scores that rank
//   repeat `chosen` times:
//     choice = largest key after the previous choice   (simd_max, then simd_min of the index)
//     the lane with this slot keeps the choice
//   scores relative to the largest logit; sum them
//   if in_index_order: place = number of choices with a smaller index
//   store score / sum and index at each place
#include "metal/common/kernel.h"
#include "metal/softmax_topk/rows.h"
#include "metal/softmax_topk/steering.h"

METAL_FUNC bool is_steered() {
  return has_bias || has_groups;
}

struct Choice {
  int key;
  int index;

  // True if the element comes after this one in the order of choice.
  METAL_FUNC bool precedes(int other_key, int other_index) const thread {
    return other_key < key || (other_key == key && other_index > index);
  }
};

// Returns the first element after `last`, equal in all lanes.
template <typename T, int kHeld>
METAL_FUNC Choice next_choice(const device T* row,
                              constant SoftmaxTopkParams& params,
                              uint lane,
                              Choice last,
                              const thread Steering& steering,
                              thread HeldKeys<T, kHeld>& held) {
  Choice best = {kNoKey, 0x7fffffff};  // of this lane
  for (uint begin = 0; begin < params.experts; begin += kLanes * kHeld) {
    if (is_steered()) {
      steering.move_to<T, kHeld>(row, begin, params, lane, held);
    } else {
      held.move_to(row, begin, params.experts, lane);
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int key = held.keys[i], index = held.element(i, lane);
      if (key > best.key && last.precedes(key, index)) {
        best.key = key;
        best.index = index;
      }
    }
  }
  Choice next;
  next.key = metal::simd_max(best.key);
  next.index = metal::simd_min(best.key == next.key ? best.index : 0x7fffffff);
  return next;
}

// Ranks a lane's choices by index.
METAL_FUNC void index_order(uint chosen,
                            const thread Choice (&mine)[kSlots],
                            thread uint (&places)[kSlots]) {
  places[0] = places[1] = 0;
  for (uint i = 0; i < chosen; ++i) {
    const int held = i < kLanes ? mine[0].index : mine[1].index;
    const int other = metal::simd_shuffle(held, static_cast<ushort>(i % kLanes));
    places[0] += other < mine[0].index;
    places[1] += other < mine[1].index;
  }
}

template <typename T, int kHeld>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void softmax_topk_forward(
    const device T* logits [[buffer(0)]],
    const device float* bias [[buffer(1)]],
    device T* weights [[buffer(2)]],
    device uint* indices [[buffer(3)]],
    constant SoftmaxTopkParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = row_of(group, groups, simdgroup);
  if (row >= params.rows) {
    return;
  }
  const device T* const from = logits + static_cast<long>(row) * params.experts;
  HeldKeys<T, kHeld> held;
  held.load(from, 0, params.experts, lane);

  Steering steering;
  if (is_steered()) {
    const device float* const own =
        bias + static_cast<long>(row / params.rows_per_bias) * params.experts;
    steering = steer<T, kHeld>(from, own, params, lane, held);
  }

  Choice mine[kSlots] = {{kNoKey, 0}, {kNoKey, 0}};
  Choice last = {0x7fffffff, -1};  // comes before every element
  float highest = 0.0f;
  for (uint i = 0; i < params.chosen; ++i) {
    last = next_choice<T, kHeld>(from, params, lane, last, steering, held);
    highest = i == 0 ? logit_of(last.key) : highest;
    MLX_ANVIL_UNROLL
    for (uint slot = 0; slot < kSlots; ++slot) {
      if (i == slot * kLanes + lane) {
        mine[slot] = last;
      }
    }
  }

  if (has_bias) {  // the keys are no longer those of logits
    int key = kNoKey;
    MLX_ANVIL_UNROLL
    for (uint slot = 0; slot < kSlots; ++slot) {
      if (slot * kLanes + lane < params.chosen) {
        mine[slot].key = key_of(static_cast<float>(from[mine[slot].index]));
        key = metal::max(key, mine[slot].key);
      }
    }
    highest = logit_of(metal::simd_max(key));
  }
  if (is_steered() && is_softmax() && !is_normalised) {
    highest = steering.reference;
  }
  const float reference = reference_of(highest);
  float scores[kSlots];
  uint places[kSlots];
  MLX_ANVIL_UNROLL
  for (uint slot = 0; slot < kSlots; ++slot) {
    places[slot] = slot * kLanes + lane;
    const float score = relative_score(logit_of(mine[slot].key), reference);
    scores[slot] = places[slot] < params.chosen ? score : 0.0f;
  }
  float sum = 1.0f;
  if (is_normalised) {
    sum = metal::simd_sum(scores[0] + scores[1]);
  } else if (is_steered()) {
    sum = is_softmax() ? steering.sum : 1.0f;
  } else if (is_softmax()) {
    sum = metal::simd_sum(exponential_sum<T, kHeld>(from, params, lane, highest, held));
  }
  if (in_index_order) {
    index_order(params.chosen, mine, places);
  }
  MLX_ANVIL_UNROLL
  for (uint slot = 0; slot < kSlots; ++slot) {
    if (slot * kLanes + lane < params.chosen) {
      const long to = static_cast<long>(row) * params.chosen + places[slot];
      weights[to] = static_cast<T>(scores[slot] / sum * params.scale);
      indices[to] = mine[slot].index;
    }
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T, held) \
  MLX_ANVIL_KERNEL("softmax_topk_forward_" #dtype "_" #held, softmax_topk_forward<T, held>)

#define INSTANTIATE_DTYPES(held)    \
  INSTANTIATE(float32, float, held) \
  INSTANTIATE(float16, half, held)  \
  INSTANTIATE(bfloat16, bfloat, held)

INSTANTIATE_DTYPES(4)
INSTANTIATE_DTYPES(16)
