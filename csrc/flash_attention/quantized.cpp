#include "flash_attention/quantized.h"

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
#include "flash_attention/quantized_forward.h"
#include "flash_attention/sequences.h"

namespace mlx_anvil {

namespace {

// An array with the shape of the dequantized matrix, for checks. It has no values.
mx::array shape_of_values(const QuantizedFormat& format, const QuantizedMatrix& matrix) {
  mx::Shape shape = matrix.scales.shape();
  shape.back() = static_cast<int>(columns_of(format, matrix));
  return mx::array(std::move(shape), mx::float32, nullptr, {});
}

// Returns true if a gradient may follow. The forward then also saves the lse.
bool may_be_differentiated(const QuantizedAttentionInputs& in) {
  const auto is_tracer = [](const std::optional<mx::array>& x) { return x && x->is_tracer(); };
  const auto traced = [&](const QuantizedMatrix& x) {
    return x.w.is_tracer() || x.scales.is_tracer() || is_tracer(x.biases);
  };
  return in.q.is_tracer() || traced(in.k) || traced(in.v) || is_tracer(in.mask) ||
         is_tracer(in.sinks);
}

// Appends the arrays of a matrix, without biases that it lacks, and reads them back.
void append(Arrays& inputs, const QuantizedMatrix& matrix) {
  inputs.push_back(matrix.w);
  inputs.push_back(matrix.scales);
  OptionalInputs::append(inputs, matrix.biases);
}

QuantizedMatrix next_matrix(const Arrays& inputs, size_t& at, bool has_biases) {
  QuantizedMatrix matrix{inputs[at], inputs[at + 1],
                         has_biases ? std::optional(inputs[at + 2]) : std::nullopt};
  at += 2 + has_biases;
  return matrix;
}

// The op in a shapeless trace, where even the default of `scale` depends on the shapes.
AttentionResult shapeless(const mx::array& q,
                          const QuantizedMatrix& k,
                          const QuantizedMatrix& v,
                          const QuantizedOptions& k_options,
                          const QuantizedOptions& v_options,
                          const AttentionOptions& options,
                          mx::Stream s) {
  Arrays inputs = {q};
  append(inputs, k);
  append(inputs, v);
  append_extras(inputs, options);
  const auto graph = [=, k_biases = k.biases.has_value(),
                      v_biases = v.biases.has_value()](const Arrays& in) -> Arrays {
    size_t at = 1;
    const QuantizedMatrix own_k = next_matrix(in, at, k_biases);
    const QuantizedMatrix own_v = next_matrix(in, at, v_biases);
    AttentionOptions own = options;
    replace_extras(own, in, at);
    const auto [out, lse] =
        quantized_flash_attention(in[0], own_k, own_v, k_options, v_options, own, s);
    return lse ? Arrays{out, *lse} : Arrays{out};
  };
  const Arrays outputs = shapeless_node(kFlashAttention, s, std::move(inputs), graph);
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

bool any_traces_shapeless(const mx::array& q,
                          const QuantizedMatrix& k,
                          const QuantizedMatrix& v,
                          const AttentionOptions& options) {
  const auto of = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  return traces_shapeless({&q, &k.w, &k.scales, of(k.biases), &v.w, &v.scales, of(v.biases),
                           std::get_if<mx::array>(&options.mask), of(options.sinks),
                           of(options.lengths.keys), of(options.lengths.queries),
                           of(options.lengths.starts), of(options.lengths.cu_queries),
                           of(options.lengths.cu_keys), of(options.block_table)});
}

// ---- the route ----------------------------------------------------------------------------------

// Returns null if a GPU has a kernel for these heads.
const char* why_not_over_codes(int head_dim, int queries) {
  const int most = queries <= kDecodeRows ? kMaxGpuDecodeHeadDim : kMaxGpuHeadDim;
  if (head_dim > most) {
    return "kernels over quantized keys take head dims up to 256, or 512 with at most 8 queries";
  }
  return nullptr;
}

// Returns why MLX ops compute the call, or an empty text if a kernel does.
std::string why_composed(const mx::array& q, const mx::array& v, mx::Stream s) {
  if (const char* reason = why_not_fused(q.shape(3), v.shape(3), /*gradient=*/false, for_gpu(s))) {
    return reason;
  }
  if (const char* reason = why_not_over_codes(std::max(q.shape(3), v.shape(3)), q.shape(2));
      reason && for_gpu(s)) {
    return reason;
  }
  std::string reason;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &reason)) {
    return reason;
  }
  return "";
}

}  // namespace

AttentionResult quantized_flash_attention(const mx::array& q,
                                          QuantizedMatrix k,
                                          QuantizedMatrix v,
                                          const QuantizedOptions& k_options,
                                          const QuantizedOptions& v_options,
                                          const AttentionOptions& options,
                                          mx::StreamOrDevice stream) {
  require_kernel_dtypes(kFlashAttention, {{"q", q}});
  const QuantizedKvFormats formats = {checked_format(kFlashAttention, k_options, "kv_"),
                                      checked_format(kFlashAttention, v_options, "kv_")};
  check_matrix(kFlashAttention, "k ", formats.k, k, columns_of(q));
  check_matrix(kFlashAttention, "v ", formats.v, v);
  const mx::Stream s = require_stream(kFlashAttention, stream);
  const std::optional<mx::array>& table = options.block_table;
  if (table) {
    check_pages(*table, q, options, arrays_of_pages(k, v), s);
  }
  const auto shape_of = [&](const QuantizedFormat& format, const QuantizedMatrix& matrix) {
    const mx::array values = shape_of_values(format, matrix);
    return table ? shape_of_rows(values, *table) : values;
  };
  const mx::array k_values = shape_of(formats.k, k), v_values = shape_of(formats.v, v);
  check_attention_shapes(kFlashAttention, q, k_values, v_values);
  if (options.plan) {
    check_plan(*options.plan, q, k_values, k.w.shape(0));
  }
  AttentionConfig config = checked_attention_config(options, q.shape(3));
  if (any_traces_shapeless(q, k, v, options)) {
    return shapeless(q, k, v, k_options, v_options, options, s);
  }

  const mx::Dtype dtype = result_dtype(q, {&k, &v});
  AttentionExtras extras = checked_attention_extras(config, options, q, k_values, dtype, s);
  const std::string reason = why_composed(q, v_values, s);
  const int head_dim = std::max(q.shape(3), v_values.shape(3));
  check_row_invariant(options, head_dim, reason, s);
  if (table) {
    // Numbers of another dtype are not converted in the whole cache.
    const auto has_dtype = [&](const QuantizedMatrix& x) {
      return !x.biases || (x.scales.dtype() == dtype && x.biases->dtype() == dtype);
    };
    config.is_paged = reason.empty() && has_dtype(k) && has_dtype(v) &&
                      reads_pages(k.w, *table, q.shape(2), head_dim, s);
    if (!config.is_paged) {
      k = gather_rows(k, *table, *options.lengths.keys, s);
      v = gather_rows(v, *table, *options.lengths.keys, s);
    }
  }
  convert(k, dtype, s);
  convert(v, dtype, s);
  QuantizedAttentionInputs in{
      mx::astype(q, dtype, s),
      std::move(k),
      std::move(v),
      std::move(extras.mask),
      std::move(extras.sinks),
      sequences_of_call(options, q, k_values, s),
      config.is_paged ? std::optional(options.plan ? *options.plan->pages : page_ids(*table, s))
                      : std::nullopt};
  config.is_ragged = in.sequences.has_value();
  config.is_packed = options.lengths.cu_queries.has_value();
  config.has_starts = options.lengths.starts.has_value();

  // The gradient of pages runs the forward again.
  const bool with_lse = options.return_lse || (!config.is_paged && may_be_differentiated(in));
  if (!reason.empty()) {
    note_fallback(kFlashAttention, reason);
  }
  const Arrays outputs =
      reason.empty() ? apply_quantized_attention(config, formats, std::move(in), with_lse, s)
                     : compose_attention(config, dequantized_inputs(formats, in, s), s);
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

}  // namespace mlx_anvil
