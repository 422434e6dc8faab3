#include "flash_attention/flash_attention.h"

#include <utility>

#include "common/checks.h"
#include "common/launch.h"
#include "common/shapeless.h"
#include "common/simulate.h"
#include "common/trace.h"
#include "flash_attention/checks.h"
#include "flash_attention/compose.h"
#include "flash_attention/forward.h"
#include "flash_attention/pages.h"
#include "flash_attention/plan.h"
#include "flash_attention/sequences.h"

namespace mlx_anvil {

namespace {

// ---- the route ----------------------------------------------------------------------------------

// Returns the reason for falling back to a graph of MLX ops. Empty if a kernel serves the call.
std::string why_composed(const AttentionInputs& in, mx::Stream s) {
  if (const char* reason =
          why_not_fused(in.q.shape(3), in.v.shape(3), /*gradient=*/false, for_gpu(s))) {
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
  Arrays inputs = {q, k, v};
  append_extras(inputs, options);
  const auto graph = [options, s](const Arrays& in) -> Arrays {
    AttentionOptions own = options;
    replace_extras(own, in, 3);
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
  const mx::Stream s = require_stream(kFlashAttention, stream);
  const std::optional<mx::array>& table = options.block_table;
  if (table) {
    check_pages(*table, q, options, {{"k", k}, {"v", v}}, s);
  }
  const mx::array k_rows = table ? shape_of_rows(k, *table) : k;
  check_attention_shapes(kFlashAttention, q, k_rows, table ? shape_of_rows(v, *table) : v);
  if (options.plan) {
    check_plan(*options.plan, q, k_rows, k.shape(0));
  }
  AttentionConfig config = checked_attention_config(options, q.shape(3));
  const auto of = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  if (traces_shapeless({&q, &k, &v, std::get_if<mx::array>(&options.mask), of(options.sinks),
                        of(options.lengths.keys), of(options.lengths.queries),
                        of(options.lengths.starts), of(options.lengths.cu_queries),
                        of(options.lengths.cu_keys), of(table)})) {
    return shapeless(q, k, v, options, s);
  }

  const mx::Dtype dtype = promoted_dtype(arrays);
  AttentionExtras extras = checked_attention_extras(config, options, q, k_rows, dtype, s);
  AttentionInputs in{mx::astype(q, dtype, s),
                     k,
                     v,
                     std::move(extras.mask),
                     std::move(extras.sinks),
                     sequences_of_call(options, q, k_rows, s),
                     std::nullopt};
  config.is_ragged = in.sequences.has_value();
  config.is_packed = options.lengths.cu_queries.has_value();
  config.has_own_keys = config.is_packed && !options.lengths.cu_keys;
  config.has_starts = options.lengths.starts.has_value();
  const std::string reason = why_composed(in, s);
  const int head_dim = std::max(q.shape(3), v.shape(3));
  check_row_invariant(options, head_dim, reason, s);
  if (table) {
    // A cache of another dtype is not converted whole.
    config.is_paged = reason.empty() && k.dtype() == dtype && v.dtype() == dtype &&
                      reads_pages(k, *table, q.shape(2), head_dim, s);
    if (config.is_paged) {
      in.pages = options.plan ? *options.plan->pages : page_ids(*table, s);
    } else {
      in.k = gather_rows(k, *table, *options.lengths.keys, s);
      in.v = gather_rows(v, *table, *options.lengths.keys, s);
    }
  }
  in.k = mx::astype(std::move(in.k), dtype, s);
  in.v = mx::astype(std::move(in.v), dtype, s);

  Arrays outputs;
  if (!reason.empty()) {
    note_fallback(kFlashAttention, reason);
    outputs = compose_attention(config, in, s);
  } else {
    // The gradient of pages runs the forward again.
    const bool with_lse = options.return_lse || (!config.is_paged && may_be_differentiated(in));
    outputs = apply_attention(config, std::move(in), with_lse, s);
  }
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

}  // namespace mlx_anvil
