#include "mla_decode/gpu.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "common/errors.h"
#include "common/integers.h"
#include "common/launch_arrays.h"
#include "flash_attention/gpu_decode.h"
#include "flash_attention/gpu_params.h"
#include "metal/mla_decode/params.h"
#include "metal/mla_decode/tiles.h"
#include "mla_decode/primitive.h"

namespace mlx_anvil {

namespace {

struct MlaTile {
  std::string_view dtype;
  int rank;
  int threads;
};

const MlaTile& tile_of(std::string_view dtype, int64_t rank) {
#define TILE(dtype, type, rank, keys, simdgroups) {#dtype, rank, 32 * (simdgroups)},
  static constexpr MlaTile kTiles[] = {MLX_ANVIL_MLA_TILES(TILE)};
#undef TILE
  const auto found = std::find_if(std::begin(kTiles), std::end(kTiles), [&](const MlaTile& tile) {
    return tile.dtype == dtype && rank <= tile.rank;
  });
  if (found == std::end(kTiles)) {
    throw_internal_error(kMlaDecode, "no kernel for this rank.");
  }
  return *found;
}

// Parts cost a launch and a pass over their outputs, which are as long as a row of keys.
constexpr int64_t kLeastKeysOfPart = 128;
constexpr int64_t kThreadsOfMultiprocessor = 256;

int64_t parts_of(const MlaTile& tile,
                 int64_t keys,
                 int64_t threadgroups,
                 const DeviceTraits& traits) {
  const int64_t resident = traits.matrix_units ? int64_t{traits.multiprocessors} *
                                                     (kThreadsOfMultiprocessor / tile.threads)
                                               : apple_cores(traits);
  return parts_of_keys(keys, kLeastKeysOfPart, threadgroups, std::max<int64_t>(resident, 1));
}

}  // namespace

void mla_decode_gpu(const AttentionConfig& config,
                    const MlaInputs& in,
                    mx::array& out,
                    mx::array* lse,
                    const mx::Stream& stream) {
  const AttentionSizes sizes = sizes_of(in);
  if (out.size() == 0) {
    return;
  }
  const AttentionInputs base{in.q_nope, in.latent, in.latent, in.mask, in.sinks, std::nullopt};
  MlaParams params{};
  AttentionForwardParams& forward = params.forward;
  forward.common = attention_params(config, sizes, base);
  copy_strides(forward.out_strides, out);
  copy_strides(params.q_rope_strides, in.q_rope);
  copy_strides(params.k_rope_strides, in.k_rope);
  params.rope_dim = in.q_rope.shape(3);

  const std::string_view dtype = dtype_name(out);
  const MlaTile& tile = tile_of(dtype, sizes.v_head_dim);
  const int64_t row_blocks = ceil_div(sizes.q_heads * sizes.q_len, int64_t{kMlaRows});
  const int64_t keys = visible_keys(forward.common);
  const int64_t parts =
      parts_of(tile, keys, row_blocks * sizes.batch, device_traits(stream.device));
  forward.parts = static_cast<int32_t>(parts);
  forward.keys_per_part = static_cast<int32_t>(ceil_div(keys, parts));

  FunctionConstants constants = attention_constants(
      config, moves_vectors(base, {&in.q_rope, &in.k_rope, &out}), parts == 1 && lse != nullptr);
  constants.add({{kKeysAreInParts, parts > 1}});
  KernelLaunch request{};
  request.kernel =
      &kernel_named(kMlaDecode, {"mla_decode_", dtype_name(out), "_d", tile.rank}, constants);
  request.inputs = {&in.q_nope,
                    &in.q_rope,
                    &in.latent,
                    &in.k_rope,
                    in.mask ? &*in.mask : &in.q_nope,
                    in.sinks ? &*in.sinks : &in.q_nope};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(row_blocks), static_cast<uint32_t>(parts),
                  static_cast<uint32_t>(sizes.batch)};
  request.threadgroup = {static_cast<uint32_t>(tile.threads), 1, 1};
  launch_in_parts(std::move(request), config, sizes, forward,
                  {&out, lse, in.sinks ? &*in.sinks : nullptr}, stream);
}

}  // namespace mlx_anvil
