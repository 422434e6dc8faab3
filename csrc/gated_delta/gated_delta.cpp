#include "gated_delta/gated_delta.h"

#include <cmath>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/integers.h"
#include "common/launch.h"
#include "common/shapeless.h"
#include "common/trace.h"
#include "gated_delta/checks.h"
#include "gated_delta/primitive.h"
#include "gated_delta/simd/kernels.h"

namespace mlx_anvil {

namespace {

// Returns the reason for falling back to a graph of MLX ops. Empty if a kernel serves the call.
std::string why_composed(const mx::array& q, mx::Stream s) {
  if (q.shape(3) > kMaxDeltaKeyDim) {
    return "there are kernels for key dims up to " + std::to_string(kMaxDeltaKeyDim);
  }
  std::string reason;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &reason)) {
    return reason;
  }
  return "";
}

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

GatedDeltaResult result_of(const Arrays& outputs) {
  return {outputs[0], outputs[1], outputs.size() > 2 ? std::optional(outputs[2]) : std::nullopt};
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

// Zeros at the end of the last axis. A key of zeros in such channels leaves their states at zero.
mx::array padded(const mx::array& x, int64_t columns, mx::Stream s) {
  const int more = static_cast<int>(columns) - x.shape(-1);
  const int axis = static_cast<int>(x.ndim()) - 1;  // vmap of MLX's pad takes no negative one
  return more == 0 ? x : mx::pad(x, {axis}, {0}, {more}, mx::array(0, x.dtype()), "constant", s);
}

mx::array without_padding(const mx::array& x, int columns, mx::Stream s) {
  mx::Shape end = x.shape();
  end.back() = columns;
  return x.shape(-1) == columns ? x : mx::slice(x, mx::Shape(x.ndim(), 0), end, s);
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
      options.lengths ? std::optional(checked_lengths(*options.lengths, q, s)) : std::nullopt;
  GatedDeltaConfig config;
  const std::optional<mx::array> positions =
      std::holds_alternative<std::monostate>(options.return_states)
          ? std::nullopt
          : std::optional(checked_positions(options, q, s));
  config.returns_states = positions && positions->size() > 0;
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
  const int key_dim = q.shape(3);
  config.has_state = options.state.has_value();
  config.has_lengths = lengths.has_value();
  config.normalizes = options.normalize_eps.has_value();
  config.eps = options.normalize_eps.value_or(0.0f);
  config.q_scale = config.normalizes ? 1.0f / std::sqrt(static_cast<float>(key_dim)) : 1.0f;
  GatedDeltaInputs in{typed(q),    typed(k),     typed(v), gates(g),
                      gates(beta), std::nullopt, lengths,  std::nullopt};
  if (config.has_state) {
    in.state = mx::astype(*options.state, mx::float32, s);
  }
  if (config.returns_states) {
    in.positions = positions;
  }

  Arrays outputs;
  const std::string why = why_composed(q, s);
  if (!why.empty()) {
    note_fallback(kGatedDelta, why);
    outputs = compose_gated_delta(config, in, s);
  } else {
    const int64_t columns = round_up(key_dim, kDeltaKeyDimUnit);
    in.q = padded(in.q, columns, s);
    in.k = padded(in.k, columns, s);
    in.g = in.g.ndim() == 4 ? padded(in.g, columns, s) : in.g;
    in.state = in.state ? std::optional(padded(*in.state, columns, s)) : std::nullopt;
    outputs = apply_gated_delta(config, std::move(in), s);
    for (size_t i = 1; i < outputs.size(); ++i) {
      outputs[i] = without_padding(outputs[i], key_dim, s);
    }
  }
  outputs[0] = mx::astype(outputs[0], q.dtype(), s);
  if (positions && !config.returns_states) {
    const mx::Shape& state = outputs[1].shape();
    outputs.push_back(
        mx::zeros({state[0], positions->shape(1), state[1], state[2], state[3]}, mx::float32, s));
  }
  return result_of(outputs);
}

}  // namespace mlx_anvil
