#include "flash_attention/gpu_params.h"

#include <algorithm>
#include <numbers>

#include "common/errors.h"

namespace mlx_anvil {

namespace {

constexpr float kLog2e = std::numbers::log2e_v<float>;

// Shorter lengths leave room in 32 bits for sums of positions and band limits.
constexpr int64_t kLongest = int64_t{1} << 28;

}  // namespace

AttentionParams attention_params(const AttentionConfig& config,
                                 const AttentionSizes& sizes,
                                 const AttentionInputs& in) {
  if (std::max(sizes.q_len, sizes.kv_len) > kLongest) {
    throw_internal_error(kFlashAttention, "the kernels take at most 2^28 queries and keys.");
  }
  AttentionParams params{};
  copy_strides(params.q_strides, in.q);
  copy_strides(params.k_strides, in.k);
  copy_strides(params.v_strides, in.v);
  if (in.mask) {
    copy_strides(params.mask_strides, *in.mask);
  }
  if (in.sinks) {
    copy_strides(params.sinks_strides, *in.sinks);
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

bool has_band(const AttentionConfig& config) {
  return config.window_left < kUnboundedWindow || config.window_right < kUnboundedWindow;
}

int64_t packed_sequences(const AttentionConfig& config,
                         const AttentionSizes& sizes,
                         const std::optional<mx::array>& sequences) {
  return config.starts_anywhere() ? sequences->shape(0) / sizes.batch : 0;
}

AttentionGrid attention_grid(const AttentionConfig& config,
                             int64_t blocks,
                             int64_t heads,
                             int64_t batch,
                             const mx::Device& device) {
  // Measured on NVIDIA GPUs only, whose L2 holds the keys of several heads.
  constexpr int64_t kMostBlocksInY = 65535;
  AttentionGrid grid{};
  grid.heads_are_along_x =
      has_band(config) && device_traits(device).matrix_units && blocks <= kMostBlocksInY;
  grid.extent = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(heads),
                 static_cast<uint32_t>(batch)};
  if (grid.heads_are_along_x) {
    std::swap(grid.extent.x, grid.extent.y);
  }
  return grid;
}

bool moves_vectors(const AttentionInputs& in, std::initializer_list<const mx::array*> others) {
  const auto is_near = [](const mx::array* x) { return x->strides(-2) <= kFarthestRow; };
  const std::initializer_list<const mx::array*> inputs = {&in.q, &in.k, &in.v};
  return rows_are_vectors(inputs) && rows_are_vectors(others) &&
         std::all_of(inputs.begin(), inputs.end(), is_near) &&
         std::all_of(others.begin(), others.end(), is_near) &&
         (!in.mask || (is_near(&*in.mask) && in.mask->strides(-1) <= kFarthestRow));
}

FunctionConstants attention_constants(const AttentionConfig& config,
                                      bool vectors,
                                      bool stores_lse) {
  const auto constant = [](AttentionConstant index, bool value) {
    return FunctionConstant{static_cast<uint32_t>(index), value};
  };
  return {
      constant(AttentionConstant::kBand, has_band(config)),
      constant(AttentionConstant::kSoftcap, config.softcap > 0),
      constant(AttentionConstant::kBoolMask, config.mask == AttentionMask::kBool),
      constant(AttentionConstant::kAdditiveMask, config.mask == AttentionMask::kAdditive),
      constant(AttentionConstant::kSinks, config.has_sinks),
      constant(AttentionConstant::kVectors, vectors),
      constant(AttentionConstant::kStoresLse, stores_lse),
  };
}

KernelInputs attention_inputs(const AttentionInputs& in) {
  return {&in.q, &in.k, &in.v, in.mask ? &*in.mask : &in.q, in.sinks ? &*in.sinks : &in.q};
}

const mx::array& sequences_or_q(const AttentionInputs& in) {
  return in.sequences ? *in.sequences : in.q;
}

const mx::array& pages_or_q(const AttentionInputs& in) {
  return in.pages ? *in.pages : in.q;
}

void add_ragged_constants(FunctionConstants& constants, const AttentionConfig& config) {
  constants.add({{static_cast<uint32_t>(AttentionConstant::kRagged), config.is_ragged},
                 {static_cast<uint32_t>(AttentionConstant::kPacked), config.starts_anywhere()}});
}

const Kernel& attention_kernel(const KernelName& name, const FunctionConstants& constants) {
  return kernel_named(kFlashAttention, name, constants);
}

bool fits_multiprocessor(int64_t threadgroup_memory, const DeviceTraits& traits) {
  return kMatrixThreadgroups * (threadgroup_memory + kReservedThreadgroupMemory) <=
         traits.threadgroup_memory;
}

}  // namespace mlx_anvil
