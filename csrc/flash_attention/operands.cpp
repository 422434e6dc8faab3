#include "flash_attention/operands.h"

#include <algorithm>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/launch.h"

namespace mlx_anvil {

AttentionSizes sizes_of(const AttentionInputs& in) {
  AttentionSizes sizes;
  sizes.batch = in.q.shape(0);
  sizes.q_heads = in.q.shape(1);
  sizes.kv_heads = in.k.shape(1);
  sizes.q_len = in.q.shape(2);
  sizes.kv_len = in.pages ? int64_t{in.pages->shape(1)} * in.k.shape(2) : in.k.shape(2);
  sizes.head_dim = in.q.shape(3);
  sizes.v_head_dim = in.v.shape(3);
  return sizes;
}

AttentionView view_of(const mx::array& x) {
  AttentionView view;
  view.data = x.data<void>();
  std::copy(x.strides().begin(), x.strides().end(), view.strides);
  return view;
}

AttentionOutput output_of(mx::array& x) {
  AttentionOutput output;
  output.data = x.data<void>();
  std::copy(x.strides().begin(), x.strides().end(), output.strides);
  return output;
}

mx::array stretched(const mx::array& x, const mx::Shape& shape) {
  mx::array::Flags flags = x.flags();
  mx::Strides strides = x.strides();
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (x.shape(axis) != shape[axis]) {
      strides[axis] = 0;
      flags.contiguous = flags.row_contiguous = flags.col_contiguous = false;
    }
  }
  mx::array view(shape, x.dtype(), nullptr, {});
  view.copy_shared_buffer(x, strides, flags, x.data_size());
  return view;
}

MaskedAttention gpu_operands(const AttentionConfig& config,
                             AttentionInputs in,
                             bool reads_sequences,
                             mx::Stream s) {
  MaskedAttention call{config, std::move(in)};
  if (config.is_ragged && !reads_sequences) {
    call = evaluated_mask_of_sequences(config, call.in, s);
    keep_until_done({*call.in.mask}, s);  // the op has no other reference to it
  }
  std::optional<mx::array>&mask = call.in.mask, &sinks = call.in.sinks;
  const mx::Shape& q = call.in.q.shape();
  if (mask) {
    const int kv_len = static_cast<int>(sizes_of(call.in).kv_len);
    mask = stretched(*mask, {q[0], q[1], q[2], kv_len});
  }
  if (sinks) {
    sinks = stretched(*sinks, {q[0], q[1]});
  }
  return call;
}

void allocate_like(mx::array& output, const mx::array& like, const mx::Stream& stream) {
  const mx::Shape& shape = output.shape();
  const bool heads_in_rows = shape[1] > 1 && shape[2] > 1 && like.strides()[1] < like.strides()[2];
  if (!heads_in_rows) {
    output.set_data(allocate(output.nbytes(), stream));
    return;
  }
  const int64_t dim = shape[3], row = shape[1] * dim;
  mx::array::Flags flags{};
  flags.contiguous = true;
  output.set_data(allocate(output.nbytes(), stream), output.size(), {row * shape[2], dim, row, 1},
                  flags);
}

void fill_mask_and_sinks(AttentionOperands& operands,
                         const std::optional<mx::array>& mask,
                         const std::optional<mx::array>& sinks) {
  const AttentionSizes& sizes = operands.sizes;
  const int batch = static_cast<int>(sizes.batch), heads = static_cast<int>(sizes.q_heads);
  if (mask) {
    operands.mask = view_of(stretched(
        *mask, {batch, heads, static_cast<int>(sizes.q_len), static_cast<int>(sizes.kv_len)}));
  }
  if (sinks) {
    const mx::array rows = stretched(*sinks, {batch, heads});
    operands.sinks = rows.data<float>();
    std::copy(rows.strides().begin(), rows.strides().end(), operands.sinks_strides);
  }
}

void fill_sequences(AttentionOperands& operands, const std::optional<mx::array>& sequences) {
  if (sequences) {
    operands.sequences = reinterpret_cast<const AttentionSequence*>(sequences->data<int32_t>());
    operands.sequence_count = sequences->shape(0);
  }
}

void fill_pages(AttentionOperands& operands,
                const std::optional<mx::array>& pages,
                const mx::array& cache) {
  if (pages) {
    operands.pages = {.ids = pages->data<int32_t>(),
                      .columns = pages->shape(1),
                      .page_size = cache.shape(2),
                      .page_count = cache.shape(0)};
  }
}

void fill_operands(AttentionOperands& operands,
                   const AttentionConfig& config,
                   const AttentionInputs& in) {
  operands.dtype = kernel_dtype_of(in.q);
  operands.config = config;
  operands.sizes = sizes_of(in);
  operands.q = view_of(in.q);
  operands.k = view_of(in.k);
  operands.v = view_of(in.v);
  fill_pages(operands, in.pages, in.k);
  fill_mask_and_sinks(operands, in.mask, in.sinks);
  fill_sequences(operands, in.sequences);
}

}  // namespace mlx_anvil
