#include "softmax_topk/compose.h"

#include <limits>

namespace mlx_anvil {

namespace {

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

  mx::array weights() const {
    if (whole_row()) {
      return chosen(softmax());
    }
    if (!is_sigmoid()) {
      return mx::softmax(chosen(logits_), -1, true, s_);
    }
    const mx::array scores = mx::sigmoid(chosen(logits_), s_);
    return options_.norm ? mx::divide(scores, sum(scores), s_) : scores;
  }

  mx::array tangent(const mx::array& tangent) const {
    const mx::array w = weights(), own = times_slope(chosen(tangent));
    if (whole_row()) {
      return times(w, mx::subtract(own, sum(times(softmax(), tangent)), s_));
    }
    return times(w, options_.norm ? mx::subtract(own, sum(times(w, own)), s_) : own);
  }

  mx::array gradient(const mx::array& d_weights) const {
    const mx::array w = weights(), dot = sum(times(w, d_weights));
    if (whole_row()) {
      const mx::array through_sum = times(softmax(), mx::negative(dot, s_));
      return mx::scatter_add_axis(through_sum, indices_, times(w, d_weights), -1, s_);
    }
    const mx::array own = options_.norm ? mx::subtract(d_weights, dot, s_) : d_weights;
    return mx::scatter_add_axis(mx::zeros_like(logits_, s_), indices_, times_slope(times(w, own)),
                                -1, s_);
  }

 private:
  bool is_sigmoid() const { return options_.scoring == RouterScoring::kSigmoid; }

  // Returns true if the weights depend on logits that were not chosen.
  bool whole_row() const { return !is_sigmoid() && !options_.norm; }

  mx::array times(const mx::array& a, const mx::array& b) const { return mx::multiply(a, b, s_); }
  mx::array sum(const mx::array& x) const { return mx::sum(x, -1, true, s_); }
  mx::array softmax() const { return mx::softmax(logits_, -1, true, s_); }
  mx::array chosen(const mx::array& x) const {
    if (x.size() == 0) {  // under vmap, MLX's gradient of an empty take_along_axis lacks the batch
      return mx::slice(x, mx::Shape(x.ndim(), 0), indices_.shape(), s_);
    }
    return mx::take_along_axis(x, indices_, -1, s_);
  }

  // Multiplies by the derivative of the score's logarithm: 1, or 1 - sigmoid(logit).
  mx::array times_slope(const mx::array& x) const {
    return is_sigmoid() ? times(x, mx::sigmoid(mx::negative(chosen(logits_), s_), s_)) : x;
  }

  const RouterOptions& options_;
  const mx::Stream s_;
  const mx::array logits_;
  const mx::array indices_;
};

}  // namespace

// Sorts unique int64 keys, so that the choice does not depend on how MLX's sort treats ties. The
// upper half holds the logit as an order-reversing integer (NaN above infinity, both zeros equal),
// the lower half the index.
mx::array compose_choice(const RouterOptions& options, const mx::array& logits, mx::Stream s) {
  constexpr int32_t kMagnitude = std::numeric_limits<int32_t>::max();
  const mx::array wide =
      mx::add(mx::astype(mx::stop_gradient(logits, s), mx::float32, s), mx::array(0.0f), s);
  const mx::array bits = mx::view(wide, mx::int32, s);
  const mx::array flipped = mx::bitwise_xor(bits, mx::array(kMagnitude), s);
  mx::array key = mx::where(mx::less(bits, mx::array(0), s), flipped, bits, s);
  key = mx::where(mx::isnan(wide, s), mx::array(kMagnitude), key, s);
  const mx::array descending =
      mx::multiply(mx::astype(key, mx::int64, s), mx::array(-(int64_t{1} << 32), mx::int64), s);
  const mx::array number = mx::arange(0, logits.shape(-1), 1, mx::int64, s);
  const mx::array order = mx::argsort(mx::add(descending, number, s), -1, s);

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
