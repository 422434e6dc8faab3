#include "flash_attention/flash_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/launch.h"
#include "common/shapeless.h"
#include "common/trace.h"
#include "flash_attention/compose.h"
#include "flash_attention/forward.h"

namespace mlx_anvil {

namespace {

// ---- checks -------------------------------------------------------------------------------------

std::string describe(const char* name, const mx::array& x) {
  return std::string(name) + " has shape " + to_text(x.shape());
}

// Throws for two arrays whose shapes do not fit together.
[[noreturn]] void throw_mismatch(const char* a_name,
                                 const mx::array& a,
                                 const char* b_name,
                                 const mx::array& b,
                                 const std::string& allowed,
                                 const std::string& hint = "") {
  throw_value_error(kFlashAttention, describe(a_name, a) + " and " + describe(b_name, b) +
                                         "; allowed: " + allowed + "." + hint);
}

// The end of an error text for arrays that fit as [batch, length, heads, head_dim], the layout of
// flash-attn and JAX.
std::string layout_hint(bool fits) {
  return fits ? " They fit as [batch, length, heads, head_dim]; give x.transpose(0, 2, 1, 3) of q, "
                "k "
                "and v."
              : "";
}

bool heads_fit(const mx::array& q, const mx::array& k, int axis) {
  return k.shape(axis) > 0 && q.shape(axis) % k.shape(axis) == 0;
}

void check_shapes(const mx::array& q, const mx::array& k, const mx::array& v) {
  for (const auto& [name, x] : {NamedArray{"q", q}, NamedArray{"k", k}, NamedArray{"v", v}}) {
    if (x.ndim() != 4) {
      throw_value_error(kFlashAttention,
                        describe(name, x) + "; allowed: rank 4, [batch, heads, length, head_dim].");
    }
    if (x.shape(3) == 0) {
      throw_value_error(kFlashAttention,
                        describe(name, x) + "; allowed: a head_dim of at least 1.");
    }
  }
  if (q.shape(0) != k.shape(0)) {
    throw_mismatch("q", q, "k", k, "one batch size");
  }
  if (k.shape(0) != v.shape(0)) {
    throw_mismatch("k", k, "v", v, "one batch size");
  }
  if (q.shape(3) != k.shape(3)) {
    throw_mismatch("q", q, "k", k, "one head_dim (the last axis)");
  }
  if (k.shape(1) != v.shape(1)) {
    throw_mismatch("k", k, "v", v, "the same number of heads");
  }
  if (k.shape(2) != v.shape(2)) {
    throw_mismatch("k", k, "v", v, "the same length");
  }
  const bool no_heads = q.shape(1) == 0 && k.shape(1) == 0;
  if (!no_heads && !heads_fit(q, k, 1)) {
    throw_mismatch("q", q, "k", k, "heads of q a multiple of the heads of k",
                   layout_hint(heads_fit(q, k, 2)));
  }
}

// A shape has at most 2^31 keys, so a larger window side is unbounded.
int64_t window_side(const char* side, int64_t keys) {
  if (keys < -1) {
    throw_value_error(kFlashAttention, "window_size has " + std::to_string(keys) + " on the " +
                                           side + "; allowed: 0 or more, or -1 for all.");
  }
  return keys < 0 ? kUnboundedWindow : std::min(keys, kUnboundedWindow);
}

float checked_softcap(const std::optional<float>& softcap) {
  if (softcap && !(*softcap >= 0 && std::isfinite(*softcap))) {
    throw_value_error(kFlashAttention, "softcap is " + std::to_string(*softcap) +
                                           "; allowed: None, or a positive number (0 is None).");
  }
  return softcap.value_or(0.0f);
}

float checked_scale(const std::optional<float>& scale, int head_dim) {
  if (scale && !std::isfinite(*scale)) {
    throw_value_error(kFlashAttention, "scale is " + std::to_string(*scale) +
                                           "; allowed: None, or a finite number.");
  }
  return scale.value_or(1.0f / std::sqrt(static_cast<float>(head_dim)));
}

// Throws unless the dtype of `x` promotes to `dtype`.
void check_promotes(const char* name, const mx::array& x, mx::Dtype dtype) {
  if (mx::promote_types(x.dtype(), dtype) != dtype) {
    throw_value_error(kFlashAttention,
                      std::string(name) + " has dtype " + to_text(x.dtype()) +
                          "; allowed: dtypes that promote to that of q, k and v, " +
                          to_text(dtype) + ".");
  }
}

bool broadcasts_to(const mx::array& mask, const mx::Shape& scores) {
  for (size_t i = 1; i <= mask.ndim(); ++i) {
    const int extent = mask.shape(mask.ndim() - i);
    if (i > 4 || (extent != 1 && extent != scores[4 - i])) {
      return false;
    }
  }
  return true;
}

// Returns the mask with rank 4, where each dimension is 1 or that of the scores. `swapped` is the
// shape of the scores if lengths and heads were exchanged.
mx::array checked_mask(const mx::array& mask,
                       const mx::Shape& scores,
                       const mx::Shape& swapped,
                       mx::Dtype dtype,
                       mx::Stream s) {
  if (mx::issubdtype(mask.dtype(), mx::integer)) {
    throw_value_error(kFlashAttention,
                      "mask has dtype " + to_text(mask.dtype()) +
                          "; allowed: bool, True where a key is visible, such as "
                          "mask.astype(mx.bool_) of a mask of 0 and 1; or floating point, which is "
                          "added to the scores.");
  }
  if (!broadcasts_to(mask, scores)) {
    throw_value_error(kFlashAttention,
                      describe("mask", mask) + "; allowed: shapes that broadcast with " +
                          to_text(scores) + ", [batch, q heads, q length, k length]." +
                          layout_hint(broadcasts_to(mask, swapped)));
  }
  if (mask.dtype() != mx::bool_) {
    check_promotes("mask", mask, dtype);
  }
  mx::array typed = mask.dtype() == mx::bool_ ? mask : mx::astype(mask, dtype, s);
  while (typed.ndim() < 4) {  // one at a time, as in compose.cpp
    typed = mx::expand_dims(typed, 0, s);
  }
  return typed;
}

// float32 [1, q_heads]
mx::array checked_sinks(const mx::array& sinks, const mx::array& q, mx::Dtype dtype, mx::Stream s) {
  if (sinks.ndim() != 1 || sinks.shape(0) != q.shape(1)) {
    const bool swapped = sinks.ndim() == 1 && sinks.shape(0) == q.shape(2);
    throw_value_error(kFlashAttention, describe("sinks", sinks) + " and " + describe("q", q) +
                                           "; allowed: one number per head of q, (" +
                                           std::to_string(q.shape(1)) + ",)." +
                                           layout_hint(swapped));
  }
  check_promotes("sinks", sinks, dtype);
  return mx::expand_dims(mx::astype(sinks, mx::float32, s), 0, s);
}

// ---- the route ----------------------------------------------------------------------------------

// Returns the reason for falling back to a graph of MLX ops. Empty if a kernel serves the call.
std::string why_composed(const AttentionInputs& in, mx::Stream s) {
  if (const char* reason =
          why_not_fused(in.q.shape(3), in.v.shape(3), in.q.shape(2), /*gradient=*/false)) {
    return reason;
  }
  std::string reason;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &reason)) {
    return reason;
  }
  return "";
}

// Returns true if a gradient may follow. The forward then also saves the lse.
bool may_be_differentiated(const AttentionInputs& in) {
  const auto is_tracer = [](const std::optional<mx::array>& x) { return x && x->is_tracer(); };
  return in.q.is_tracer() || in.k.is_tracer() || in.v.is_tracer() || is_tracer(in.mask) ||
         is_tracer(in.sinks);
}

// The op in a shapeless trace, where even the default of `scale` depends on the shapes.
AttentionResult shapeless(const mx::array& q,
                          const mx::array& k,
                          const mx::array& v,
                          const AttentionOptions& options,
                          mx::Stream s) {
  const auto* const mask = std::get_if<mx::array>(&options.mask);
  Arrays inputs = {q, k, v};
  if (mask) {
    inputs.push_back(*mask);
  }
  OptionalInputs::append(inputs, options.sinks);
  const auto graph = [options, s, has_mask = mask != nullptr](const Arrays& in) -> Arrays {
    AttentionOptions own = options;
    if (has_mask) {
      own.mask = in[3];
    }
    OptionalInputs(in, 3 + has_mask).replace(own.sinks);
    const auto [out, lse] = flash_attention(in[0], in[1], in[2], own, s);
    return lse ? Arrays{out, *lse} : Arrays{out};
  };
  const Arrays outputs = shapeless_node(kFlashAttention, s, std::move(inputs), graph);
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

}  // namespace

AttentionResult flash_attention(const mx::array& q,
                                const mx::array& k,
                                const mx::array& v,
                                const AttentionOptions& options,
                                mx::StreamOrDevice stream) {
  const std::initializer_list<NamedArray> arrays = {{"q", q}, {"k", k}, {"v", v}};
  require_kernel_dtypes(kFlashAttention, arrays);
  check_shapes(q, k, v);
  AttentionConfig config;
  config.scale = checked_scale(options.scale, q.shape(3));
  config.softcap = checked_softcap(options.softcap);
  config.window_left = window_side("left", options.window.first);
  config.window_right = window_side("right", options.window.second);
  const mx::Stream s = require_stream(kFlashAttention, stream);
  if (traces_shapeless({&q, &k, &v, std::get_if<mx::array>(&options.mask),
                        options.sinks ? &*options.sinks : nullptr})) {
    return shapeless(q, k, v, options, s);
  }

  const mx::Dtype dtype = promoted_dtype(arrays);
  AttentionInputs in{mx::astype(q, dtype, s), mx::astype(k, dtype, s), mx::astype(v, dtype, s),
                     std::nullopt, std::nullopt};
  if (const auto* name = std::get_if<std::string>(&options.mask)) {
    if (*name != "causal") {
      throw_value_error(kFlashAttention,
                        "mask is '" + *name + "'; allowed: None, 'causal', or an array.");
    }
    config.window_right = 0;
  }
  if (const auto* mask = std::get_if<mx::array>(&options.mask)) {
    config.mask = mask->dtype() == mx::bool_ ? AttentionMask::kBool : AttentionMask::kAdditive;
    in.mask = checked_mask(*mask, {q.shape(0), q.shape(1), q.shape(2), k.shape(2)},
                           {q.shape(0), q.shape(2), q.shape(1), k.shape(1)}, dtype, s);
  }
  if (options.sinks) {
    config.has_sinks = true;
    in.sinks = checked_sinks(*options.sinks, q, dtype, s);
  }

  Arrays outputs;
  if (const std::string reason = why_composed(in, s); !reason.empty()) {
    note_fallback(kFlashAttention, reason);
    outputs = compose_attention(config, in, s);
  } else {
    const bool with_lse = options.return_lse || may_be_differentiated(in);
    outputs = apply_attention(config, std::move(in), with_lse, s);
  }
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

}  // namespace mlx_anvil
