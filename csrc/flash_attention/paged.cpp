#include "flash_attention/paged.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "common/allocate.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "flash_attention/checks.h"
#include "flash_attention/forward.h"
#include "flash_attention/pages.h"
#include "flash_attention/primitive.h"

namespace mlx_anvil {

namespace {

// The arrays of a call whose keys and values are in pages, in contiguous rows. As the kernels for
// gradients hide rows by a mask, those past a sequence's last key are cleared.
AttentionInputs contiguous(AttentionInputs in, mx::Stream s) {
  const mx::array lengths = key_counts(*in.sequences, s);
  in.k = rows_of_pages(in.k, *in.pages, lengths, true, s);
  in.v = rows_of_pages(in.v, *in.pages, lengths, true, s);
  in.pages = std::nullopt;
  return in;
}

// Inputs: the operands, and the table of pages. Derivatives and vmap are those of contiguous rows.
class PagedDecode : public AttentionPrimitive {
 public:
  PagedDecode(mx::Stream stream, const AttentionConfig& config, bool with_lse)
      : AttentionPrimitive(stream, config), with_lse_(with_lse) {}

  const char* kind() const override { return "FlashAttentionPaged"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return AttentionPrimitive::is_equivalent(other) &&
           with_lse_ == static_cast<const PagedDecode&>(other).with_lse_;
  }

  Arrays compose(const Arrays& inputs) override {
    return apply_attention(config_, contiguous(paged_operands(inputs), stream()), with_lse_,
                           stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape& q = inputs[0].shape();
    std::vector<mx::Shape> shapes = {{q[0], q[1], q[2], inputs[2].shape(3)}};
    if (with_lse_) {
      shapes.push_back({q[0], q[1], q[2]});
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays&, Arrays&) override {
    throw_internal_error(op(), "pages are read in place on GPUs only.");
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const auto [config, in] = gpu_operands(config_, paged_operands(inputs), true, stream());
    allocate_like(outputs[0], in.q, stream());
    if (with_lse_) {
      outputs[1].set_data(allocate(outputs[1].nbytes(), stream()));
    }
    const AttentionForwardArrays arrays{in, &outputs[0], with_lse_ ? &outputs[1] : nullptr};
    attention_forward_gpu(config, sizes_of(in), arrays, stream());
  }

 protected:
  bool wants_dense(size_t input) const override {
    return input == operand_count() || AttentionPrimitive::wants_dense(input);
  }

 private:
  AttentionInputs paged_operands(const Arrays& inputs) const {
    AttentionInputs in = operands(inputs);
    in.pages = inputs[operand_count()];
    return in;
  }

  const bool with_lse_;
};

}  // namespace

bool reads_pages(const mx::array& q,
                 const mx::array& k,
                 const mx::array& v,
                 const mx::array& table,
                 const mx::Stream& s) {
  std::string why_not;
  return for_gpu(s) && can_launch(s.device, &why_not) && q.ndim() == 4 &&
         q.shape(2) <= kDecodeRows && k.size() > 0 && v.size() > 0 && table.size() > 0 &&
         std::has_single_bit(static_cast<uint32_t>(k.shape(2))) &&
         !why_not_fused(q.shape(3), v.shape(3), q.shape(2), /*gradient=*/false);
}

mx::array shape_of_rows(const mx::array& cache, const mx::array& table) {
  return mx::array(
      {table.shape(0), cache.shape(1), table.shape(1) * cache.shape(2), cache.shape(3)},
      cache.dtype(), nullptr, {});
}

mx::array kernel_table(const mx::array& table, int pages, mx::Stream s) {
  if (table.dtype() == mx::int32) {
    return table;
  }
  const mx::array ids = ids_in_32_bits(table, s);
  const auto like = [&](int value) { return mx::array(value, ids.dtype()); };
  return mx::astype(mx::clip(ids, like(0), like(pages - 1), s), mx::int32, s);
}

mx::array key_counts(const mx::array& sequences, mx::Stream s) {
  const int at = static_cast<int>(AttentionSequenceColumn::kKeys);
  return mx::flatten(mx::slice(sequences, {0, at}, {sequences.shape(0), at + 1}, s), s);
}

std::optional<AttentionResult> paged_decode(const mx::array& q,
                                            const mx::array& k,
                                            const mx::array& v,
                                            const mx::array& table,
                                            const AttentionOptions& options,
                                            mx::Stream s) {
  check_pages(table, q, options.lengths, {{"k", k}, {"v", v}}, s);
  const auto of = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  if (k.dtype() != q.dtype() || v.dtype() != q.dtype() || !reads_pages(q, k, v, table, s) ||
      traces_shapeless({&q, &k, &v, &table, std::get_if<mx::array>(&options.mask),
                        of(options.sinks), of(options.lengths.keys), of(options.lengths.queries),
                        of(options.lengths.cu_queries), of(options.lengths.cu_keys)})) {
    return std::nullopt;
  }
  require_kernel_dtypes(kFlashAttention, {{"q", q}, {"k", k}, {"v", v}});
  const mx::array k_rows = shape_of_rows(k, table), v_rows = shape_of_rows(v, table);
  check_attention_shapes(q, k_rows, v_rows);
  AttentionConfig config = checked_attention_config(options, q.shape(3));
  AttentionExtras extras = checked_attention_extras(config, options, q, k_rows, q.dtype(), s);
  const auto sequences = checked_sequences(options.lengths, q, k_rows, s);
  config.is_ragged = true;

  Arrays inputs = {q, k, v};
  const std::initializer_list<const std::optional<mx::array>*> given = {&extras.mask, &extras.sinks,
                                                                        &sequences};
  for (const std::optional<mx::array>* x : given) {
    if (*x) {
      inputs.push_back(**x);
    }
  }
  inputs.push_back(kernel_table(table, k.shape(0), s));
  std::vector<mx::Dtype> dtypes = {q.dtype()};
  if (options.return_lse) {
    dtypes.push_back(mx::float32);
  }
  const Arrays outputs = outputs_of(std::make_shared<PagedDecode>(s, config, options.return_lse),
                                    dtypes, std::move(inputs));
  return AttentionResult{outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

}  // namespace mlx_anvil
