// Softmax of a row that arrives piece by piece, in units of log2.
#pragma once

#include <metal_stdlib>

struct OnlineSoftmax {
  float highest;  // so far
  float sum;      // of exp2(score - highest), as far as this lane has added it up

  METAL_FUNC void clear() thread {
    highest = -INFINITY;
    sum = 0.0f;
  }

  // What exponents are taken relative to: where nothing was seen, a number all the same.
  METAL_FUNC float base() const thread { return highest == -INFINITY ? 0.0f : highest; }

  // A piece whose highest score is `piece` begins. Returns by what earlier results shrink.
  METAL_FUNC float begin_piece(float piece) thread {
    const float before = highest;
    highest = metal::fmax(highest, piece);
    const float factor = metal::fast::exp2(before - base());
    sum *= factor;
    return factor;
  }

  // A score without value. It is the end of a row: with `total`, the sum over all lanes.
  METAL_FUNC float add_sink(float sink, float total) const thread {
    return total + metal::fast::exp2(sink - base());
  }

  METAL_FUNC float log_sum_exp(float total) const thread {
    return M_LN2_F * (highest + metal::log2(total));
  }
};

// 1 / total, and 0 for a row that saw nothing.
METAL_FUNC float inverse_of_total(float total) {
  return total == 0.0f ? 0.0f : 1.0f / total;
}
