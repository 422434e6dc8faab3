// The launches of the forward.
#include "flash_attention/gpu.h"

#include "flash_attention/gpu_launch.h"

namespace mlx_anvil {

namespace {

constexpr uint32_t kThreads = 128;  // four SIMD groups; metal/flash_attention/scores.h has the same

// Query rows of a threadgroup: sixteen, or eight for large heads, for each SIMD group
// (metal/flash_attention/forward.metal).
int64_t rows_of_group(const HeadTile& tile) {
  return tile.head_dim >= 192 ? 32 : 64;
}

}  // namespace

void attention_forward_gpu(const AttentionConfig& config,
                           const AttentionSizes& sizes,
                           const AttentionForwardArrays& arrays,
                           const mx::Stream& stream) {
  if (arrays.out->size() == 0) {
    return;
  }
  AttentionParams params = attention_params(config, sizes, arrays);
  set_strides(params.out_strides, arrays.out);
  const bool vectors = rows_are_vectors({arrays.q, arrays.k, arrays.v, arrays.out});
  std::vector<FunctionConstant> constants = score_constants(config, vectors);
  constants.push_back({kStoreLse, arrays.lse != nullptr});
  const HeadTile tile = head_tile(sizes);

  KernelLaunch request;
  request.kernel =
      &attention_kernel(kernel_name("forward", arrays.q->dtype(), tile.name()), constants);
  // Metal wants a buffer in every place; what a call does not have, its kernel does not look at.
  request.inputs = {arrays.q, arrays.k, arrays.v, arrays.mask ? arrays.mask : arrays.q,
                    arrays.sinks ? arrays.sinks : arrays.q};
  request.outputs = {arrays.out, arrays.lse ? arrays.lse : arrays.out};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {groups_of(sizes.q_len, rows_of_group(tile)), static_cast<uint32_t>(sizes.q_heads),
                  static_cast<uint32_t>(sizes.batch)};
  request.threadgroup = {kThreads, 1, 1};
  launch(request, stream);
}

}  // namespace mlx_anvil
