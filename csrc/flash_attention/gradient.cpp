#include "flash_attention/gradient.h"

#include <limits>

#include "common/broadcast.h"
#include "common/mlx_ops.h"
#include "flash_attention/backward.h"
#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

namespace {

// Returns true if there may be rows that see no key, and whose gradients the kernels read.
bool may_be_blind(const AttentionConfig& config, const AttentionInputs& in) {
  const int64_t first = in.k.shape(2) - in.q.shape(2);  // the position of the first query
  // Each query of a sequence sees at least its own key, and kernels skip the rows of no sequence.
  // Only the gradient in sinks sums over those too.
  const bool sees_itself = config.has_own_keys && first >= 0 && config.window_left >= 0 &&
                           config.window_right >= 0 && !config.has_sinks;
  return in.q.size() > 0 &&
         (config.mask != AttentionMask::kNone || (config.is_ragged && !sees_itself) ||
          in.k.shape(2) == 0 || first + config.window_right < 0);
}

// Rows that see no key, as far as the results tell. With sinks they have out = 0 and, almost, lse =
// sink, as have some that see keys with tiny weights.
mx::array blind_rows(const mx::array& out,
                     const mx::array& lse,
                     const std::optional<mx::array>& sinks,
                     mx::Stream s) {
  if (!sinks) {
    return mx::equal(lse, mx::array(-std::numeric_limits<float>::infinity()), s);
  }
  const mx::array sink = mx::expand_dims(mx::astype(*sinks, mx::float32, s), -1, s);
  return mx::logical_and(mx::isclose(lse, sink, 1e-6, 1e-6, false, s),
                         mx::logical_not(mx::any(out, -1, false, s), s), s);
}

}  // namespace

SeenGradients of_seeing_rows(const mx::array& d_out,
                             const std::optional<mx::array>& d_lse,
                             const mx::array& out,
                             const mx::array& lse,
                             const std::optional<mx::array>& sinks,
                             mx::Stream s) {
  const mx::array blind = blind_rows(out, lse, sinks, s);
  mx::array cleared = blind;
  std::optional<mx::array> seen_d_lse = d_lse, of_sinks;
  if (sinks) {  // rows with finite gradients stay as they are
    const auto infinite = [&](const mx::array& x) {
      return mx::logical_and(blind, mx::logical_not(mx::isfinite(x, s), s), s);
    };
    cleared = infinite(mx::sum(d_out, -1, false, s));
    if (d_lse) {  // the kernels clear it where lse is -inf
      const mx::array alone = mx::logical_and(infinite(*d_lse), mx::isfinite(lse, s), s);
      seen_d_lse = choose(alone, mx::array(0.0f), *d_lse, s);
      of_sinks = choose(alone, *d_lse, mx::array(0.0f), s);
    }
  }
  return {choose(mx::expand_dims(cleared, -1, s), mx::array(0, d_out.dtype()), d_out, s),
          seen_d_lse, of_sinks};
}

Arrays attention_gradient(const AttentionConfig& config,
                          const Arrays& primals,
                          const Arrays& saved,
                          const Arrays& cotangents,
                          const std::vector<int>& argnums,
                          mx::Stream s) {
  const bool has_d_lse = cotangents.size() > 1;
  const bool has_mask = config.mask != AttentionMask::kNone;
  const size_t mask_at = 3, sinks_at = 3 + has_mask, sequences_at = sinks_at + config.has_sinks;
  const auto given = [&](bool has, size_t at) {
    return has ? std::optional(primals[at]) : std::nullopt;
  };
  const AttentionInputs in{primals[0],
                           primals[1],
                           primals[2],
                           given(has_mask, mask_at),
                           given(config.has_sinks, sinks_at),
                           given(config.is_ragged, sequences_at)};
  // A bool mask has no gradient, nor have lengths.
  const auto is_constant = [&](size_t at) {
    return (config.mask == AttentionMask::kBool && at == mask_at) ||
           (config.is_ragged && at == sequences_at);
  };
  AttentionGradients wanted;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    if (is_constant(at)) {
      continue;
    }
    (at == 0 ? wanted.q : at < 3 ? wanted.kv : at == sinks_at ? wanted.sinks : wanted.mask) = true;
  }
  Arrays inputs = primals;
  inputs.insert(inputs.end(), saved.begin(), saved.end());
  inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
  const size_t d_out = primals.size() + 2, d_lse = d_out + 1;
  std::optional<mx::array> d_lse_of_sinks;
  if (may_be_blind(config, in)) {
    const SeenGradients seen =
        of_seeing_rows(inputs[d_out], has_d_lse ? std::optional(inputs[d_lse]) : std::nullopt,
                       saved[0], saved[1], in.sinks, s);
    inputs[d_out] = seen.d_out;
    if (seen.d_lse) {
      inputs[d_lse] = *seen.d_lse;
    }
    d_lse_of_sinks = seen.d_lse_of_sinks;
  }
  Arrays gradients = apply_attention_backward(config, wanted, inputs, has_d_lse, s);

  const size_t of_kv = wanted.q, of_mask = of_kv + 2 * wanted.kv, of_sinks = of_mask + wanted.mask;
  if (wanted.sinks && d_lse_of_sinks) {
    gradients[of_sinks] = mx::add(gradients[of_sinks], mx::sum(*d_lse_of_sinks, -1, false, s), s);
  }
  Arrays selected;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    if (is_constant(at)) {
      selected.push_back(mx::zeros_like(primals[at], s));
      continue;
    }
    const size_t from = at == 0 ? 0 : at < 3 ? of_kv + at - 1 : at == sinks_at ? of_sinks : of_mask;
    selected.push_back(
        mx::astype(sum_to(gradients[from], primals[at].shape(), s), primals[at].dtype(), s));
  }
  return selected;
}

}  // namespace mlx_anvil
