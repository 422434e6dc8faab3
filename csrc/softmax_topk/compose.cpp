#include "softmax_topk/compose.h"

#include <algorithm>
#include <limits>

namespace mlx_anvil {

namespace {

mx::array compose_scores(RouterScoring scoring, const mx::array& logits, mx::Stream s) {
  switch (scoring) {
    case RouterScoring::kSoftmax:
      return mx::softmax(logits, -1, true, s);
    case RouterScoring::kSigmoid:
      return mx::sigmoid(logits, s);
    case RouterScoring::kSqrtSoftplus:
      break;
  }
  return mx::sqrt(mx::logaddexp(logits, mx::array(0.0f), s), s);
}

// ---- the choice

bool sums_two(const RouterOptions& options) {
  return options.group_scoring == GroupScoring::kSumOfTwo;
}

// Maps float32 to integers of the same order, with NaN above infinity and both zeros equal.
mx::array keys_of(const mx::array& values, mx::Stream s) {
  constexpr int32_t kMagnitude = std::numeric_limits<int32_t>::max();
  const mx::array positive_zero = mx::add(values, mx::array(0.0f), s);
  const mx::array bits = mx::view(positive_zero, mx::int32, s);
  const mx::array flipped = mx::bitwise_xor(bits, mx::array(kMagnitude), s);
  const mx::array key = mx::where(mx::less(bits, mx::array(0), s), flipped, bits, s);
  return mx::where(mx::isnan(positive_zero, s), mx::array(kMagnitude), key, s);
}

// Returns the indices of each row, the largest key first. It sorts unique int64 keys, with the
// index in the lower half, so that the result does not depend on how MLX's sort treats ties.
mx::array descending_order(const mx::array& keys, mx::Stream s) {
  const mx::array descending =
      mx::multiply(mx::astype(keys, mx::int64, s), mx::array(-(int64_t{1} << 32), mx::int64), s);
  const mx::array number = mx::arange(0, keys.shape(-1), 1, mx::int64, s);
  return mx::argsort(mx::add(descending, number, s), -1, s);
}

// A bias under vmap has leading axes of the logits. Adds those that it lacks.
mx::array beside_rows(const mx::array& bias, const mx::array& logits, mx::Stream s) {
  mx::Shape shape(logits.ndim(), 1);
  std::copy(bias.shape().begin(), bias.shape().end() - 1, shape.begin());
  shape.back() = bias.shape(-1);
  return mx::reshape(bias, shape, s);
}

// Replaces the keys of the experts whose group is not among the best ones.
mx::array mask_groups(const RouterOptions& options,
                      const mx::array& values,
                      const mx::array& keys,
                      mx::Stream s) {
  const int groups = static_cast<int>(options.groups), size = keys.shape(-1) / groups;
  mx::Shape shape = keys.shape();
  shape.back() = groups;
  shape.push_back(size);
  mx::array best = mx::sort(mx::reshape(values, shape, s), -1, s);  // NaN last
  mx::Shape start(shape.size(), 0);
  start.back() = size - (sums_two(options) ? 2 : 1);
  best = mx::sum(mx::slice(best, start, shape, s), -1, false, s);
  const mx::array places = mx::argsort(descending_order(keys_of(best, s), s), -1, s);
  const mx::array kept = mx::less(places, mx::array(static_cast<uint32_t>(options.kept_groups)), s);
  const mx::array grouped = mx::where(mx::expand_dims(kept, -1, s), mx::reshape(keys, shape, s),
                                      mx::array(masked_key(options)), s);
  return mx::reshape(grouped, keys.shape(), s);
}

// The weights of a given choice and their derivatives, in float32 for every dtype. The derivatives
// are written out because MLX's derivative of a sigmoid computes 1 - s, which cancels if s is
// nearly 1.
class Formulas {
 public:
  Formulas(const RouterOptions& options,
           const mx::array& logits,
           const mx::array& indices,
           mx::Stream stream)
      : options_(options),
        s_(stream),
        logits_(wide(logits)),
        indices_(mx::stop_gradient(indices, s_)) {}

  mx::array wide(const mx::array& x) const { return mx::astype(x, mx::float32, s_); }

  mx::array weights() const { return scaled(shares()); }

  mx::array tangent(const mx::array& tangent) const {
    const mx::array w = shares(), own = times_slope(chosen(tangent));
    if (whole_row()) {
      return scaled(times(w, mx::subtract(own, sum(times(softmax(), tangent)), s_)));
    }
    return scaled(times(w, options_.norm ? mx::subtract(own, sum(times(w, own)), s_) : own));
  }

  mx::array gradient(const mx::array& d_scaled) const {
    const mx::array d_weights = scaled(d_scaled), w = shares(), dot = sum(times(w, d_weights));
    if (whole_row()) {
      const mx::array through_sum = times(softmax(), mx::negative(dot, s_));
      return mx::scatter_add_axis(through_sum, indices_, times(w, d_weights), -1, s_);
    }
    const mx::array own = options_.norm ? mx::subtract(d_weights, dot, s_) : d_weights;
    return mx::scatter_add_axis(mx::zeros_like(logits_, s_), indices_, times_slope(times(w, own)),
                                -1, s_);
  }

 private:
  bool is_softmax() const { return options_.scoring == RouterScoring::kSoftmax; }

  // Returns true if the weights depend on logits that were not chosen.
  bool whole_row() const { return is_softmax() && !options_.norm; }

  // The weights before they are scaled.
  mx::array shares() const {
    if (whole_row()) {
      return chosen(softmax());
    }
    if (is_softmax()) {
      return mx::softmax(chosen(logits_), -1, true, s_);
    }
    const mx::array scores = compose_scores(options_.scoring, chosen(logits_), s_);
    return options_.norm ? mx::divide(scores, sum(scores), s_) : scores;
  }

  mx::array scaled(const mx::array& x) const {
    return options_.scale == 1.0f ? x : times(x, mx::array(options_.scale));
  }

  mx::array times(const mx::array& a, const mx::array& b) const { return mx::multiply(a, b, s_); }
  mx::array sum(const mx::array& x) const { return mx::sum(x, -1, true, s_); }
  mx::array softmax() const { return mx::softmax(logits_, -1, true, s_); }
  mx::array chosen(const mx::array& x) const {
    if (x.size() == 0) {  // under vmap, MLX's gradient of an empty take_along_axis lacks the batch
      return mx::slice(x, mx::Shape(x.ndim(), 0), indices_.shape(), s_);
    }
    return mx::take_along_axis(x, indices_, -1, s_);
  }

  // Multiplies by the derivative of the score's logarithm: 1, 1 - sigmoid(logit), or
  // sigmoid(logit) / (2 softplus(logit)).
  mx::array times_slope(const mx::array& x) const {
    if (is_softmax()) {
      return x;
    }
    const mx::array logits = chosen(logits_);
    if (options_.scoring == RouterScoring::kSigmoid) {
      return times(x, mx::sigmoid(mx::negative(logits, s_), s_));
    }
    // The quotient is 1/2 to the last digit long before both underflow.
    const mx::array bounded = mx::maximum(logits, mx::array(-40.0f), s_);
    const mx::array twice = times(mx::array(2.0f), mx::logaddexp(bounded, mx::array(0.0f), s_));
    return times(x, mx::divide(mx::sigmoid(bounded, s_), twice, s_));
  }

  const RouterOptions& options_;
  const mx::Stream s_;
  const mx::array logits_;
  const mx::array indices_;
};

}  // namespace

mx::array compose_choice(const RouterOptions& options, const Arrays& inputs, mx::Stream s) {
  const mx::array logits = mx::astype(mx::stop_gradient(inputs[0], s), mx::float32, s);
  // Without a bias the logits rank the experts: every score increases with them.
  mx::array values = logits;
  if (options.has_bias || (options.has_groups() && sums_two(options))) {
    values = compose_scores(options.scoring, logits, s);
  }
  if (options.has_bias) {
    values = mx::add(values, beside_rows(inputs[1], logits, s), s);
  }
  mx::array keys = keys_of(options.has_bias ? values : logits, s);
  if (options.has_groups()) {
    keys = mask_groups(options, values, keys, s);
  }
  const mx::array order = descending_order(keys, s);

  mx::Shape stop = order.shape();
  stop.back() = static_cast<int>(options.chosen);
  const mx::array indices = mx::slice(order, mx::Shape(stop.size(), 0), stop, s);
  return options.sorted ? indices : mx::sort(indices, -1, s);
}

mx::array compose_weights(const RouterOptions& options,
                          const mx::array& logits,
                          const mx::array& indices,
                          mx::Stream s) {
  return mx::astype(Formulas(options, logits, indices, s).weights(), logits.dtype(), s);
}

mx::array compose_tangent(const RouterOptions& options,
                          const mx::array& logits,
                          const mx::array& indices,
                          const mx::array& tangent,
                          mx::Stream s) {
  const Formulas f(options, logits, indices, s);
  return mx::astype(f.tangent(f.wide(tangent)), logits.dtype(), s);
}

mx::array compose_gradient(const RouterOptions& options,
                           const mx::array& logits,
                           const mx::array& indices,
                           const mx::array& d_weights,
                           mx::Stream s) {
  const Formulas f(options, logits, indices, s);
  return mx::astype(f.gradient(f.wide(d_weights)), logits.dtype(), s);
}

}  // namespace mlx_anvil
