#include "flash_attention/mlx_route.h"

#include <limits>
#include <string>

#include "common/choices.h"

namespace mlx_anvil {

namespace {

bool is_causal(const AttentionConfig& config) {
  return config.window_right == 0;
}

// True if MLX 0.32.4 takes its fused kernel of many queries for these heads.
bool heads_have_mlx_kernel(const AttentionConfig& config, const AttentionInputs& in) {
  constexpr int kQueriesOf256 = 1024;
  const int head_dim = in.q.shape(3);
  if (head_dim != in.v.shape(3)) {
    return false;
  }
  return head_dim == 64 || head_dim == 96 || head_dim == 128 ||
         (head_dim == 256 && in.q.shape(2) >= kQueriesOf256 && is_causal(config));
}

// True if the window hides no key, apart from those that a causal mask hides.
bool window_is_open(const AttentionConfig& config, int64_t q_len, int64_t kv_len) {
  return config.window_left >= kv_len - 1 &&
         (is_causal(config) || config.window_right >= q_len - 1);
}

}  // namespace

std::optional<MlxKernel> faster_mlx_attention(const AttentionConfig& config,
                                              const AttentionInputs& in,
                                              mx::Stream stream) {
  const int64_t q_len = in.q.shape(2), kv_len = in.k.shape(2);
  // MLX has other kernels for few queries. In float32, its kernels of many round to TF32.
  if (q_len <= kDecodeRows || config.row_invariant || in.q.itemsize() != 2 || config.softcap != 0 ||
      (config.mask != AttentionMask::kNone && is_causal(config)) ||
      (is_causal(config) && q_len > kv_len) || (in.sinks && in.sinks->shape(0) != 1) ||
      in.q.size() == 0 || in.k.size() == 0 || !heads_have_mlx_kernel(config, in) ||
      !window_is_open(config, q_len, kv_len)) {
    return std::nullopt;
  }
  const int64_t queries = choices(stream.device).attention_mlx_queries;
  if (queries == 0 || q_len < queries) {
    return std::nullopt;
  }
  return MlxKernel{"mx.fast.scaled_dot_product_attention",
                   reason_for_mlx(device_traits(stream.device))};
}

mx::array mlx_attention(const AttentionConfig& config, const AttentionInputs& in, mx::Stream s) {
  std::optional<mx::array> sinks;
  if (in.sinks) {
    sinks = mx::astype(mx::squeeze(*in.sinks, 0, s), in.q.dtype(), s);
  }
  const std::string mode = is_causal(config) ? "causal" : in.mask ? "array" : "";
  const mx::array out = mx::fast::scaled_dot_product_attention(in.q, in.k, in.v, config.scale, mode,
                                                               in.mask, sinks, false, s);
  if (!in.mask) {
    return out;
  }
  // A row without visible keys is 0; MLX's is the mean of all values, or NaN.
  const mx::array visible =
      config.mask == AttentionMask::kBool
          ? *in.mask
          : mx::not_equal(*in.mask,
                          mx::array(-std::numeric_limits<float>::infinity(), in.mask->dtype()), s);
  return mx::where(mx::any(visible, -1, true, s), out, mx::array(0, out.dtype()), s);
}

}  // namespace mlx_anvil
