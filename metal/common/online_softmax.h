// Online softmax: the row arrives in pieces. Scores are in units of log2.
#pragma once

#include <metal_stdlib>

struct OnlineSoftmax {
  float highest;  // running maximum
  float sum;      // this lane's share of the sum of exp2(score - highest)

  METAL_FUNC void clear() thread {
    highest = -INFINITY;
    sum = 0.0f;
  }

  // The exponents' reference. It stays finite if every score so far is -inf, since -inf - -inf is
  // NaN.
  METAL_FUNC float base() const thread { return highest == -INFINITY ? 0.0f : highest; }

  // Starts a piece whose highest score is `piece`. Returns the factor that rescales earlier
  // results.
  METAL_FUNC float begin_piece(float piece) thread {
    const float before = highest;
    highest = metal::fmax(highest, piece);
    const float factor = metal::fast::exp2(before - base());
    sum *= factor;
    return factor;
  }

  // Adds a sink: a score that has no value row. Call it at the end of a row, with `total` summed
  // over all lanes.
  METAL_FUNC float add_sink(float sink, float total) const thread {
    return total + metal::fast::exp2(sink - base());
  }

  METAL_FUNC float log_sum_exp(float total) const thread {
    return M_LN2_F * (highest + metal::log2(total));
  }
};

// Returns 1 / total, or 0 for a fully masked row.
METAL_FUNC float inverse_of_total(float total) {
  return total == 0.0f ? 0.0f : 1.0f / total;
}
