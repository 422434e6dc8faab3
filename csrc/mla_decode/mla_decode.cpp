#include "mla_decode/mla_decode.h"

#include <cmath>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/launch.h"
#include "common/shapeless.h"
#include "common/trace.h"
#include "flash_attention/checks.h"
#include "flash_attention/sequences.h"
#include "mla_decode/checks.h"
#include "mla_decode/compose.h"
#include "mla_decode/primitive.h"

namespace mlx_anvil {

namespace {

// Returns the reason for falling back to a graph of MLX ops. Empty if a kernel serves the call.
std::string why_composed(const MlaInputs& in, mx::Stream s) {
  if (in.latent.shape(3) > kMaxMlaRank || in.k_rope.shape(3) > kMaxMlaRopeDim) {
    return "there are kernels for ranks up to 512 and rope dims up to 64";
  }
  std::string reason;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &reason)) {
    return reason;
  }
  return "";
}

AttentionResult shapeless(Arrays inputs, const AttentionOptions& options, mx::Stream s) {
  append_extras(inputs, options);
  const auto graph = [options, s](const Arrays& in) -> Arrays {
    AttentionOptions own = options;
    replace_extras(own, in, 4);
    const auto [out, lse] = mla_decode(in[0], in[1], in[2], in[3], own, s);
    return lse ? Arrays{out, *lse} : Arrays{out};
  };
  const Arrays outputs = shapeless_node(kMlaDecode, s, std::move(inputs), graph);
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

}  // namespace

AttentionResult mla_decode(const mx::array& q_nope,
                           const mx::array& q_rope,
                           const mx::array& latent,
                           const mx::array& k_rope,
                           const AttentionOptions& options,
                           mx::StreamOrDevice stream) {
  const std::initializer_list<NamedArray> arrays = {
      {"q_nope", q_nope}, {"q_rope", q_rope}, {"latent", latent}, {"k_rope", k_rope}};
  require_kernel_dtypes(kMlaDecode, arrays);
  check_mla_shapes(q_nope, q_rope, latent, k_rope);
  if (!std::isfinite(*options.scale)) {
    throw_value_error(kMlaDecode,
                      "scale is " + std::to_string(*options.scale) + "; allowed: a finite number.");
  }
  AttentionConfig config = checked_attention_config(options, latent.shape(3));
  const mx::Stream s = require_stream(kMlaDecode, stream);
  const auto of = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  if (traces_shapeless({&q_nope, &q_rope, &latent, &k_rope, std::get_if<mx::array>(&options.mask),
                        of(options.sinks), of(options.lengths.keys)})) {
    return shapeless({q_nope, q_rope, latent, k_rope}, options, s);
  }

  const mx::Dtype dtype = promoted_dtype(arrays);
  const auto typed = [&](const mx::array& x) { return mx::astype(x, dtype, s); };
  AttentionExtras extras = checked_attention_extras(config, options, q_nope, latent, dtype, s);
  MlaInputs in{typed(q_nope),
               typed(q_rope),
               typed(latent),
               typed(k_rope),
               std::move(extras.mask),
               std::move(extras.sinks),
               checked_sequences(kMlaDecode, options.lengths, q_nope, latent, s)};
  config.is_ragged = in.sequences.has_value();

  Arrays outputs;
  if (const std::string reason = why_composed(in, s); !reason.empty()) {
    note_fallback(kMlaDecode, reason);
    outputs = compose_mla(config, in, s);
  } else {
    outputs = apply_mla(config, std::move(in), options.return_lse, s);
  }
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

}  // namespace mlx_anvil
