// Launches the attention forward's Metal kernels: tile selection.
#include "flash_attention/gpu.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "common/errors.h"
#include "common/integers.h"
#include "flash_attention/gpu_decode.h"
#include "flash_attention/gpu_forward_tile.h"
#include "flash_attention/gpu_params.h"
#include "metal/flash_attention/tiles.h"

namespace mlx_anvil {

namespace {

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

// Returns null if the call is not one for products of four SIMD groups.
const ForwardTile* group_tile(std::string_view dtype,
                              const AttentionConfig& config,
                              const AttentionSizes& sizes,
                              bool vectors,
                              const DeviceTraits& traits) {
#define TILE(dtype, type, d, dv, keys, simdgroups, resident)                              \
  {"forward_matrix_group",           #dtype, d, dv, 16 * (simdgroups), 32 * (simdgroups), \
   memory_of_group_tile(d, dv, keys)},
  static constexpr ForwardTile kTiles[] = {MLX_ANVIL_ATTENTION_FORWARD_GROUP_TILES(TILE)};
#undef TILE
  const bool takes = vectors && suits_group_products(config, sizes.q_len, traits);
  return takes ? first_that_holds(kTiles, dtype, sizes) : nullptr;
}

const ForwardTile& forward_tile(std::string_view dtype,
                                const AttentionConfig& config,
                                const AttentionSizes& sizes,
                                bool vectors,
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
  if (const ForwardTile* tile = group_tile(dtype, config, sizes, vectors, traits)) {
    return *tile;
  }
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

// Launches the kernel for all columns of v and out, or for what fits one tile.
void launch_forward(const AttentionConfig& config,
                    const AttentionSizes& sizes,
                    const AttentionForwardArrays& arrays,
                    const mx::Stream& stream) {
  const bool vectors = moves_vectors(arrays.in, {arrays.out});
  const ForwardTile& tile =
      forward_tile(dtype_name(arrays.in.q), config, sizes, vectors, device_traits(stream.device));
  AttentionForwardParams params{};
  params.common = attention_params(config, sizes, arrays.in);
  copy_strides(params.out_strides, *arrays.out);

  const AttentionGrid grid = attention_grid(
      config,
      blocks_of_rows(sizes.q_len, tile.rows, packed_sequences(config, sizes, arrays.in.sequences)),
      sizes.q_heads, sizes.batch, stream.device);
  FunctionConstants constants = attention_constants(config, vectors, arrays.lse);
  constants.add({grid.constant(), heads_fill_tile(sizes, tile.head_dim, tile.v_head_dim)});
  add_ragged_constants(constants, config);

  KernelLaunch request{};
  request.kernel = &attention_kernel(tile.kernel(), constants);
  request.inputs = attention_inputs(arrays.in);
  request.inputs.push_back(&sequences_or_q(arrays.in));
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

// Returns `count` columns of x.
mx::array columns_of(const mx::array& x, int64_t first, int64_t count) {
  mx::Shape shape = x.shape();
  shape.back() = static_cast<int>(count);
  mx::array columns(std::move(shape), x.dtype(), nullptr, {});
  auto flags = x.flags();
  flags.contiguous = flags.row_contiguous = flags.col_contiguous = false;
  columns.copy_shared_buffer(x, x.strides(), flags, x.data_size(), first * x.strides(-1));
  return columns;
}

// The tiles of the widest heads have kMaxGpuHeadDim columns of v, whose scores are computed once
// for each of them.
void launch_forward_by_columns(const AttentionConfig& config,
                               const AttentionSizes& sizes,
                               const AttentionForwardArrays& arrays,
                               const mx::Stream& stream) {
  if (sizes.v_head_dim <= kMaxGpuHeadDim) {
    return launch_forward(config, sizes, arrays, stream);
  }
  for (int64_t first = 0; first < sizes.v_head_dim; first += kMaxGpuHeadDim) {
    AttentionSizes part = sizes;
    part.v_head_dim = std::min<int64_t>(sizes.v_head_dim - first, kMaxGpuHeadDim);
    AttentionInputs in = arrays.in;
    in.v = columns_of(arrays.in.v, first, part.v_head_dim);
    mx::array out = columns_of(*arrays.out, first, part.v_head_dim);
    launch_forward(config, part, {in, &out, first == 0 ? arrays.lse : nullptr}, stream);
  }
}

}  // namespace

bool is_decode(const AttentionConfig& config, const AttentionSizes& sizes) {
  return config.row_invariant ||
         (!config.is_packed &&
          suits_gpu_decode(sizes.q_len, std::max(sizes.head_dim, sizes.v_head_dim)));
}

void attention_forward_gpu(const AttentionConfig& config,
                           const AttentionSizes& sizes,
                           const AttentionForwardArrays& arrays,
                           const mx::Stream& stream) {
  if (arrays.out->size() == 0) {
    return;
  }
  if (is_decode(config, sizes)) {
    attention_decode_gpu(config, sizes, arrays, stream);
  } else {
    launch_forward_by_columns(config, sizes, arrays, stream);
  }
}

}  // namespace mlx_anvil
