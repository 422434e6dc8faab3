#include "gated_delta/gated_delta.h"

#include <cmath>
#include <utility>

#include "common/checks.h"
#include "gated_delta/checks.h"
#include "gated_delta/recurrence.h"

namespace mlx_anvil {

namespace {

// The optional arrays of a call.
std::vector<mx::array*> extras_of(GatedDeltaOptions& options) {
  return present({&options.state, &options.lengths}, options.return_states);
}

}  // namespace

GatedDeltaResult gated_delta(const mx::array& q,
                             const mx::array& k,
                             const mx::array& v,
                             const mx::array& g,
                             const mx::array& beta,
                             const GatedDeltaOptions& options,
                             mx::StreamOrDevice stream) {
  check_gated_delta(q, k, v, g, beta, options);
  const mx::Stream s = require_stream(kGatedDelta, stream);
  const std::optional<mx::array> lengths =
      options.lengths ? std::optional(checked_lengths(kGatedDelta, *options.lengths, {"q", q}, s))
                      : std::nullopt;
  const std::optional<mx::array> positions =
      checked_positions(kGatedDelta, options.return_states, {"q", q}, s);
  const auto again = [s](const Arrays& in, const GatedDeltaOptions& own) {
    return gated_delta(in[0], in[1], in[2], in[3], in[4], own, s);
  };
  if (auto node = when_shapeless(kGatedDelta, {q, k, v, g, beta}, options, extras_of, again, s)) {
    return *std::move(node);
  }

  const mx::Dtype dtype = promoted_dtype({{"q", q}, {"k", k}, {"v", v}});
  const auto typed = [&](const mx::array& x) { return mx::astype(x, dtype, s); };
  const auto gates = [&](const mx::array& x) {
    return mx::astype(x, x.dtype() == dtype ? dtype : mx::float32, s);
  };
  GatedDeltaConfig config;
  config.normalizes = options.normalize_eps.has_value();
  config.eps = options.normalize_eps.value_or(0.0f);
  config.q_scale = config.normalizes ? 1.0f / std::sqrt(static_cast<float>(q.shape(3))) : 1.0f;
  GatedDeltaInputs in{typed(q), typed(k), typed(v), gates(g), gates(beta)};
  in.lengths = lengths;
  in.positions = positions;
  if (options.state) {
    in.state = mx::astype(*options.state, mx::float32, s);
  }
  return run_recurrence(config, std::move(in), q.dtype(), s);
}

}  // namespace mlx_anvil
