#include "flash_attention/gpu_launch.h"

#include "common/allocate.h"

namespace mlx_anvil {

namespace {

// Far beyond any length, and far from overflow when added to a position.
constexpr int64_t kWidestWindow = int64_t{1} << 30;

constexpr HeadTile kHeadTiles[] = {{32, 32},   {64, 64},   {72, 72},   {80, 80},  {96, 96},
                                   {128, 128}, {192, 128}, {192, 192}, {256, 256}};

}  // namespace

const Kernel& attention_kernel(const std::string& name, std::vector<FunctionConstant> constants) {
  static std::mutex mutex;
  static std::map<std::string, Kernel> kernels;
  Kernel kernel("flash_attention", name, std::move(constants));
  std::lock_guard lock(mutex);
  return kernels.try_emplace(kernel.pipeline_key(), kernel).first->second;
}

std::string HeadTile::name() const {
  const std::string text = "d" + std::to_string(head_dim);
  return head_dim == v_head_dim ? text : text + "_" + std::to_string(v_head_dim);
}

HeadTile head_tile(const AttentionSizes& sizes) {
  return *std::find_if(std::begin(kHeadTiles), std::end(kHeadTiles), [&](const HeadTile& tile) {
    return sizes.head_dim <= tile.head_dim && sizes.v_head_dim <= tile.v_head_dim;
  });
}

std::string kernel_name(const char* variant, mx::Dtype dtype, const std::string& tile) {
  return std::string("flash_attention_") + variant + "_" + to_text(dtype) + "_" + tile;
}

void set_strides(int64_t* to, const mx::array* x) {
  if (x) {
    std::copy(x->strides().begin(), x->strides().end(), to);
  }
}

AttentionParams attention_params(const AttentionConfig& config,
                                 const AttentionSizes& sizes,
                                 const AttentionArrays& arrays) {
  AttentionParams params{};
  set_strides(params.q_strides, arrays.q);
  set_strides(params.k_strides, arrays.k);
  set_strides(params.v_strides, arrays.v);
  set_strides(params.mask_strides, arrays.mask);
  set_strides(params.sinks_strides, arrays.sinks);
  params.q_heads = static_cast<int32_t>(sizes.q_heads);
  params.kv_heads = static_cast<int32_t>(sizes.kv_heads);
  params.q_len = static_cast<int32_t>(sizes.q_len);
  params.kv_len = static_cast<int32_t>(sizes.kv_len);
  params.head_dim = static_cast<int32_t>(sizes.head_dim);
  params.v_head_dim = static_cast<int32_t>(sizes.v_head_dim);
  params.window_left = static_cast<int32_t>(std::min(config.window_left, kWidestWindow));
  params.window_right = static_cast<int32_t>(std::min(config.window_right, kWidestWindow));
  params.scale = config.scale;
  params.softcap = config.softcap;
  params.splits = 1;
  params.split_keys = params.kv_len;
  return params;
}

bool rows_are_vectors(std::initializer_list<const mx::array*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const mx::array* x) {
    const int64_t pack = 16 / static_cast<int64_t>(x->itemsize());
    return x->offset() % 16 == 0 && x->strides()[3] == 1 && x->shape(3) % pack == 0 &&
           std::all_of(x->strides().begin(), x->strides().end() - 1,
                       [&](int64_t stride) { return stride % pack == 0; });
  });
}

std::vector<FunctionConstant> score_constants(const AttentionConfig& config, bool vector_loads) {
  return {{kVectorLoads, vector_loads},
          {kHasBoolMask, config.mask == AttentionMask::kBool},
          {kHasAdditiveMask, config.mask == AttentionMask::kAdditive},
          {kHasSinks, config.has_sinks},
          {kHasSoftcap, config.softcap > 0}};
}

mx::array temporary(const mx::Shape& shape, mx::Dtype dtype, const mx::Device& device) {
  mx::array x(shape, dtype, nullptr, {});
  x.set_data(allocate(x.nbytes(), device));
  return x;
}

}  // namespace mlx_anvil
