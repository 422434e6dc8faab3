// Launches the attention forward's Metal kernels: tile selection, decode splits and their
// combination.
#include "flash_attention/gpu.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "common/errors.h"
#include "common/integers.h"
#include "flash_attention/gpu_decode_plan.h"
#include "flash_attention/gpu_params.h"
#include "metal/flash_attention/tiles.h"

namespace mlx_anvil {

namespace {

// Index as in metal/flash_attention/decode_row.h.
constexpr uint32_t kKeysAreInParts = kFirstOwnConstant;
constexpr int kCombineThreads = 128;  // as in metal/flash_attention/decode_row.h

// ---- forward ------------------------------------------------------------------------------------

struct ForwardTile {
  const char* pass;
  const char* dtype;
  int head_dim;
  int v_head_dim;
  int rows;
  int threads;
  int memory;  // bytes that the launch sets

  KernelName kernel() const {
    return {"flash_attention_", pass, "_", dtype, "_d", head_dim, "v", v_head_dim};
  }
};

// Returns null if no tile supports heads of this size.
const ForwardTile* first_that_holds(std::span<const ForwardTile> tiles,
                                    std::string_view dtype,
                                    const AttentionSizes& sizes) {
  const auto tile = std::find_if(tiles.begin(), tiles.end(), [&](const ForwardTile& tile) {
    return dtype == tile.dtype && sizes.head_dim <= tile.head_dim &&
           sizes.v_head_dim <= tile.v_head_dim;
  });
  return tile == tiles.end() ? nullptr : &*tile;
}

// Bytes of two tiles of keys and of values, and of the queries if they are kept in memory.
constexpr int memory_of_large_tile(int d, int dv, int rows, int keys, std::string_view keeping) {
  const int tiles = 2 * keys * (row_bytes_of_tile(d) + row_bytes_of_tile(dv));
  return tiles + (keeping == "kKeptInMemory" ? rows * row_bytes_of_tile(d) : 0);
}

// A tall tile takes twice as many rows as a long one, in this many hundredths of its time.
constexpr int64_t kTimeOfTallTile = 172;
constexpr int64_t kRoundsOfUnlikeBlocks = 3;

// Returns the larger tile for the same heads, or null if this one is to be used.
const ForwardTile* large_tile(const ForwardTile& tile,
                              const AttentionConfig& config,
                              const AttentionSizes& sizes,
                              const DeviceTraits& traits) {
#define TILE_OF(pass, dtype, type, d, dv, row_fragments, keys, keeping, simdgroups, staging) \
  {pass,                                                                                     \
   #dtype,                                                                                   \
   d,                                                                                        \
   dv,                                                                                       \
   8 * (row_fragments) * (simdgroups),                                                       \
   32 * (simdgroups),                                                                        \
   memory_of_large_tile(d, dv, 8 * (row_fragments) * (simdgroups), keys, #keeping)},
#define LONG_TILE(...) TILE_OF("forward_matrix_long", __VA_ARGS__)
#define TALL_TILE(...) TILE_OF("forward_matrix_tall", __VA_ARGS__)
  static constexpr ForwardTile kLong[] = {MLX_ANVIL_ATTENTION_FORWARD_LONG_TILES(LONG_TILE)};
  static constexpr ForwardTile kTall[] = {MLX_ANVIL_ATTENTION_FORWARD_TALL_TILES(TALL_TILE)};
#undef TALL_TILE
#undef LONG_TILE
#undef TILE_OF
  const auto like = [&](std::span<const ForwardTile> tiles) {
    const auto found = std::find_if(tiles.begin(), tiles.end(), [&](const ForwardTile& other) {
      return std::string_view(other.dtype) == tile.dtype && other.head_dim == tile.head_dim &&
             other.v_head_dim == tile.v_head_dim;
    });
    const bool fits = found != tiles.end() && fits_multiprocessor(found->memory, traits);
    return fits ? &*found : nullptr;
  };
  const ForwardTile *const longer = like(kLong), *const taller = like(kTall);
  if (!longer || !taller || config.mask != AttentionMask::kNone) {  // with masks: not measured
    return nullptr;
  }
  const auto rounds = [&](const ForwardTile& of) {
    return ceil_div(ceil_div(sizes.q_len, of.rows) * sizes.q_heads * sizes.batch,
                    kMatrixThreadgroups * traits.multiprocessors);
  };
  // Blocks of a causal call take different times: among few, the longest decides.
  const bool alike =
      config.window_left >= kUnboundedWindow && config.window_right >= kUnboundedWindow;
  const bool is_faster = kTimeOfTallTile * rounds(*taller) < 100 * rounds(*longer);
  const bool is_measured = config.softcap == 0;
  const bool takes_taller =
      is_measured && is_faster && (alike || rounds(*taller) >= kRoundsOfUnlikeBlocks);
  return takes_taller ? taller : longer;
}

const ForwardTile& forward_tile(std::string_view dtype,
                                const AttentionConfig& config,
                                const AttentionSizes& sizes,
                                const DeviceTraits& traits) {
#define TILE_OF(pass, dtype, type, d, dv, row_fragments, keys, keeping, simdgroups, staging) \
  {pass, #dtype, d, dv, 8 * (row_fragments) * (simdgroups), 32 * (simdgroups), 0},
#define TILE(...) TILE_OF("forward", __VA_ARGS__)
#define MATRIX_TILE(...) TILE_OF("forward_matrix", __VA_ARGS__)
  static constexpr ForwardTile kTiles[] = {MLX_ANVIL_ATTENTION_FORWARD_TILES(TILE)};
  static constexpr ForwardTile kMatrixTiles[] = {
      MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES(MATRIX_TILE)};
#undef MATRIX_TILE
#undef TILE
#undef TILE_OF
  if (traits.matrix_units) {
    if (const ForwardTile* tile = first_that_holds(kMatrixTiles, dtype, sizes)) {
      const ForwardTile* large = large_tile(*tile, config, sizes, traits);
      return large ? *large : *tile;
    }
  }
  const ForwardTile* tile = first_that_holds(kTiles, dtype, sizes);
  if (!tile) {
    throw_internal_error(kFlashAttention, "no kernel for this head_dim.");
  }
  return *tile;
}

void launch_forward(const AttentionConfig& config,
                    const AttentionSizes& sizes,
                    const AttentionForwardArrays& arrays,
                    const mx::Stream& stream) {
  const ForwardTile& tile =
      forward_tile(dtype_name(arrays.in.q), config, sizes, device_traits(stream.device));
  AttentionForwardParams params{};
  params.common = attention_params(config, sizes, arrays.in);
  copy_strides(params.out_strides, *arrays.out);

  const int64_t blocks = (sizes.q_len + tile.rows - 1) / tile.rows;
  const AttentionGrid grid =
      attention_grid(config, blocks, sizes.q_heads, sizes.batch, stream.device);
  FunctionConstants constants =
      attention_constants(config, moves_vectors(arrays.in, {arrays.out}), arrays.lse);
  constants.add({grid.constant(), heads_fill_tile(sizes, tile.head_dim, tile.v_head_dim)});

  KernelLaunch request{};
  request.kernel = &attention_kernel(tile.kernel(), constants);
  request.inputs = attention_inputs(arrays.in);
  request.outputs = {arrays.out, arrays.lse ? arrays.lse : arrays.out};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = grid.extent;
  request.threadgroup = {static_cast<uint32_t>(tile.threads), 1, 1};
  if (tile.memory > 0) {
    request.threadgroup_memory = {static_cast<uint32_t>(tile.memory)};
  }
  launch(request, stream);
}

// ---- decode -------------------------------------------------------------------------------------

// Returns the number of keys that at least one query sees.
int64_t visible_keys(const AttentionParams& params) {
  const int64_t end =
      std::min<int64_t>(params.kv_len, int64_t{params.q_len} - 1 + params.band_high + 1);
  return std::max<int64_t>(end - std::max(0, params.band_low), 0);
}

void launch_combine(const AttentionConfig& config,
                    const AttentionSizes& sizes,
                    const AttentionForwardArrays& arrays,
                    const AttentionForwardParams& params,
                    const Scratch& partial_out,
                    const Scratch& partial_sums,
                    const mx::Stream& stream) {
  KernelLaunch request{};
  request.kernel = &attention_kernel(
      {"flash_attention_decode_combine_", dtype_name(arrays.in.q)},
      {{static_cast<uint32_t>(AttentionConstant::kSinks), config.has_sinks},
       {static_cast<uint32_t>(AttentionConstant::kStoresLse), arrays.lse != nullptr}});
  request.inputs = {partial_out.get(), partial_sums.get(),
                    arrays.in.sinks ? &*arrays.in.sinks : partial_sums.get()};
  request.outputs = {arrays.out, arrays.lse ? arrays.lse : arrays.out};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(sizes.q_heads * sizes.q_len),
                  static_cast<uint32_t>(sizes.batch),
                  static_cast<uint32_t>(ceil_div(sizes.v_head_dim, kCombineThreads))};
  request.threadgroup = {kCombineThreads, 1, 1};
  request.temporaries = {&partial_out, &partial_sums};
  launch(request, stream);
}

void launch_decode(const AttentionConfig& config,
                   const AttentionSizes& sizes,
                   const AttentionForwardArrays& arrays,
                   const mx::Stream& stream) {
  AttentionForwardParams params{};
  params.common = attention_params(config, sizes, arrays.in);
  copy_strides(params.out_strides, *arrays.out);

  const int64_t keys = visible_keys(params.common);
  const DecodePlan plan =
      decode_plan(dtype_name(arrays.in.q), sizes, keys, device_traits(stream.device));
  const DecodeTile& tile = *plan.tile;
  const int64_t parts = plan.parts;
  params.parts = static_cast<int32_t>(parts);
  params.keys_per_part = static_cast<int32_t>((keys + parts - 1) / parts);

  const bool in_parts = parts > 1;
  FunctionConstants constants =
      attention_constants(config, moves_vectors(arrays.in, {arrays.out}), !in_parts && arrays.lse);
  constants.add({{kKeysAreInParts, in_parts}});
  if (!tile.matrix_units) {
    constants.add({heads_fill_tile(sizes, tile.head_dim, tile.head_dim)});
  }

  const KernelName name = {"flash_attention_", tile.pass, "_",      dtype_name(arrays.in.q), "_d",
                           tile.head_dim,      "r",       tile.rows};

  KernelLaunch request{};
  request.kernel = &attention_kernel(name, constants);
  request.inputs = attention_inputs(arrays.in);
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(parts),
                  static_cast<uint32_t>(sizes.kv_heads * plan.row_blocks),
                  static_cast<uint32_t>(sizes.batch)};
  request.threadgroup = {static_cast<uint32_t>(tile.threads), 1, 1};
  if (!in_parts) {
    request.outputs = {arrays.out, arrays.lse ? arrays.lse : arrays.out};
    launch(request, stream);
    return;
  }
  const int all_rows = static_cast<int>(sizes.batch * sizes.q_heads * sizes.q_len);
  Scratch partial_out({all_rows, static_cast<int>(parts), static_cast<int>(sizes.v_head_dim)},
                      mx::float32, stream);
  Scratch partial_sums({all_rows, static_cast<int>(parts), 2}, mx::float32, stream);
  request.outputs = {partial_out.get(), partial_sums.get()};
  request.temporaries = {&partial_out, &partial_sums};
  launch(request, stream);
  launch_combine(config, sizes, arrays, params, partial_out, partial_sums, stream);
}

}  // namespace

void attention_forward_gpu(const AttentionConfig& config,
                           const AttentionSizes& sizes,
                           const AttentionForwardArrays& arrays,
                           const mx::Stream& stream) {
  if (arrays.out->size() == 0) {
    return;
  }
  if (sizes.q_len <= kDecodeRows) {
    launch_decode(config, sizes, arrays, stream);
  } else {
    launch_forward(config, sizes, arrays, stream);
  }
}

}  // namespace mlx_anvil
