#include "flash_attention/cpu_sequences.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace mlx_anvil {

namespace {

const void* moved(const void* data, int64_t bytes) {
  return data ? static_cast<const char*>(data) + bytes : nullptr;
}
void* moved(void* data, int64_t bytes) {
  return data ? static_cast<char*>(data) + bytes : nullptr;
}

// Starts an array [batch, head, row, ...] at a batch and a row.
template <class View>
void start_at(View& view, int64_t item_bytes, int64_t batch, int64_t row) {
  view.data = moved(view.data, (batch * view.strides[0] + row * view.strides[2]) * item_bytes);
}

// ---- what a sequence's call reads and writes ----------------------------------------------------

template <class Args>
void take_keys(Args& args, const AttentionSequence& at) {
  if (args.pages.ids) {
    return;  // the table tells where they are
  }
  start_at(args.k, element_size(args.dtype), at.batch, at.first_key);
  start_at(args.v, element_size(args.dtype), at.batch, at.first_key);
}
void take_keys(QuantizedAttentionArgs& args, const AttentionSequence& at) {
  if (args.pages.ids) {
    return;
  }
  for (QuantizedView* view : {&args.keys, &args.values}) {
    const int64_t number = view->format.has_biases() ? element_size(args.dtype) : 1;
    const auto offset = [&](const int64_t* strides) {
      return at.batch * strides[0] + at.first_key * strides[2];
    };
    QuantizedWeights& data = view->data;
    data.w += offset(view->w_strides);
    data.scales = moved(data.scales, offset(view->scales_strides) * number);
    data.biases = moved(data.biases, offset(view->biases_strides) * number);
  }
}

void take_results(AttentionForwardArgs& args, const AttentionSequence& at) {
  start_at(args.out, element_size(args.dtype), at.batch, at.first_query);
  if (args.lse) {
    args.lse += at.batch * args.sizes.q_heads * args.lse_stride + at.first_query;
  }
}

void take_results(AttentionBackwardArgs& args, const AttentionSequence& at) {
  const int64_t bytes = element_size(args.dtype);
  for (AttentionView* view : {&args.out, &args.d_out}) {
    start_at(*view, bytes, at.batch, at.first_query);
  }
  start_at(args.d_q, bytes, at.batch, at.first_query);
  start_at(args.d_k, bytes, at.batch, at.first_key);
  start_at(args.d_v, bytes, at.batch, at.first_key);
  args.lse += at.batch * args.sizes.q_heads * args.lse_stride + at.first_query;
  if (args.d_lse) {
    args.d_lse += at.batch * args.d_lse_strides[0] + at.first_query * args.d_lse_strides[2];
  }
  if (args.d_mask) {
    args.d_mask +=
        at.batch * args.d_mask_strides[0] + at.first_query * args.d_mask_strides[2] + at.first_key;
  }
  args.d_sinks = nullptr;  // of the batch, not of a sequence
}

template <class Args>
Args call_of(const Args& whole, const AttentionSequence& at) {
  Args args = whole;
  take_keys(args, at);
  args.pages.ids = args.pages.ids ? args.pages.ids + at.batch * args.pages.columns : nullptr;
  take_results(args, at);
  start_at(args.q, element_size(args.dtype), at.batch, at.first_query);
  if (args.config.mask != AttentionMask::kNone) {
    const int64_t bytes = args.config.mask == AttentionMask::kBool ? 1 : element_size(args.dtype);
    start_at(args.mask, bytes, at.batch, at.first_query);
    args.mask.data = moved(args.mask.data, at.first_key * args.mask.strides[3] * bytes);
  }
  if (args.sinks) {
    args.sinks += at.batch * args.sinks_strides[0];
  }
  args.sizes.batch = 1;
  args.sizes.q_len = at.queries;
  args.sizes.kv_len = at.keys;
  args.sequences = nullptr;
  args.config.is_ragged = args.config.is_packed = args.config.has_starts = false;
  return args;
}

template <class Args>
std::vector<Args> calls(const Args& args) {
  if (!args.config.is_ragged) {
    return {args};
  }
  std::vector<Args> result;
  std::vector<AttentionSequence> free(args.sizes.batch);  // the first rows that are
  for (int64_t i = 0; i < args.sequence_count; ++i) {
    AttentionSequence at = args.sequences[i];
    if (at.batch < 0 || at.batch >= args.sizes.batch) {
      continue;
    }
    AttentionSequence& unused = free[at.batch];
    const auto clamp = [](int32_t& first, int32_t& count, int32_t& least, int64_t length) {
      const int64_t end = std::clamp<int64_t>(int64_t{first} + count, least, length);
      first = std::clamp(first, least, static_cast<int32_t>(length));
      count = static_cast<int32_t>(std::max<int64_t>(0, end - first));
      least = first + count;
    };
    clamp(at.first_query, at.queries, unused.first_query, args.sizes.q_len);
    clamp(at.first_key, at.keys, unused.first_key, args.sizes.kv_len);
    result.push_back(call_of(args, at));
  }
  return result;
}

void clear(const AttentionOutput& x, int64_t elements, KernelDtype dtype) {
  if (x.data) {
    std::memset(x.data, 0, elements * element_size(dtype));
  }
}

}  // namespace

std::vector<AttentionForwardArgs> calls_of(const AttentionForwardArgs& args) {
  return calls(args);
}

std::vector<QuantizedAttentionArgs> calls_of(const QuantizedAttentionArgs& args) {
  return calls(args);
}

std::vector<AttentionBackwardArgs> calls_of(const AttentionBackwardArgs& args) {
  return calls(args);
}

void clear_results(const AttentionForwardArgs& args) {
  const AttentionSizes& sizes = args.sizes;
  clear(args.out, sizes.batch * sizes.q_heads * sizes.q_len * sizes.v_head_dim, args.dtype);
  if (!args.lse) {
    return;
  }
  for (int64_t row = 0; row < sizes.batch * sizes.q_heads; ++row) {
    const int64_t batch = row / sizes.q_heads, head = row % sizes.q_heads;
    const float sink =
        args.sinks ? args.sinks[batch * args.sinks_strides[0] + head * args.sinks_strides[1]]
                   : -std::numeric_limits<float>::infinity();
    std::fill_n(args.lse + row * args.lse_stride, sizes.q_len, sink);
  }
}

void clear_results(const AttentionBackwardArgs& args) {
  const AttentionSizes& sizes = args.sizes;
  const int64_t keys = sizes.batch * sizes.kv_heads * sizes.kv_len;
  clear(args.d_q, sizes.batch * sizes.q_heads * sizes.q_len * sizes.head_dim, args.dtype);
  clear(args.d_k, keys * sizes.head_dim, args.dtype);
  clear(args.d_v, keys * sizes.v_head_dim, args.dtype);
  if (args.d_mask) {
    std::fill_n(args.d_mask, sizes.batch * sizes.q_heads * sizes.q_len * sizes.kv_len, 0.0f);
  }
}

}  // namespace mlx_anvil
