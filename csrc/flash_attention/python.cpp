#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <utility>
#include <vector>

#include "common/bind_op.h"
#include "common/checks.h"
#include "common/choices.h"
#include "common/device_traits.h"
#include "common/errors.h"
#include "common/integers.h"
#include "common/python_args.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/gpu_backward_plan.h"
#include "flash_attention/plan.h"
#include "flash_attention/python_lengths.h"
#include "flash_attention/python_options.h"
#include "flash_attention/quantized.h"
#include "quantized_matmul/python_matrix.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

// Lengths and pages, or the plan that has them.
void set_rows(AttentionOptions& options,
              nb::handle plan,
              AttentionLengths lengths,
              std::optional<mx::array> block_table) {
  if (plan.is_none()) {
    options.lengths = std::move(lengths);
    options.block_table = std::move(block_table);
    return;
  }
  if (!nb::isinstance<AttentionPlan>(plan)) {
    throw_type_error(kFlashAttention, "plan", plan, "None, mlx_anvil.AttentionPlan");
  }
  if (lengths.keys || lengths.queries || lengths.starts || lengths.cu_queries || lengths.cu_keys ||
      block_table) {
    throw_value_error(
        kFlashAttention,
        "plan is given with lengths, q_lengths, starts, cu_seqlens or block_table; allowed: "
        "the plan alone, which has them.");
  }
  options.plan = nb::cast<std::shared_ptr<AttentionPlan>>(plan);
  options.lengths = options.plan->lengths;
  options.block_table = options.plan->block_table;
}

// A Tree (mlx_anvil.Tree, a Python class) makes the mask of a call itself.
nb::object mask_of_call(nb::handle mask,
                        nb::handle q,
                        nb::handle k,
                        const AttentionOptions& options) {
  constexpr const char* kMethod = "_flash_attention_mask";
  const bool is_plain =
      mask.is_none() || nb::isinstance<nb::str>(mask) || nb::isinstance<mx::array>(mask);
  if (is_plain || !nb::hasattr(mask, kMethod)) {
    return nb::borrow(mask);
  }
  to_array(kFlashAttention, "q", q);
  if (!is_quantized_tuple(k)) {
    to_array(kFlashAttention, "k", k);
  }
  nb::dict rows;
  const auto add = [&](const char* name, const std::optional<mx::array>& x) {
    if (x) {
      rows[name] = *x;
    }
  };
  add("lengths", options.lengths.keys);
  add("q_lengths", options.lengths.queries);
  add("starts", options.lengths.starts);
  add("cu_seqlens_q", options.lengths.cu_queries);
  add("cu_seqlens_k", options.lengths.cu_keys);
  add("block_table", options.block_table);
  return mask.attr(kMethod)(q, k, rows);
}

void set_options(AttentionOptions& options,
                 nb::handle scale,
                 nb::handle mask,
                 nb::handle sinks,
                 nb::handle window_size,
                 nb::handle softcap,
                 nb::handle return_lse,
                 nb::handle row_invariant) {
  options.scale = to_optional_number(kFlashAttention, "scale", scale);
  if (nb::isinstance<nb::str>(mask)) {
    options.mask = nb::cast<std::string>(mask);
  } else if (nb::isinstance<mx::array>(mask)) {
    options.mask = nb::cast<mx::array>(mask);
  } else if (!mask.is_none()) {
    throw_type_error(kFlashAttention, "mask", mask,
                     "None, 'causal', mlx.core.array, mlx_anvil.Tree");
  }
  options.sinks = to_optional_array(kFlashAttention, "sinks", sinks);
  options.window = to_window(kFlashAttention, window_size);
  options.softcap = to_optional_number(kFlashAttention, "softcap", softcap);
  options.return_lse = to_bool(kFlashAttention, "return_lse", return_lse);
  options.row_invariant = to_bool(kFlashAttention, "row_invariant", row_invariant);
}

AttentionResult attention_of_python(nb::handle q,
                                    nb::handle k,
                                    nb::handle v,
                                    const QuantizedOptions& k_options,
                                    const QuantizedOptions& v_options,
                                    const AttentionOptions& options,
                                    const mx::StreamOrDevice& stream) {
  const mx::array& queries = to_array(kFlashAttention, "q", q);
  if (is_quantized_tuple(k) != is_quantized_tuple(v)) {
    const bool of_k = is_quantized_tuple(k);
    to_array(kFlashAttention, of_k ? "v" : "k", of_k ? v : k);  // throws for another type
    throw_value_error(kFlashAttention, std::string(of_k ? "k" : "v") + " is quantized and " +
                                           (of_k ? "v" : "k") +
                                           " is an array; allowed: both, or neither.");
  }
  if (!is_quantized_tuple(k)) {
    const mx::array& keys = to_array(kFlashAttention, "k", k);
    const mx::array& values = to_array(kFlashAttention, "v", v);
    require_no_kv_options(kFlashAttention, k_options, "k and v");
    return flash_attention(queries, keys, values, options, stream);
  }
  QuantizedMatrix keys = to_quantized_tuple(kFlashAttention, "k", k);
  QuantizedMatrix values = to_quantized_tuple(kFlashAttention, "v", v);
  return quantized_flash_attention(queries, std::move(keys), std::move(values), k_options,
                                   v_options, options, stream);
}

// ---- the function -------------------------------------------------------------------------------

#define MLX_ANVIL_KV_TYPE "mlx.core.array | tuple[mlx.core.array, ...]"

#define MLX_ANVIL_ATTENTION_SIGNATURE(return_lse, result)                                  \
  "def flash_attention(q: mlx.core.array, k: " MLX_ANVIL_KV_TYPE ", v: " MLX_ANVIL_KV_TYPE \
  ", *, "                                                                                  \
  "scale: float | None = None, mask: typing.Literal['causal'] | mlx.core.array | "         \
  "mlx_anvil.Tree | None = None, sinks: mlx.core.array | None = None, "                    \
  "window_size: int | tuple[int, int] | None = None, softcap: float | None = None, "       \
  "return_lse: " return_lse                                                                \
  ", lengths: mlx.core.array | None = None, q_lengths: mlx.core.array | None = None, "     \
  "starts: mlx.core.array | None = None, "                                                 \
  "cu_seqlens_q: mlx.core.array | None = None, "                                           \
  "cu_seqlens_k: mlx.core.array | None = None, "                                           \
  "block_table: mlx.core.array | None = None, kv_group_size: int | None = None, "          \
  "kv_bits: int | tuple[int, int] | None = None, kv_mode: str = 'affine', "                \
  "row_invariant: bool = False, plan: AttentionPlan | None = None, "                       \
  "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> " result

// The signatures without and with the log-sum-exp tell type checkers what return_lse changes.
constexpr const char* kSignatures[2] = {
    MLX_ANVIL_ATTENTION_SIGNATURE("typing.Literal[False] = False", "mlx.core.array"),
    MLX_ANVIL_ATTENTION_SIGNATURE("typing.Literal[True]", "tuple[mlx.core.array, mlx.core.array]"),
};

constexpr const char* kDoc =
    R"(Scaled dot-product attention, fused forward and backward, without a score matrix in memory.

Formula:
    ``s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j]``, ``cap(x) = softcap * tanh(x / softcap)``;
    ``lse[i] = log(sum_j exp(s[i, j]) + exp(sink))``; ``out[i] = sum_j exp(s[i, j] - lse[i]) v[j]``.

    The sums run over the keys visible to query ``i``: those inside the window that are not masked.
    A query without visible keys, such as padding, has an output of 0, an lse of ``sink`` or -inf, and zero gradients.

A drop-in replacement for ``mx.fast.scaled_dot_product_attention``. It adds a sliding window,
softcap, the log-sum-exp, and gradients in O(length) memory: the backward kernels recompute the
scores and use the saved ``lse``. The arithmetic is float32 for every dtype. Inputs may have any
strides and are not copied. If ``q`` is a transposed view of ``[B, L, H, D]``, the result has the
same layout.

Fused kernels compute the gradients of ``q``, ``k``, ``v``, ``sinks`` and an additive ``mask``,
including those through ``lse``. Forward mode and higher derivatives use a graph of MLX ops that
materialises the scores. ``vmap`` works over any of the arrays. The CPU has kernels for head dims
up to 1024, GPUs up to 576 (512 of ``v``; 256 for gradients and quantized keys); larger ones run as a
graph of MLX ops, which ``trace()`` reports.

Keys and values may be quantized, as in a quantized cache. The CPU kernels read their codes and
never store them dequantized. Gradients are those of ``q``, ``mask``, ``sinks`` and affine scales
and biases; the backward pass dequantizes keys and values in memory.

Args:
    q (array): queries ``[B, Hq, Lq, D]``; float32, float16 or bfloat16.
    k (array or tuple): keys ``[B, Hkv, Lk, D]``, with ``Hq`` a multiple of ``Hkv`` (grouped-query
        attention); or quantized keys ``(w, scales[, biases])``, as ``mx.quantize`` returns them.
    v (array or tuple): values ``[B, Hkv, Lk, Dv]``, or quantized ones, like ``k``.
    scale (float, optional): factor of ``q . k``. Default: ``D ** -0.5``.
    mask (str, array or Tree, optional): ``"causal"``, aligned so that the last query sees the last
        key; a :class:`mlx_anvil.Tree` of draft tokens, which are the queries and the last keys; or
        an array that broadcasts with ``[B, Hq, Lq, Lk]``. A bool mask marks visible keys with
        ``True``. A floating-point mask is added to the scores; its dtype must promote to that of
        the result. The broadcast is never materialised.
    sinks (array, optional): ``[Hq]``, one logit per head. It enters the softmax sum but has no
        value.
    window_size (int or (int, int), optional): ``(left, right)``, the number of keys that a query
        sees before and after its own position. An int ``w`` means ``(w - 1, w - 1)``; with
        ``"causal"`` a query then sees ``w`` keys, including its own. -1: unbounded. Positions are
        aligned as for ``"causal"``, and the window combines with any mask.
    softcap (float, optional): bounds the scores to (-softcap, softcap) before the mask is added.
        ``None`` and 0: unbounded. Default: ``None``.
    return_lse (bool): also return ``lse``. Default: ``False``.
    lengths (array, optional): ``[B]`` integers: of each batch, only the first ``lengths[b]`` keys
        are keys, and the last query is aligned with the last of them. The rest is padding.
    q_lengths (array, optional): ``[B]`` integers, likewise for queries. Default: all.
    starts (array, optional): ``[B]`` integers: the keys before the first one, as of a batch that is padded on the left.
        The keys of each batch are those from ``starts[b]`` up to ``lengths[b]``. Default: 0.
    cu_seqlens_q (array, optional): ``[n + 1]`` integers that do not decrease: sequence ``s`` of a
        packed batch (``B = 1``) has the queries from ``cu_seqlens_q[s]`` up to
        ``cu_seqlens_q[s + 1]``. A query sees keys of its own sequence only.
    cu_seqlens_k (array, optional): likewise for keys. Default: ``cu_seqlens_q``.
    block_table (array, optional): ``[B, n]`` integers: ``k`` and ``v`` are pages
        ``[pages, Hkv, page_size, D]`` (or tuples of such arrays), and the keys of sequence ``b``
        are pages ``block_table[b]`` in their order, ``Lk = n * page_size``. Needs ``lengths``;
        pages past the last key in use may have any id. The CPU, and kernels for up to 8 queries on
        GPUs, read pages in place; otherwise they are copied into one array.
    kv_group_size (int, optional): of quantized ``k`` and ``v``, as ``group_size`` for
        ``quantized_matmul``.
    kv_bits (int or (int, int), optional): likewise; a pair is of keys and of values.
    kv_mode (str): likewise.
    row_invariant (bool): a row of the result has the same bits whatever rows are beside it and
        whatever keys follow those that it sees, so that drafts verified together get what they
        would get one at a time. For up to 16 queries; with more it is slow. Default: ``False``.
    plan (AttentionPlan, optional): lengths and pages, as :func:`mlx_anvil.attention_plan` prepared
        them for all layers of a step, in place of ``lengths`` and the others.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or tuple[array, array]: ``[B, Hq, Lq, Dv]`` in the promoted dtype of ``q``, ``k`` and ``v``
    (of ``q``, affine scales and biases if those are quantized); with ``return_lse`` also the
    natural log-sum-exp ``[B, Hq, Lq]`` in float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ranks, head counts, lengths or head dims do not match; the mask does not broadcast,
        has integers, or has a dtype that does not promote; softcap or window is negative; a dtype
        is unsupported; quantized ``k`` and ``v`` do not match their format; ``block_table`` comes
        without ``lengths``, with ``starts``, or names a page that the cache lacks; ``row_invariant``
        is set for head dims without a kernel, or for a packed batch on a GPU; the plan is for
        other sizes; the stream is on a GPU and MLX has no GPU backend.

After Dao 2023, "FlashAttention-2". Matches ``mx.fast.scaled_dot_product_attention``.
)";

nb::object flash_attention_of_python(nb::handle q,
                                     nb::handle k,
                                     nb::handle v,
                                     nb::handle scale,
                                     nb::handle mask,
                                     nb::handle sinks,
                                     nb::handle window_size,
                                     nb::handle softcap,
                                     nb::handle return_lse,
                                     nb::handle lengths,
                                     nb::handle q_lengths,
                                     nb::handle starts,
                                     nb::handle cu_seqlens_q,
                                     nb::handle cu_seqlens_k,
                                     nb::handle block_table,
                                     nb::handle kv_group_size,
                                     nb::handle kv_bits,
                                     nb::handle kv_mode,
                                     nb::handle row_invariant,
                                     nb::handle plan,
                                     nb::handle stream) {
  const auto [k_options, v_options] =
      to_kv_options(kFlashAttention, kv_group_size, kv_bits, kv_mode);
  AttentionOptions options;
  set_rows(options, plan,
           to_lengths(kFlashAttention, lengths, q_lengths, starts, cu_seqlens_q, cu_seqlens_k),
           to_optional_array(kFlashAttention, "block_table", block_table));
  set_options(options, scale, mask_of_call(mask, q, k, options), sinks, window_size, softcap,
              return_lse, row_invariant);
  auto [out, lse] = attention_of_python(q, k, v, k_options, v_options, options,
                                        to_stream_or_device(kFlashAttention, stream));
  return lse ? nb::object(nb::make_tuple(out, *lse)) : nb::cast(out);
}

// For benchmarks: in how many chunks the backward stores its weights on the simulated chip, in 16
// bits and without a window.
int64_t backward_chunks(int64_t heads, int64_t length) {
  const mx::Device device = mx::Device::cpu;
  const AttentionSizes sizes{
      .batch = 1, .q_heads = heads, .kv_heads = heads, .q_len = length, .kv_len = length};
  AttentionParams params{};
  params.band_low = static_cast<int32_t>(-length);
  params.band_high = static_cast<int32_t>(length);
  const WeightChunks chunks =
      weight_chunks(sizes, params, mx::size_of(mx::float16), device_traits(device).apple.cores,
                    choices(device).attention_stored_kb << 10);
  return ceil_div(heads, chunks.heads) * ceil_div(length, chunks.rows);
}

const BindOp bind_flash_attention([](nb::module_& m) {
  m.def("_backward_chunks", backward_chunks, "heads"_a, "length"_a);
  for (const char* signature : kSignatures) {  // the first overload takes every call
    m.def("flash_attention", flash_attention_of_python, "q"_a.none(), "k"_a.none(), "v"_a.none(),
          nb::kw_only(), "scale"_a = nb::none(), "mask"_a = nb::none(), "sinks"_a = nb::none(),
          "window_size"_a = nb::none(), "softcap"_a = nb::none(), "return_lse"_a.none() = false,
          "lengths"_a = nb::none(), "q_lengths"_a = nb::none(), "starts"_a = nb::none(),
          "cu_seqlens_q"_a = nb::none(), "cu_seqlens_k"_a = nb::none(),
          "block_table"_a = nb::none(), "kv_group_size"_a = nb::none(), "kv_bits"_a = nb::none(),
          "kv_mode"_a.none() = "affine", "row_invariant"_a.none() = false, "plan"_a = nb::none(),
          "stream"_a = nb::none(), nb::sig(signature), kDoc);
  }
});

}  // namespace

}  // namespace mlx_anvil
