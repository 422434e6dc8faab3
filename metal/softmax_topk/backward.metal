// Gradient of softmax_topk with respect to the logits, for the experts that forward chose. With
// their weights w, cotangents g and dot = sum of g w over the chosen experts:
//   normalised:  d_logit = w (g - dot), and for sigmoid scores s times 1 - s
//   sigmoid:     d_logit = s (1 - s) g
//   softmax:     d_logit = w (g - dot)
// For sqrtsoftplus, sigmoid(logit) / (2 softplus(logit)) takes the place of 1 - s. All is times
// scale: the cotangents are.
// The gradient of an expert that was not chosen is 0, except for a softmax that is not normalised:
// there it is -p dot, where p is that expert's softmax.
//
// Kernels: softmax_topk_backward_<dtype>_<elements of a lane>.
// Bindings: logits, indices, d_weights, d_logits, params. All arrays are dense.
// Grid, threadgroup, function constants and alignment: as in forward.
//
//   load the lane's choices: index, logit, cotangent
//   highest = the largest chosen logit, or that of the row (softmax); scores relative to it
//   sum = sum of the chosen scores (normalised), of the row's exponentials (softmax), or 1
//   dot = sum of cotangent * score / sum
//   normalised: the cotangents less dot, and dot again of what is left
//   store d_logit of the lane's choices
//   for each element of the row that was not chosen: store 0 or -p dot
// Every element is written once: by the lane with its choice, or by the lane that holds it.
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/softmax_topk/rows.h"

// Returns a bit for each of the 32 elements from `begin` on that was chosen, equal in all lanes.
METAL_FUNC uint chosen_bits(uint begin, const thread uint (&mine)[kSlots]) {
  uint bits = 0;
  MLX_ANVIL_UNROLL
  for (uint slot = 0; slot < kSlots; ++slot) {
    const uint distance = mine[slot] - begin;  // wraps for an index below `begin`
    bits |= distance < kLanes ? 1u << distance : 0u;
  }
  return metal::simd_or(bits);
}

// Returns the derivative of the score's logarithm.
METAL_FUNC float log_slope(float logit) {
  if (is_softmax()) {
    return 1.0f;
  }
  if (is_sigmoid) {
    return sigmoid(-logit).value;
  }
  const float small = metal::precise::exp(-metal::fabs(logit)), ratio = log1p_ratio(small);
  const float softplus = logit > 0.0f ? logit + small * ratio : ratio;  // over small if negative
  return 0.5f / ((1.0f + small) * softplus);
}

METAL_FUNC float dot_of(const thread float (&cotangents)[kSlots],
                        const thread float (&scores)[kSlots],
                        float sum) {
  const float first = cotangents[0] * (scores[0] / sum);
  return metal::simd_sum(metal::fma(cotangents[1], scores[1] / sum, first));
}

template <typename T, int kHeld>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void softmax_topk_backward(
    const device T* logits [[buffer(0)]],
    const device uint* indices [[buffer(1)]],
    const device T* d_weights [[buffer(2)]],
    device T* d_logits [[buffer(3)]],
    constant SoftmaxTopkParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = row_of(group, groups, simdgroup);
  if (row >= params.rows) {
    return;
  }
  const bool whole_row = is_softmax() && !is_normalised;
  const device T* const from = logits + static_cast<long>(row) * params.experts;
  device T* const to = d_logits + static_cast<long>(row) * params.experts;

  uint mine[kSlots];
  float chosen_logits[kSlots], cotangents[kSlots], scores[kSlots];
  int chosen_key = kNoKey;  // the highest
  MLX_ANVIL_UNROLL
  for (uint slot = 0; slot < kSlots; ++slot) {
    const uint i = slot * kLanes + lane;
    const bool exists = i < params.chosen;
    const long at = static_cast<long>(row) * params.chosen + i;
    mine[slot] = exists ? indices[at] : 0xffffffffu;
    cotangents[slot] = exists ? static_cast<float>(d_weights[at]) * params.scale : 0.0f;
    chosen_logits[slot] = exists ? static_cast<float>(from[mine[slot]]) : 0.0f;
    chosen_key = metal::max(chosen_key, exists ? key_of(chosen_logits[slot]) : kNoKey);
  }
  float highest = logit_of(metal::simd_max(chosen_key));
  HeldKeys<T, kHeld> held;
  if (whole_row) {  // a bias or groups may leave the largest logit of the row out
    held.load(from, 0, params.experts, lane);
    highest = logit_of(highest_key<T, kHeld>(from, params, lane, held));
  }
  const float reference = reference_of(highest);
  MLX_ANVIL_UNROLL
  for (uint slot = 0; slot < kSlots; ++slot) {
    const float score = relative_score(chosen_logits[slot], reference);
    scores[slot] = slot * kLanes + lane < params.chosen ? score : 0.0f;
  }

  float sum = 1.0f;
  if (whole_row) {
    sum = metal::simd_sum(exponential_sum<T, kHeld>(from, params, lane, highest, held));
  } else if (is_normalised) {
    sum = metal::simd_sum(scores[0] + scores[1]);
  }
  float dot = 0.0f;
  if (is_normalised || whole_row) {
    dot = dot_of(cotangents, scores, sum);
  }
  // The weights add up to 1 only almost, which leaves a share of dot. It is large beside a gradient
  // whose terms cancel, as where one weight is almost 1.
  if (is_normalised) {
    cotangents[0] -= dot;
    cotangents[1] -= dot;
    dot = dot_of(cotangents, scores, sum);
  }

  MLX_ANVIL_UNROLL
  for (uint slot = 0; slot < kSlots; ++slot) {
    if (slot * kLanes + lane < params.chosen) {
      const float slope = log_slope(chosen_logits[slot]);
      to[mine[slot]] = static_cast<T>(scores[slot] / sum * slope * (cotangents[slot] - dot));
    }
  }
  for (uint begin = 0; begin < params.experts; begin += kLanes * kHeld) {
    if (whole_row) {
      held.move_to(from, begin, params.experts, lane);
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const uint at = begin + i * kLanes + lane;
      const uint bits = chosen_bits(begin + i * kLanes, mine);
      if (at < params.experts && !(bits >> lane & 1)) {
        float value = 0.0f;
        if (whole_row) {
          value = -dot * (metal::precise::exp(logit_of(held.keys[i]) - highest) / sum);
        }
        to[at] = static_cast<T>(value);
      }
    }
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T, held) \
  MLX_ANVIL_KERNEL("softmax_topk_backward_" #dtype "_" #held, softmax_topk_backward<T, held>)

#define INSTANTIATE_DTYPES(held)    \
  INSTANTIATE(float32, float, held) \
  INSTANTIATE(float16, half, held)  \
  INSTANTIATE(bfloat16, bfloat, held)

INSTANTIATE_DTYPES(4)
INSTANTIATE_DTYPES(16)
