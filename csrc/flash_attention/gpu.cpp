#include "flash_attention/gpu.h"

#include <algorithm>
#include <string>

#include "common/errors.h"
#include "flash_attention/gpu_params.h"
#include "metal/flash_attention/tiles.h"

namespace mlx_anvil {

namespace {

constexpr uint32_t kStoresLse = static_cast<uint32_t>(AttentionConstant::kFirstOfKernel);

struct ForwardTile {
  const char* dtype;
  int head_dim;
  int v_head_dim;
  int rows;
  int threads;

  std::string kernel() const {
    return std::string("flash_attention_forward_") + dtype + "_d" + std::to_string(head_dim) + "v" +
           std::to_string(v_head_dim);
  }
};

const ForwardTile& forward_tile(const char* dtype, const AttentionSizes& sizes) {
#define TILE(dtype, type, d, dv, row_fragments, keys, keeps_q, simdgroups) \
  {#dtype, d, dv, 8 * (row_fragments) * (simdgroups), 32 * (simdgroups)},
  static constexpr ForwardTile kTiles[] = {MLX_ANVIL_ATTENTION_FORWARD_TILES(TILE)};
#undef TILE
  const auto* tile = std::find_if(std::begin(kTiles), std::end(kTiles), [&](const ForwardTile& t) {
    return dtype == std::string_view(t.dtype) && sizes.head_dim <= t.head_dim &&
           sizes.v_head_dim <= t.v_head_dim;
  });
  if (tile == std::end(kTiles)) {
    throw_internal_error(kAttentionOp, "no kernel for heads of this size.");
  }
  return *tile;
}

void launch_forward(const AttentionConfig& config,
                    const AttentionSizes& sizes,
                    const AttentionForwardArrays& arrays,
                    const mx::Stream& stream) {
  const ForwardTile& tile = forward_tile(dtype_name(*arrays.q), sizes);
  AttentionForwardParams params{};
  params.common = attention_params(config, sizes, arrays);
  copy_strides(params.out_strides, *arrays.out);

  const bool vectors = rows_are_vectors(*arrays.q) && rows_are_vectors(*arrays.k) &&
                       rows_are_vectors(*arrays.v) && rows_are_vectors(*arrays.out);
  std::vector<FunctionConstant> constants = attention_constants(config, vectors);
  constants.push_back({kStoresLse, arrays.lse != nullptr});

  KernelLaunch request{};
  request.kernel = &attention_kernel(tile.kernel(), std::move(constants));
  request.inputs = attention_inputs(arrays);
  request.outputs = {arrays.out, arrays.lse ? arrays.lse : arrays.out};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>((sizes.q_len + tile.rows - 1) / tile.rows),
                  static_cast<uint32_t>(sizes.q_heads), static_cast<uint32_t>(sizes.batch)};
  request.threadgroup = {static_cast<uint32_t>(tile.threads), 1, 1};
  launch(request, stream);
}

}  // namespace

void attention_forward_gpu(const AttentionConfig& config,
                           const AttentionSizes& sizes,
                           const AttentionForwardArrays& arrays,
                           const mx::Stream& stream) {
  if (arrays.out->size() == 0) {
    return;
  }
  launch_forward(config, sizes, arrays, stream);
}

}  // namespace mlx_anvil
