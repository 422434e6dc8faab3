#include "flash_attention/compose.h"

#include <limits>

#include "common/broadcast.h"
#include "common/composing.h"
#include "common/mlx_ops.h"
#include "flash_attention/sequences.h"

namespace mlx_anvil {

namespace {

// Arrays have two axes for the query head: [batch, kv head, query head within the group, ...]. The
// second has length 1 in keys and values.
class Composer {
 public:
  Composer(const AttentionConfig& config,
           const AttentionInputs& in,
           mx::Stream s,
           const std::optional<SecondPart>& part = std::nullopt)
      : config_(config),
        in_(in),
        part_(part),
        s_(s),
        q_(split_heads(in.q)),
        k_(shared_by_group(in.k)),
        v_(shared_by_group(in.v)),
        capped_(capped_scores()) {}

  Arrays forward() const {
    const Softmax softmax = masked_softmax();
    const mx::array out = mx::divide(matrix_product(softmax.weights, v_, s_), softmax.total, s_);
    const mx::array lse = mx::add(softmax.top, mx::log(softmax.total, s_), s_);
    // A row that sees no key adds nothing to any gradient, even if its own is infinite.
    return {
        mx::astype(join_heads(choose(softmax.blind, number(0), out, s_)), in_.q.dtype(), s_),
        mx::squeeze(join_heads(choose(softmax.empty, number(kMinusInfinity), lse, s_)), -1, s_)};
  }

  Arrays backward(const mx::array& out,
                  const mx::array& lse,
                  const mx::array& d_out,
                  const std::optional<mx::array>& d_lse,
                  const AttentionGradients& wanted) const {
    const mx::array row_lse = split_heads(mx::expand_dims(lse, -1, s_));
    const mx::array empty = equals(row_lse, kMinusInfinity);
    const mx::array safe_lse = mx::where(empty, number(0), row_lse, s_);
    const mx::array p = mx::exp(mx::subtract(masked_scores(), safe_lse, s_), s_);
    const mx::array grad = split_heads(d_out);
    mx::array delta = mx::sum(mx::multiply(grad, split_heads(out), s_), -1, true, s_);
    if (d_lse) {
      delta = mx::subtract(delta, split_heads(mx::expand_dims(*d_lse, -1, s_)), s_);
    }
    delta = mx::where(empty, number(0), delta, s_);  // such a row's d_lse is often infinite
    const mx::array d_scores =
        mx::multiply(p, mx::subtract(matrix_product(grad, transposed(v_), s_), delta, s_), s_);

    const mx::array d_product = through_cap(scaled(d_scores));

    Arrays gradients;
    if (wanted.q) {
      gradients.push_back(
          mx::astype(join_heads(matrix_product(d_product, k_, s_)), in_.q.dtype(), s_));
    }
    if (wanted.kv) {
      gradients.push_back(over_group(matrix_product(transposed(d_product), q_, s_), in_.k.dtype()));
      gradients.push_back(over_group(matrix_product(transposed(p), grad, s_), in_.v.dtype()));
    }
    if (wanted.mask) {
      gradients.push_back(join_heads(d_scores));
    }
    if (wanted.sinks) {
      const mx::array p_sink = mx::exp(mx::subtract(sinks_of(safe_lse), safe_lse, s_), s_);
      mx::Shape heads = delta.shape();
      heads[3] = heads[4] = 1;
      const mx::array per_row = of_present_sinks(mx::multiply(p_sink, delta, s_));
      const mx::array per_head = mx::negative(sum_to(per_row, heads, s_), s_);
      gradients.push_back(mx::flatten(mx::squeeze(mx::squeeze(per_head, 4, s_), 3, s_), 1, 2, s_));
    }
    return gradients;
  }

 private:
  static constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

  static mx::array number(float x) { return mx::array(x); }
  mx::array wide(const mx::array& x) const { return mx::astype(x, mx::float32, s_); }
  mx::array equals(const mx::array& x, float value) const {
    return mx::equal(x, number(value), s_);
  }
  mx::array transposed(const mx::array& x) const { return mx::swapaxes(x, -1, -2, s_); }

  // [batch, q_heads, ...] <-> [batch, kv_heads, group, ...]
  mx::array split_heads(const mx::array& x) const {
    return mx::unflatten(wide(x), 1, {in_.k.shape(1), -1}, s_);
  }
  mx::array join_heads(const mx::array& x) const { return mx::flatten(x, 1, 2, s_); }
  mx::array over_group(const mx::array& x, mx::Dtype dtype) const {
    mx::Shape shape = x.shape();
    shape[2] = 1;
    return mx::astype(mx::squeeze(sum_to(x, shape, s_), 2, s_), dtype, s_);
  }

  mx::array shared_by_group(const mx::array& kv) const { return mx::expand_dims(wide(kv), 2, s_); }

  // One number per head, as rows of scores. Expands one axis at a time: MLX 0.32.4's vmap of
  // several is wrong (docs/mlx-bugs.md).
  mx::array rows_of_heads(const mx::array& heads) const {
    return mx::expand_dims(mx::expand_dims(split_heads(heads), -1, s_), -1, s_);
  }

  mx::array sinks_of(const mx::array& rows) const {
    return stretch_like(rows_of_heads(*in_.sinks), rows, s_);
  }

  mx::array scaled(const mx::array& x) const { return mx::multiply(x, number(config_.scale), s_); }

  // cap(scale q k^T)
  mx::array capped_scores() const {
    mx::array scores = matrix_product(scaled(q_), transposed(k_), s_);
    if (part_) {
      const mx::array keys = transposed(shared_by_group(part_->k));
      scores = mx::add(scores, matrix_product(scaled(split_heads(part_->q)), keys, s_), s_);
    }
    if (config_.softcap <= 0) {
      return scores;
    }
    const mx::array cap = number(config_.softcap);
    return mx::multiply(cap, mx::tanh(mx::divide(scores, cap, s_), s_), s_);
  }

  // Applies the derivative of the cap.
  mx::array through_cap(const mx::array& d_capped) const {
    if (config_.softcap <= 0) {
      return d_capped;
    }
    const mx::array slope = mx::subtract(
        number(1), mx::square(mx::divide(capped_, number(config_.softcap), s_), s_), s_);
    return mx::multiply(d_capped, slope, s_);
  }

  // The rows of exp(scores - top), with top the row's maximum, and their sums.
  struct Softmax {
    mx::array top, weights;
    mx::array blind;  // where no key is visible
    mx::array empty;  // where there is no sink either: top is 0, since exp(-inf + inf) is NaN
    mx::array total;  // there 1
  };

  Softmax masked_softmax() const {
    const mx::array scores = masked_scores();
    mx::array top = mx::max(mx::stop_gradient(scores, s_), -1, true, s_);
    const mx::array blind = equals(top, kMinusInfinity);
    if (in_.sinks) {
      top = mx::maximum(top, rows_of_heads(*in_.sinks), s_);
    }
    top = mx::stop_gradient(mx::where(equals(top, kMinusInfinity), number(0), top, s_), s_);
    const mx::array weights = mx::exp(mx::subtract(scores, top, s_), s_);
    mx::array total = mx::sum(weights, -1, true, s_);
    if (in_.sinks) {  // an infinite gradient of lse is the sink's alone if no key is visible
      total = mx::add(choose(blind, number(0), total, s_), sink_weights(top), s_);
    }
    const mx::array empty = equals(total, 0);
    return {top, weights, blind, empty, mx::where(empty, number(1), total, s_)};
  }

  // A sink of -inf takes no part, in gradients either, even if they are infinite.
  mx::array of_present_sinks(const mx::array& x) const {
    return choose(equals(sinks_of(x), kMinusInfinity), number(0), x, s_);
  }

  mx::array sink_weights(const mx::array& top) const {
    return of_present_sinks(mx::exp(mx::subtract(sinks_of(top), top, s_), s_));
  }

  // Masked scores are -inf.
  mx::array masked_scores() const {
    mx::array scores = capped_;
    if (std::optional<mx::array> visible = band()) {
      scores = mx::where(*visible, scores, number(kMinusInfinity), s_);
    }
    if (!in_.mask) {
      return scores;
    }
    const mx::array mask = mask_by_group(*in_.mask);
    return config_.mask == AttentionMask::kBool
               ? mx::where(mask, scores, number(kMinusInfinity), s_)
               : mx::add(scores, stretch_like(wide(mask), scores, s_), s_);
  }

  // The mask's head axis is 1 or q_heads.
  mx::array mask_by_group(const mx::array& mask) const {
    return mask.shape(1) == 1 ? mx::expand_dims(mask, 1, s_)
                              : mx::unflatten(mask, 1, {in_.k.shape(1), -1}, s_);
  }

  // Returns a [q_len, kv_len] mask of the keys within the window. Empty if the window covers all
  // keys.
  std::optional<mx::array> band() const {
    const bool left = config_.window_left < kUnboundedWindow;
    const bool right = config_.window_right < kUnboundedWindow;
    const mx::array ahead = mx::subtract(length_of(in_.k, 2, s_), length_of(in_.q, 2, s_), s_);
    const mx::array position = mx::expand_dims(mx::add(indices_of(in_.q, 2, s_), ahead, s_), 1, s_);
    const mx::array distance =  // how far the key is to the right
        mx::subtract(indices_of(in_.k, 2, s_), position, s_);
    // A window longer than any sequence that int32 can index covers everything.
    const auto bound = [](int64_t x) {
      return mx::array(
          static_cast<int32_t>(std::min<int64_t>(x, std::numeric_limits<int32_t>::max())));
    };
    std::optional<mx::array> visible;
    if (left) {
      visible = mx::greater_equal(distance, mx::negative(bound(config_.window_left), s_), s_);
    }
    if (right) {
      const mx::array before = mx::less_equal(distance, bound(config_.window_right), s_);
      visible = visible ? mx::logical_and(*visible, before, s_) : before;
    }
    return visible;
  }

  const AttentionConfig& config_;
  const AttentionInputs& in_;
  const std::optional<SecondPart> part_;
  const mx::Stream s_;
  const mx::array q_, k_, v_;
  const mx::array capped_;
};

// ---- no query or no key -------------------------------------------------------------------------
//
// Handled without empty arrays: several of MLX's CUDA ops (0.32.4) divide by their sizes, which
// terminates the process.

bool has_pairs(const AttentionInputs& in) {
  return in.q.size() > 0 && in.k.size() > 0;
}

// [batch, q_heads, q_len, last]
mx::Shape rows_shape(const AttentionInputs& in, int last) {
  return {in.q.shape(0), in.q.shape(1), in.q.shape(2), last};
}

Arrays forward_without_pairs(const AttentionInputs& in, mx::Stream s) {
  mx::Shape rows = rows_shape(in, 1);
  rows.pop_back();
  const mx::array lse =
      in.sinks ? stretch(mx::expand_dims(mx::astype(*in.sinks, mx::float32, s), -1, s), rows, s)
               : mx::full(rows, mx::array(-std::numeric_limits<float>::infinity()), s);
  return {mx::zeros(rows_shape(in, in.v.shape(3)), in.q.dtype(), s), lse};
}

Arrays backward_without_pairs(const AttentionInputs& in,
                              const std::optional<mx::array>& d_lse,
                              const AttentionGradients& wanted,
                              mx::Stream s) {
  Arrays gradients;
  if (wanted.q) {
    gradients.push_back(mx::zeros(in.q.shape(), in.q.dtype(), s));
  }
  if (wanted.kv) {
    gradients.push_back(mx::zeros(in.k.shape(), in.k.dtype(), s));
    gradients.push_back(mx::zeros(in.v.shape(), in.v.dtype(), s));
  }
  if (wanted.mask) {
    gradients.push_back(mx::zeros(rows_shape(in, in.k.shape(2)), mx::float32, s));
  }
  if (wanted.sinks) {  // a row's lse then consists of its sink only
    const bool flows = d_lse && d_lse->size() > 0;
    const mx::Shape heads = {in.q.shape(0), in.q.shape(1)};
    gradients.push_back(flows ? mx::reshape(sum_to(*d_lse, {heads[0], heads[1], 1}, s), heads, s)
                              : mx::zeros(heads, mx::float32, s));
  }
  return gradients;
}

}  // namespace

Arrays compose_attention(const AttentionConfig& config,
                         const AttentionInputs& in,
                         mx::Stream s,
                         const std::optional<SecondPart>& part) {
  if (config.is_ragged) {
    const MaskedAttention masked = mask_of_sequences(config, in, s);
    return compose_attention(masked.config, masked.in, s, part);
  }
  return has_pairs(in) ? Composer(config, in, s, part).forward() : forward_without_pairs(in, s);
}

Arrays compose_attention_backward(const AttentionConfig& config,
                                  const AttentionInputs& in,
                                  const mx::array& out,
                                  const mx::array& lse,
                                  const mx::array& d_out,
                                  const std::optional<mx::array>& d_lse,
                                  const AttentionGradients& wanted,
                                  mx::Stream s) {
  if (config.is_ragged) {
    const MaskedAttention masked = mask_of_sequences(config, in, s);
    return compose_attention_backward(masked.config, masked.in, out, lse, d_out, d_lse, wanted, s);
  }
  return has_pairs(in) ? Composer(config, in, s).backward(out, lse, d_out, d_lse, wanted)
                       : backward_without_pairs(in, d_lse, wanted, s);
}

}  // namespace mlx_anvil
