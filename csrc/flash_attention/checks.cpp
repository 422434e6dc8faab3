#include "flash_attention/checks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "common/simulate.h"

namespace mlx_anvil {

namespace {

// Throws for two arrays whose shapes do not fit together.
[[noreturn]] void throw_mismatch(const char* op,
                                 const char* a_name,
                                 const mx::array& a,
                                 const char* b_name,
                                 const mx::array& b,
                                 const std::string& allowed,
                                 const std::string& hint = "") {
  throw_value_error(op, shape_text(a_name, a) + " and " + shape_text(b_name, b) +
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

}  // namespace

void check_attention_shapes(const char* op,
                            const mx::array& q,
                            const mx::array& k,
                            const mx::array& v) {
  for (const auto& [name, x] : {NamedArray{"q", q}, NamedArray{"k", k}, NamedArray{"v", v}}) {
    if (x.ndim() != 4) {
      throw_value_error(
          op, shape_text(name, x) + "; allowed: rank 4, [batch, heads, length, head_dim].");
    }
    if (x.shape(3) == 0) {
      throw_value_error(op, shape_text(name, x) + "; allowed: a head_dim of at least 1.");
    }
  }
  if (q.shape(0) != k.shape(0)) {
    throw_mismatch(op, "q", q, "k", k, "one batch size");
  }
  if (k.shape(0) != v.shape(0)) {
    throw_mismatch(op, "k", k, "v", v, "one batch size");
  }
  if (q.shape(3) != k.shape(3)) {
    throw_mismatch(op, "q", q, "k", k, "one head_dim (the last axis)");
  }
  if (k.shape(1) != v.shape(1)) {
    throw_mismatch(op, "k", k, "v", v, "the same number of heads");
  }
  if (k.shape(2) != v.shape(2)) {
    throw_mismatch(op, "k", k, "v", v, "the same length");
  }
  const bool no_heads = q.shape(1) == 0 && k.shape(1) == 0;
  if (!no_heads && !heads_fit(q, k, 1)) {
    throw_mismatch(op, "q", q, "k", k, "heads of q a multiple of the heads of k",
                   layout_hint(heads_fit(q, k, 2)));
  }
}

namespace {

// A shape has at most 2^31 keys, so a larger window side is unbounded.
int64_t window_side(const char* op, const char* side, int64_t keys) {
  if (keys < -1) {
    throw_value_error(op, "window_size has " + std::to_string(keys) + " on the " + side +
                              "; allowed: 0 or more, or -1 for all.");
  }
  return keys < 0 ? kUnboundedWindow : std::min(keys, kUnboundedWindow);
}

float checked_softcap(const char* op, const std::optional<float>& softcap) {
  if (softcap && !(*softcap >= 0 && std::isfinite(*softcap))) {
    throw_value_error(op, "softcap is " + std::to_string(*softcap) +
                              "; allowed: None, or a positive number (0 is None).");
  }
  return softcap.value_or(0.0f);
}

float checked_scale(const char* op, const std::optional<float>& scale, int head_dim) {
  if (scale && !std::isfinite(*scale)) {
    throw_value_error(
        op, "scale is " + std::to_string(*scale) + "; allowed: None, or a finite number.");
  }
  return scale.value_or(1.0f / std::sqrt(static_cast<float>(head_dim)));
}

// Throws unless the dtype of `x` promotes to `dtype`.
void check_promotes(const char* op, const char* name, const mx::array& x, mx::Dtype dtype) {
  if (mx::promote_types(x.dtype(), dtype) != dtype) {
    throw_value_error(op, std::string(name) + " has dtype " + to_text(x.dtype()) +
                              "; allowed: dtypes that promote to that of the result, " +
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
mx::array checked_mask(const char* op,
                       const mx::array& mask,
                       const mx::Shape& scores,
                       const mx::Shape& swapped,
                       mx::Dtype dtype,
                       mx::Stream s) {
  if (mx::issubdtype(mask.dtype(), mx::integer)) {
    throw_value_error(op,
                      "mask has dtype " + to_text(mask.dtype()) +
                          "; allowed: bool, True where a key is visible, such as "
                          "mask.astype(mx.bool_) of a mask of 0 and 1; or floating point, which is "
                          "added to the scores.");
  }
  if (!broadcasts_to(mask, scores)) {
    throw_value_error(op, shape_text("mask", mask) + "; allowed: shapes that broadcast with " +
                              to_text(scores) + ", [batch, q heads, q length, k length]." +
                              layout_hint(broadcasts_to(mask, swapped)));
  }
  if (mask.dtype() != mx::bool_) {
    check_promotes(op, "mask", mask, dtype);
  }
  mx::array typed = mask.dtype() == mx::bool_ ? mask : mx::astype(mask, dtype, s);
  while (typed.ndim() < 4) {  // one at a time, as in compose.cpp
    typed = mx::expand_dims(typed, 0, s);
  }
  return typed;
}

// float32 [1, q_heads]
mx::array checked_sinks(
    const char* op, const mx::array& sinks, const mx::array& q, mx::Dtype dtype, mx::Stream s) {
  if (sinks.ndim() != 1 || sinks.shape(0) != q.shape(1)) {
    const bool swapped = sinks.ndim() == 1 && sinks.shape(0) == q.shape(2);
    throw_value_error(op, shape_text("sinks", sinks) + " and " + shape_text("q", q) +
                              "; allowed: one number per head of q, (" +
                              std::to_string(q.shape(1)) + ",)." + layout_hint(swapped));
  }
  check_promotes(op, "sinks", sinks, dtype);
  return mx::expand_dims(mx::astype(sinks, mx::float32, s), 0, s);
}

}  // namespace

void check_row_invariant(const AttentionOptions& options,
                         int head_dim,
                         const std::string& why_composed,
                         mx::Stream s) {
  if (!options.row_invariant) {
    return;
  }
  if (!why_composed.empty()) {
    throw_value_error(kFlashAttention, "row_invariant is True and " + why_composed +
                                           "; allowed with it: calls that a kernel takes.");
  }
  if (for_gpu(s) && head_dim > kMaxGpuDecodeHeadDim) {
    throw_value_error(kFlashAttention,
                      "row_invariant is True, the call is for a GPU, and the larger head_dim is " +
                          std::to_string(head_dim) + "; allowed with it on a GPU: at most 512.");
  }
  if (for_gpu(s) && options.lengths.cu_queries) {
    throw_value_error(kFlashAttention,
                      "row_invariant is True and the call is for a GPU and has cu_seqlens_q; "
                      "allowed with it on a GPU: q_lengths and lengths, or the CPU.");
  }
}

AttentionConfig checked_attention_config(const AttentionOptions& options, int head_dim) {
  AttentionConfig config;
  config.scale = checked_scale(options.op, options.scale, head_dim);
  config.softcap = checked_softcap(options.op, options.softcap);
  config.window_left = window_side(options.op, "left", options.window.first);
  config.window_right = window_side(options.op, "right", options.window.second);
  config.row_invariant = options.row_invariant;
  return config;
}

void append_extras(Arrays& inputs, const AttentionOptions& options) {
  if (const auto* mask = std::get_if<mx::array>(&options.mask)) {
    inputs.push_back(*mask);
  }
  const AttentionLengths& lengths = options.lengths;
  for (const auto* x : {&options.sinks, &lengths.keys, &lengths.queries, &lengths.starts,
                        &lengths.cu_queries, &lengths.cu_keys, &options.block_table}) {
    OptionalInputs::append(inputs, *x);
  }
}

void replace_extras(AttentionOptions& options, const Arrays& inputs, size_t first) {
  if (auto* mask = std::get_if<mx::array>(&options.mask)) {
    *mask = inputs[first++];
  }
  AttentionLengths& lengths = options.lengths;
  OptionalInputs own(inputs, first);
  for (auto* x : {&options.sinks, &lengths.keys, &lengths.queries, &lengths.starts,
                  &lengths.cu_queries, &lengths.cu_keys, &options.block_table}) {
    own.replace(*x);
  }
  options.plan = nullptr;  // of the arrays that these replace
}

AttentionExtras checked_attention_extras(AttentionConfig& config,
                                         const AttentionOptions& options,
                                         const mx::array& q,
                                         const mx::array& k,
                                         mx::Dtype dtype,
                                         mx::Stream s) {
  AttentionExtras extras;
  if (const auto* name = std::get_if<std::string>(&options.mask)) {
    if (*name != "causal") {
      throw_value_error(options.op,
                        "mask is '" + *name + "'; allowed: None, 'causal', or an array.");
    }
    config.window_right = 0;
  }
  if (const auto* mask = std::get_if<mx::array>(&options.mask)) {
    config.mask = mask->dtype() == mx::bool_ ? AttentionMask::kBool : AttentionMask::kAdditive;
    extras.mask = checked_mask(options.op, *mask, {q.shape(0), q.shape(1), q.shape(2), k.shape(2)},
                               {q.shape(0), q.shape(2), q.shape(1), k.shape(1)}, dtype, s);
  }
  if (options.sinks) {
    config.has_sinks = true;
    extras.sinks = checked_sinks(options.op, *options.sinks, q, dtype, s);
  }
  return extras;
}

}  // namespace mlx_anvil
