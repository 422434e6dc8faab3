#include "gated_delta/gated_delta.h"

#include <cmath>
#include <utility>

#include "common/checks.h"
#include "common/shapeless.h"
#include "gated_delta/checks.h"
#include "gated_delta/recurrence.h"

namespace mlx_anvil {

namespace {

mx::array* array_of_positions(GatedDeltaOptions& options) {
  return std::get_if<mx::array>(&options.return_states);
}

// The optional arrays of a call, in the order in which a shapeless node takes them.
std::vector<mx::array*> extras_of(GatedDeltaOptions& options) {
  std::vector<mx::array*> extras;
  for (mx::array* x :
       {options.state ? &*options.state : nullptr, options.lengths ? &*options.lengths : nullptr,
        array_of_positions(options)}) {
    if (x) {
      extras.push_back(x);
    }
  }
  return extras;
}

GatedDeltaResult shapeless(Arrays inputs, const GatedDeltaOptions& options, mx::Stream s) {
  const auto graph = [options, s](const Arrays& in) -> Arrays {
    GatedDeltaOptions own = options;
    size_t at = 5;
    for (mx::array* x : extras_of(own)) {
      *x = in[at++];
    }
    const GatedDeltaResult result = gated_delta(in[0], in[1], in[2], in[3], in[4], own, s);
    Arrays outputs = {result.y, result.state};
    OptionalInputs::append(outputs, result.states);
    return outputs;
  };
  return result_of(shapeless_node(kGatedDelta, s, std::move(inputs), graph));
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
  GatedDeltaOptions own = options;
  Arrays inputs = {q, k, v, g, beta};
  for (const mx::array* x : extras_of(own)) {
    inputs.push_back(*x);
  }
  for (const mx::array& x : inputs) {
    if (traces_shapeless({&x})) {
      return shapeless(std::move(inputs), options, s);
    }
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
