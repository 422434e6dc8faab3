#include "causal_conv1d/compose.h"

#include "common/activation.h"
#include "common/broadcast.h"
#include "common/mlx_ops.h"

namespace mlx_anvil {

namespace {

// The formulas, in float32 for every dtype.
class Formulas {
 public:
  Formulas(const ConvView& in, mx::Stream stream)
      : in_(in), s_(stream), length_(in.x->shape(1)), width_(in.width()) {}

  mx::array wide(const mx::array& x) const { return mx::astype(x, mx::float32, s_); }

  // x with the state in front.
  mx::array rows() const {
    const mx::array state =
        in_.state ? *in_.state : mx::zeros(in_.state_shape(), in_.x->dtype(), s_);
    return mx::concatenate({state, *in_.x}, 1, s_);
  }

  // Rows [first, first + count) of the time axis.
  mx::array part(const mx::array& x, int first, int count) const {
    return mx::slice(x, {0, first, 0}, {x.shape(0), first + count, x.shape(2)}, s_);
  }

  mx::array times_tap(const mx::array& rows, int w) const {
    mx::Shape start(in_.weight->ndim(), 0), stop = in_.weight->shape();
    start.back() = w;
    stop.back() = w + 1;
    const mx::array tap = mx::squeeze(mx::slice(*in_.weight, start, stop, s_), -1, s_);
    return mx::multiply(rows, stretch_to_rows(wide(tap), rows, s_), s_);
  }

  // The convolution before the activation.
  mx::array sum(const mx::array& rows) const {
    mx::array total = times_tap(part(rows, 0, length_), 0);
    for (int w = 1; w < width_; ++w) {
      total = mx::add(total, times_tap(part(rows, w, length_), w), s_);
    }
    return in_.bias ? mx::add(total, stretch_to_rows(wide(*in_.bias), total, s_), s_) : total;
  }

  // [batch, 1, 1]
  mx::array ends() const {
    const mx::array last(length_, mx::int32), none(0, mx::int32);
    return mx::reshape(mx::clip(*in_.lengths, none, last, s_), {in_.x->shape(0), 1, 1}, s_);
  }

  mx::array numbers(int count) const {
    return mx::reshape(mx::arange(count, s_), {1, count, 1}, s_);
  }

  // Zeros in place of the outputs past the end of a sequence.
  mx::array within(const mx::array& y) const {
    return in_.lengths ? choose(mx::less(numbers(length_), ends(), s_), y, zeros(y), s_) : y;
  }

  mx::array new_state(const mx::array& rows) const {
    if (!in_.lengths) {
      return part(rows, length_, width_ - 1);
    }
    return taken(rows, mx::add(ends(), numbers(width_ - 1), s_));
  }

  // The gradient of all rows through the new state.
  mx::array d_rows_of_state(const mx::array& d_new_state) const {
    if (!in_.lengths) {
      const mx::array before =
          mx::zeros({d_new_state.shape(0), length_, d_new_state.shape(2)}, d_new_state.dtype(), s_);
      return mx::concatenate({before, d_new_state}, 1, s_);
    }
    const mx::array place = mx::subtract(numbers(length_ + width_ - 1), ends(), s_);
    const mx::array none(0, mx::int32), last(width_ - 2, mx::int32);
    const mx::array is_kept =
        mx::logical_and(mx::greater_equal(place, none, s_), mx::less_equal(place, last, s_), s_);
    const mx::array all = taken(d_new_state, mx::clip(place, none, last, s_));
    return choose(is_kept, all, zeros(all), s_);
  }

  // The gradient of all rows through the outputs. Those past the end are never read.
  mx::array d_rows(const mx::array& d_sum) const {
    const mx::array edge = mx::zeros({d_sum.shape(0), width_ - 1, d_sum.shape(2)}, mx::float32, s_);
    const mx::array padded = mx::concatenate({edge, d_sum, edge}, 1, s_);
    const int count = length_ + width_ - 1;
    mx::array total = times_tap(part(padded, width_ - 1, count), 0);
    for (int w = 1; w < width_; ++w) {
      total = mx::add(total, times_tap(part(padded, width_ - 1 - w, count), w), s_);
    }
    if (!in_.lengths) {
      return total;
    }
    const mx::array end = mx::add(ends(), mx::array(width_ - 1, mx::int32), s_);
    return choose(mx::less(numbers(count), end, s_), total, zeros(total), s_);
  }

  // Sums over batch and time, in the shape and dtype of the weight.
  mx::array d_weight(const mx::array& d_sum, const mx::array& rows) const {
    mx::Shape of_tap = in_.weight->shape();
    of_tap.pop_back();
    Arrays taps;
    for (int w = 0; w < width_; ++w) {
      const mx::array products = within(mx::multiply(d_sum, part(rows, w, length_), s_));
      taps.push_back(sum_rows_to(products, of_tap, s_));
    }
    return mx::astype(mx::stack(taps, -1, s_), in_.weight->dtype(), s_);
  }

 private:
  mx::array zeros(const mx::array& x) const { return mx::array(0.0f, x.dtype()); }

  // Row index[b, i] of each batch.
  mx::array taken(const mx::array& rows, const mx::array& index) const {
    const mx::Shape shape = {rows.shape(0), index.shape(1), rows.shape(2)};
    return mx::take_along_axis(rows, mx::broadcast_to(index, shape, s_), 1, s_);
  }

  const ConvView& in_;
  const mx::Stream s_;
  const int length_, width_;
};

}  // namespace

Arrays compose_conv(const ConvConfig& config, const ConvView& in, mx::Stream s) {
  const Formulas f(in, s);
  const mx::array rows = f.rows(), sum = f.sum(f.wide(rows));
  const mx::array y = f.within(config.silu ? silu(sum, s) : sum);
  return {mx::astype(y, in.x->dtype(), s), f.new_state(rows)};
}

Arrays compose_conv_backward(const ConvConfig& config,
                             bool sums,
                             const ConvView& in,
                             const mx::array& d_y,
                             const mx::array& d_new_state,
                             mx::Stream s) {
  const Formulas f(in, s);
  const mx::array rows = f.wide(f.rows());
  mx::array d_sum = f.wide(d_y);
  if (config.silu) {
    d_sum = mx::multiply(d_sum, silu_derivative(f.sum(rows), s), s);
  }
  d_sum = f.within(d_sum);
  const mx::array d_rows = mx::astype(
      mx::add(f.d_rows(d_sum), f.d_rows_of_state(f.wide(d_new_state)), s), in.x->dtype(), s);
  const int kept = in.width() - 1;
  Arrays gradients = {f.part(d_rows, kept, in.x->shape(1))};
  if (in.state) {
    gradients.push_back(f.part(d_rows, 0, kept));
  }
  if (sums) {
    gradients.push_back(f.d_weight(d_sum, rows));
    if (in.bias) {
      gradients.push_back(mx::astype(sum_rows_to(d_sum, in.bias->shape(), s), in.bias->dtype(), s));
    }
  }
  return gradients;
}

}  // namespace mlx_anvil
