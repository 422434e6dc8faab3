#include "flash_attention/gpu_params.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numbers>

#include "common/allocate.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {

constexpr float kLog2e = std::numbers::log2e_v<float>;

// Lengths below this leave room in 32 bits for sums of positions and band limits.
constexpr int64_t kLongest = int64_t{1} << 28;

bool rows_are_vectors(const mx::array& x) {
  if (x.size() == 0) {
    return true;
  }
  const auto whole = [&](int64_t elements) {
    return elements * static_cast<int64_t>(x.itemsize()) % 16 == 0;
  };
  // Where an array begins in its buffer decides, and buffers begin at page boundaries.
  if (x.strides(-1) != 1 || !whole(x.shape(-1)) || x.offset() % 16 != 0) {
    return false;
  }
  for (int axis = 0; axis < static_cast<int>(x.ndim()) - 1; ++axis) {
    if (x.shape(axis) > 1 && !whole(x.strides(axis))) {
      return false;
    }
  }
  return true;
}

}  // namespace

AttentionParams attention_params(const AttentionConfig& config,
                                 const AttentionSizes& sizes,
                                 const AttentionArrays& arrays) {
  if (std::max(sizes.q_len, sizes.kv_len) > kLongest) {
    throw_internal_error(kAttentionOp, "the kernels take at most 2^28 queries and keys.");
  }
  AttentionParams params{};
  copy_strides(params.q_strides, *arrays.q);
  copy_strides(params.k_strides, *arrays.k);
  copy_strides(params.v_strides, *arrays.v);
  if (arrays.mask) {
    copy_strides(params.mask_strides, *arrays.mask);
  }
  if (arrays.sinks) {
    copy_strides(params.sinks_strides, *arrays.sinks);
  }
  params.q_heads = static_cast<int32_t>(sizes.q_heads);
  params.kv_heads = static_cast<int32_t>(sizes.kv_heads);
  params.group = static_cast<int32_t>(sizes.group());
  params.q_len = static_cast<int32_t>(sizes.q_len);
  params.kv_len = static_cast<int32_t>(sizes.kv_len);
  params.head_dim = static_cast<int32_t>(sizes.head_dim);
  params.v_head_dim = static_cast<int32_t>(sizes.v_head_dim);

  const int64_t level = sizes.kv_len - sizes.q_len;  // the position of query 0
  const int64_t everything = sizes.kv_len + sizes.q_len;
  params.band_low = static_cast<int32_t>(level - std::min(config.window_left, everything));
  params.band_high = static_cast<int32_t>(level + std::min(config.window_right, everything));

  params.scale = config.scale;
  const bool capped = config.softcap > 0;
  params.score_scale = capped ? config.scale / config.softcap : config.scale * kLog2e;
  params.softcap = config.softcap * kLog2e;
  return params;
}

std::vector<FunctionConstant> attention_constants(const AttentionConfig& config,
                                                  bool vectors,
                                                  bool stores_lse) {
  const auto constant = [](AttentionConstant index, bool value) {
    return FunctionConstant{static_cast<uint32_t>(index), value};
  };
  const bool banded =
      config.window_left < kUnboundedWindow || config.window_right < kUnboundedWindow;
  return {
      constant(AttentionConstant::kBand, banded),
      constant(AttentionConstant::kSoftcap, config.softcap > 0),
      constant(AttentionConstant::kBoolMask, config.mask == AttentionMask::kBool),
      constant(AttentionConstant::kAdditiveMask, config.mask == AttentionMask::kAdditive),
      constant(AttentionConstant::kSinks, config.has_sinks),
      constant(AttentionConstant::kVectors, vectors),
      constant(AttentionConstant::kStoresLse, stores_lse),
  };
}

bool rows_are_vectors(std::initializer_list<const mx::array*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [](const mx::array* x) { return rows_are_vectors(*x); });
}

const char* dtype_name(const mx::array& x) {
  return x.dtype() == mx::float32 ? "float32" : x.dtype() == mx::float16 ? "float16" : "bfloat16";
}

std::vector<const mx::array*> attention_inputs(const AttentionArrays& arrays) {
  return {arrays.q, arrays.k, arrays.v, arrays.mask ? arrays.mask : arrays.q,
          arrays.sinks ? arrays.sinks : arrays.q};
}

mx::array scratch(mx::Shape shape, mx::Dtype dtype, const mx::Device& device) {
  mx::array x(std::move(shape), dtype, nullptr, {});
  x.set_data(allocate(x.nbytes(), device));
  return x;
}

const Kernel& attention_kernel(const std::string& name, std::vector<FunctionConstant> constants) {
  static std::mutex mutex;
  static std::map<std::string, Kernel> kernels;
  Kernel kernel(kAttentionOp, name, std::move(constants));
  std::lock_guard lock(mutex);
  return kernels.try_emplace(kernel.pipeline_key(), std::move(kernel)).first->second;
}

}  // namespace mlx_anvil
