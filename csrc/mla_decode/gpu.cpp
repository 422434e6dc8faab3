#include "mla_decode/gpu.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "common/errors.h"
#include "common/integers.h"
#include "common/kernel_name.h"
#include "common/launch_arrays.h"
#include "flash_attention/gpu_decode.h"
#include "flash_attention/gpu_params.h"
#include "metal/mla_decode/params.h"
#include "metal/mla_decode/tiles.h"
#include "mla_decode/primitive.h"

namespace mlx_anvil {

namespace {

struct MlaTile {
  const char* variant;
  const char* dtype;
  int rank;
  int rows;
  int threads;
  int memory;  // bytes that the launch sets

  KernelName kernel() const { return {"mla_decode_", variant, dtype, "_d", rank}; }
};

// Returns null if no tile of the list holds the rank.
const MlaTile* first_that_holds(std::span<const MlaTile> tiles,
                                std::string_view dtype,
                                int64_t rank) {
  const auto found = std::find_if(tiles.begin(), tiles.end(), [&](const MlaTile& tile) {
    return dtype == tile.dtype && rank <= tile.rank;
  });
  return found == tiles.end() ? nullptr : &*found;
}

// Bytes of the queries, two tiles of keys and the weights, all of 16 bits.
constexpr int memory_of_group_tile(int rank) {
  return 2 * kMlaGroupRows * (3 * (rank + kMlaRopeDim) + kMlaGroupRows);
}

const MlaTile& tile_of(std::string_view dtype, int64_t rank, bool takes_group_products) {
#define TILE(dtype, type, rank, keys, simdgroups) \
  {"", #dtype, rank, kMlaRows, 32 * (simdgroups), 0},
#define GROUP_TILE(dtype, type, rank) \
  {"matrix_group_", #dtype, rank, kMlaGroupRows, 256, memory_of_group_tile(rank)},
  static constexpr MlaTile kTiles[] = {MLX_ANVIL_MLA_TILES(TILE)};
  static constexpr MlaTile kGroupTiles[] = {MLX_ANVIL_MLA_GROUP_TILES(GROUP_TILE)};
#undef GROUP_TILE
#undef TILE
  const MlaTile* const of_group =
      takes_group_products ? first_that_holds(kGroupTiles, dtype, rank) : nullptr;
  const MlaTile* const tile = of_group ? of_group : first_that_holds(kTiles, dtype, rank);
  if (!tile) {
    throw_internal_error(kMlaDecode, "no kernel for this rank.");
  }
  return *tile;
}

// For up to as many rows, most of a block of kMlaGroupRows would be padding.
constexpr int64_t kMostRowsOfSmallBlocks = 8;

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

  const DeviceTraits traits = device_traits(stream.device);
  const int64_t rows = sizes.q_heads * sizes.q_len;
  const bool vectors = moves_vectors(base, {&in.q_rope, &in.k_rope, &out});
  const bool takes_group_products =
      traits.group_products && vectors && !in.mask && rows > kMostRowsOfSmallBlocks;
  const MlaTile& tile = tile_of(dtype_name(out), sizes.v_head_dim, takes_group_products);
  const int64_t row_blocks = ceil_div(rows, int64_t{tile.rows});
  const int64_t keys = visible_keys(forward.common);
  const int64_t parts = parts_of(tile, keys, row_blocks * sizes.batch, traits);
  forward.parts = static_cast<int32_t>(parts);
  forward.keys_per_part = static_cast<int32_t>(ceil_div(keys, parts));

  FunctionConstants constants = attention_constants(config, vectors, parts == 1 && lse != nullptr);
  constants.add({{kKeysAreInParts, parts > 1}});
  KernelLaunch request{};
  request.kernel = &kernel_named(kMlaDecode, tile.kernel(), constants);
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
  if (tile.memory > 0) {
    request.threadgroup_memory = {static_cast<uint32_t>(tile.memory)};
  }
  launch_in_parts(std::move(request), config, sizes, forward,
                  {&out, lse, in.sinks ? &*in.sinks : nullptr}, stream);
}

}  // namespace mlx_anvil
