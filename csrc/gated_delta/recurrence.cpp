#include "gated_delta/recurrence.h"

#include <string>
#include <utility>

#include "common/integers.h"
#include "common/launch.h"
#include "common/trace.h"
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

GatedDeltaResult result_of(const Arrays& outputs) {
  return {outputs[0], outputs[1], outputs.size() > 2 ? std::optional(outputs[2]) : std::nullopt};
}

std::vector<mx::array*> present(std::initializer_list<std::optional<mx::array>*> optional,
                                ReturnStates& return_states) {
  std::vector<mx::array*> found;
  for (std::optional<mx::array>* x : optional) {
    if (*x) {
      found.push_back(&**x);
    }
  }
  if (auto* positions = std::get_if<mx::array>(&return_states)) {
    found.push_back(positions);
  }
  return found;
}

GatedDeltaResult run_recurrence(GatedDeltaConfig config,
                                GatedDeltaInputs in,
                                mx::Dtype dtype,
                                mx::Stream s) {
  const std::optional<mx::array> positions = in.positions;
  if (positions && positions->size() == 0) {
    in.positions.reset();
  }
  config.has_state = in.state.has_value();
  config.has_skip = in.skip.has_value();
  config.has_gate = in.gate.has_value();
  config.has_lengths = in.lengths.has_value();
  config.returns_states = in.positions.has_value();
  const int key_dim = in.q.shape(3);
  Arrays outputs;
  const std::string why = why_composed(in.q, s);
  if (!why.empty()) {
    note_fallback(config.op, why);
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
  outputs[0] = mx::astype(outputs[0], dtype, s);
  if (positions && !config.returns_states) {
    const mx::Shape& state = outputs[1].shape();
    outputs.push_back(
        mx::zeros({state[0], positions->shape(1), state[1], state[2], state[3]}, mx::float32, s));
  }
  return result_of(outputs);
}

}  // namespace mlx_anvil
