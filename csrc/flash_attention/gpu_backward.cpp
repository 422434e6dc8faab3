// Launches the attention backward's Metal kernels: delta, the sinks' gradient, dQ, then dK and dV.
// With matrix units the last ones compute P again; elsewhere dQ stores it (gpu_backward_plan.h).
#include <algorithm>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "common/choices.h"
#include "common/integers.h"
#include "flash_attention/gpu_backward_plan.h"
#include "flash_attention/gpu_params.h"
#include "metal/flash_attention/tiles.h"

namespace mlx_anvil {

namespace {

constexpr uint32_t kRowThreads =
    256;  // of the kernels in metal/flash_attention/backward_rows.metal
constexpr int64_t kRowsPerGroup = 8;

constexpr uint32_t kHasDLse = static_cast<uint32_t>(AttentionConstant::kHasDLse);
constexpr uint32_t kStoresDMask = static_cast<uint32_t>(AttentionConstant::kStoresDMask);

constexpr uint32_t kStoresWeights = kFirstOwnConstant;  // of dq
constexpr uint32_t kMakesKeys = kFirstOwnConstant;      // of sums

constexpr uint32_t groups_of(int64_t items, int64_t size) {
  return static_cast<uint32_t>((items + size - 1) / size);
}

struct BackwardTile {
  const char* pass;
  const char* suffix;
  const char* dtype;
  int head_dim;
  int v_head_dim;
  int rows;  // that a threadgroup keeps
  uint32_t threads;
  uint32_t memory;  // bytes that the launch sets

  KernelName kernel() const {
    return {"flash_attention_backward_", pass, suffix, "_", dtype, "_d", head_dim, "v", v_head_dim};
  }
  bool is_pass(std::string_view name) const { return name == pass; }
};

// Bytes of two tiles of queries and of cotangents, and of the operands kept in memory.
constexpr uint32_t memory_of_long_tile(
    int d, int dv, int kept, int rows, std::string_view keeping, std::string_view keeping_too) {
  const int tiles = 2 * rows * (row_bytes_of_tile(d) + row_bytes_of_tile(dv));
  const int first = keeping == "kKeptInMemory" ? kept * row_bytes_of_tile(d) : 0;
  const int second = keeping_too == "kKeptInMemory" ? kept * row_bytes_of_tile(dv) : 0;
  return static_cast<uint32_t>(tiles + first + second);
}

// Bytes of four tiles of both operands that pass. dkv also keeps its block there, and two floats
// for each query of two tiles.
constexpr uint32_t memory_of_group_tile(
    std::string_view pass, int d, int dv, int rows, int simdgroups) {
  const int passing = 4 * 2 * rows * (d + dv);
  const int kept = 2 * 16 * simdgroups * (d + dv) + 2 * 2 * 4 * rows;
  return static_cast<uint32_t>(passing + (pass == "dkv" ? kept : 0));
}

#define TILE_OF(suffix, memory, pass, dtype, type, d, dv, row_fragments, rows, kept, kept_too, \
                simdgroups, staging)                                                           \
  {#pass, suffix, #dtype, d, dv, 8 * (row_fragments) * (simdgroups), 32 * (simdgroups), memory},
#define TILE(...) TILE_OF("", 0, __VA_ARGS__)
#define MATRIX_TILE(...) TILE_OF("_matrix", 0, __VA_ARGS__)
#define LONG_TILE(pass, dtype, type, d, dv, row_fragments, rows, kept, kept_too, simdgroups,      \
                  staging)                                                                        \
  TILE_OF("_matrix_long",                                                                         \
          memory_of_long_tile(d, dv, 8 * (row_fragments) * (simdgroups), rows, #kept, #kept_too), \
          pass, dtype, type, d, dv, row_fragments, rows, kept, kept_too, simdgroups, staging)
constexpr BackwardTile kTiles[] = {MLX_ANVIL_ATTENTION_BACKWARD_TILES(TILE)
                                       MLX_ANVIL_ATTENTION_BACKWARD_KEYS_TILES(TILE)};
constexpr BackwardTile kMatrixTiles[] = {MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES(MATRIX_TILE)};
constexpr BackwardTile kLongTiles[] = {MLX_ANVIL_ATTENTION_BACKWARD_LONG_TILES(LONG_TILE)};
#define GROUP_TILE(pass, dtype, type, d, dv, rows, simdgroups)                                \
  TILE_OF("_matrix_group", memory_of_group_tile(#pass, d, dv, rows, simdgroups), pass, dtype, \
          type, d, dv, 2, rows, , , simdgroups, )
#define KEYS_TILE(...) GROUP_TILE(dkv, __VA_ARGS__)
#define QUERIES_TILE(...) GROUP_TILE(dq, __VA_ARGS__)
constexpr BackwardTile kGroupTiles[] = {MLX_ANVIL_ATTENTION_BACKWARD_GROUP_TILES(KEYS_TILE)
                                            MLX_ANVIL_ATTENTION_BACKWARD_GROUP_TILES(QUERIES_TILE)};
#undef QUERIES_TILE
#undef KEYS_TILE
#undef GROUP_TILE
#undef LONG_TILE
#undef MATRIX_TILE
#undef TILE
#undef TILE_OF

// dK or dV from stored weights.
struct SumsTile {
  const char* dtype;
  int head_dim;
  int keys;  // of a threadgroup
  uint32_t threads;
};

#define TILE(dtype, type, d, key_groups, column_groups) \
  {#dtype, d, kStoredRows * (key_groups), 32 * (key_groups) * (column_groups)},
constexpr SumsTile kSumsTiles[] = {MLX_ANVIL_ATTENTION_SUMS_TILES(TILE)};
#undef TILE

const SumsTile& sums_tile(std::string_view dtype, const AttentionSizes& sizes) {
  const int64_t columns = std::max(sizes.head_dim, sizes.v_head_dim);
  return *std::find_if(std::begin(kSumsTiles), std::end(kSumsTiles), [&](const SumsTile& tile) {
    return dtype == tile.dtype && columns <= tile.head_dim;
  });
}

// Returns null if heads of this size use other passes, or have none.
const BackwardTile* tile_among(std::span<const BackwardTile> tiles,
                               std::string_view pass,
                               std::string_view dtype,
                               const AttentionSizes& sizes) {
  const auto holds = [&](const BackwardTile& tile) {
    return dtype == tile.dtype && sizes.head_dim <= tile.head_dim &&
           sizes.v_head_dim <= tile.v_head_dim;
  };
  // The first size that fits the heads determines which passes exist for it.
  const auto first = std::find_if(tiles.begin(), tiles.end(), [&](const auto& tile) {
    return holds(tile) && tile.is_pass("dq") == (pass == "dq");
  });
  const auto found = std::find_if(
      first, tiles.end(), [&](const auto& tile) { return holds(tile) && tile.is_pass(pass); });
  const bool same_size = first != tiles.end() && found != tiles.end() &&
                         first->head_dim == found->head_dim &&
                         first->v_head_dim == found->v_head_dim;
  return same_size ? &*found : nullptr;
}

// One backward call: the state that all its launches share.
struct Backward {
  const AttentionConfig& config;
  const AttentionSizes& sizes;
  AttentionBackwardArrays arrays;
  AttentionBackwardParams params;
  Scratch delta;
  const mx::Stream& stream;

  void launch_delta();
  void launch_sinks();
  void launch_queries(const Scratch* weights = nullptr, int64_t chunk_heads = 0);
  void launch_keys();
  void launch_chunks();

 private:
  // Gradients from the weights of a chunk. `sums` goes from chunk to chunk.
  struct Sums {
    bool of_keys;
    const mx::array* operand;
    mx::array* gradient;
    Scratch sums;
  };
  void launch_sums(
      const SumsTile& tile, Sums& of, const Scratch& weights, int64_t chunk_heads, bool vectors);

  int64_t rows_of_queries(int64_t rows) const {
    return rows_in_grid(sizes.q_len, rows, params.sequences);
  }
  int64_t blocks_of_keys(int64_t rows) const {
    return blocks_of_rows(sizes.kv_len, rows, params.sequences);
  }

  KernelLaunch request(const Kernel& kernel, Extent grid, uint32_t threads) {
    KernelLaunch request{};
    request.kernel = &kernel;
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = grid;
    request.threadgroup = {threads, 1, 1};
    request.temporaries = {&delta};
    return request;
  }

  KernelLaunch pass(const BackwardTile& tile,
                    int64_t blocks,
                    int64_t heads,
                    bool vectors,
                    bool stores_weights = false) {
    FunctionConstants constants = attention_constants(config, vectors, false);
    constants.add({{kStoresDMask, tile.is_pass("dq") && arrays.d_mask}});
    if (tile.is_pass("dq")) {
      constants.add({{kStoresWeights, stores_weights}});
    }
    const AttentionGrid grid = attention_grid(config, blocks, heads, sizes.batch, stream.device);
    constants.add({grid.constant(), heads_fill_tile(sizes, tile.head_dim, tile.v_head_dim)});
    add_ragged_constants(constants, config);
    KernelLaunch launch =
        request(attention_kernel(tile.kernel(), constants), grid.extent, tile.threads);
    if (tile.memory > 0) {
      launch.threadgroup_memory = {tile.memory};
    }
    const mx::array& mask = arrays.in.mask ? *arrays.in.mask : arrays.in.q;
    launch.inputs = {&arrays.in.q, &arrays.in.k, &arrays.in.v, &mask, &sequences_or_q(arrays.in),
                     arrays.lse,   arrays.d_out, delta.get()};
    return launch;
  }

  // Returns null if the call is not one for products of four SIMD groups.
  const BackwardTile* group_tile(std::string_view pass, bool vectors) const {
    const bool takes = vectors && suits_group_products(config, std::min(sizes.q_len, sizes.kv_len),
                                                       device_traits(stream.device));
    return takes ? tile_among(kGroupTiles, pass, dtype_name(arrays.in.q), sizes) : nullptr;
  }

  const BackwardTile* tile_of(std::string_view pass, bool vectors) const {
    const char* dtype = dtype_name(arrays.in.q);
    const DeviceTraits traits = device_traits(stream.device);
    if (group_tile("dkv", vectors)) {
      return group_tile(pass, vectors);
    }
    if (!traits.matrix_units || !tile_among(kMatrixTiles, "dkv", dtype, sizes)) {
      return tile_among(kTiles, pass, dtype, sizes);
    }
    const BackwardTile* const tile = tile_among(kMatrixTiles, pass, dtype, sizes);
    const auto longer =
        std::find_if(std::begin(kLongTiles), std::end(kLongTiles), [&](const BackwardTile& other) {
          return tile && config.mask == AttentionMask::kNone && other.is_pass(tile->pass) &&
                 std::string_view(other.dtype) == dtype && other.head_dim == tile->head_dim &&
                 other.v_head_dim == tile->v_head_dim && fits_multiprocessor(other.memory, traits);
        });
    return longer == std::end(kLongTiles) ? tile : longer;
  }
};

void Backward::launch_delta() {
  const Kernel& kernel = attention_kernel({"flash_attention_delta_", dtype_name(arrays.in.q)},
                                          {{kHasDLse, arrays.d_lse != nullptr}});
  KernelLaunch launch =
      request(kernel,
              {groups_of(sizes.q_len, kRowsPerGroup), static_cast<uint32_t>(sizes.q_heads),
               static_cast<uint32_t>(sizes.batch)},
              kRowThreads);
  launch.inputs = {arrays.out, arrays.d_out, arrays.lse, arrays.d_lse ? arrays.d_lse : arrays.lse};
  launch.outputs = {delta.get()};
  mlx_anvil::launch(launch, stream);
}

void Backward::launch_sinks() {
  KernelLaunch launch = request(
      attention_kernel({"flash_attention_d_sinks"}, {}),
      {static_cast<uint32_t>(sizes.q_heads), static_cast<uint32_t>(sizes.batch), 1}, kRowThreads);
  launch.inputs = {&*arrays.in.sinks, arrays.lse, delta.get()};
  launch.outputs = {arrays.d_sinks};
  mlx_anvil::launch(launch, stream);
}

void Backward::launch_queries(const Scratch* weights, int64_t chunk_heads) {
  // This pass also computes the mask's gradient, and the weights, so it runs even if d_q is not
  // wanted.
  std::optional<Scratch> unwanted;
  mx::array* d_q = arrays.d_q;
  if (!d_q) {
    unwanted.emplace(arrays.in.q.shape(), arrays.in.q.dtype(), stream);
    d_q = unwanted->get();
  }
  copy_strides(params.d_q_strides, *d_q);
  const bool vectors = moves_vectors(arrays.in, {arrays.d_out, d_q});
  const BackwardTile* tile = tile_of("dq", vectors);
  KernelLaunch launch = pass(*tile, groups_of(rows_of_queries(tile->rows), tile->rows),
                             sizes.q_heads, vectors, weights != nullptr);
  launch.outputs = {d_q, arrays.d_mask ? arrays.d_mask : d_q};
  if (unwanted) {
    launch.temporaries.push_back(&*unwanted);
  }
  if (weights) {
    const int64_t rows =
        std::min(int64_t{params.rows}, rows_of_queries(kChunkRows) - params.first_row);
    launch.grid = {groups_of(rows, tile->rows), static_cast<uint32_t>(chunk_heads), 1};
    launch.temporaries.push_back(weights);
    launch.after = arrays.d_k;  // the chunk before the last, which is overwritten
  }
  launch.outputs.push_back(weights ? const_cast<mx::array*>(weights->get()) : d_q);
  mlx_anvil::launch(launch, stream);
}

void Backward::launch_keys() {
  copy_strides(params.d_k_strides, *arrays.d_k);
  copy_strides(params.d_v_strides, *arrays.d_v);
  const bool vectors = moves_vectors(arrays.in, {arrays.d_out, arrays.d_k, arrays.d_v});
  for (const char* name : {"dkv", "dk", "dv"}) {
    if (const BackwardTile* tile = tile_of(name, vectors)) {
      KernelLaunch launch = pass(*tile, blocks_of_keys(tile->rows), sizes.kv_heads, vectors);
      launch.outputs = {arrays.d_k, arrays.d_v};
      mlx_anvil::launch(launch, stream);
    }
  }
}

void Backward::launch_sums(
    const SumsTile& tile, Sums& of, const Scratch& weights, int64_t chunk_heads, bool vectors) {
  FunctionConstants constants = {
      {static_cast<uint32_t>(AttentionConstant::kBand), has_band(config)},
      {static_cast<uint32_t>(AttentionConstant::kVectors), vectors},
      heads_fill_tile(sizes, tile.head_dim, tile.head_dim),
      {kMakesKeys, of.of_keys}};
  add_ragged_constants(constants, config);
  KernelLaunch launch =
      request(attention_kernel({"flash_attention_backward_sums_", tile.dtype, "_d", tile.head_dim},
                               constants),
              {static_cast<uint32_t>(blocks_of_keys(tile.keys)),
               static_cast<uint32_t>(chunk_heads / sizes.group()), 1},
              tile.threads);
  launch.temporaries = {&weights, &of.sums};
  launch.inputs = {weights.get(), of.operand, &sequences_or_q(arrays.in)};
  launch.outputs = {of.gradient, of.sums.get()};
  mlx_anvil::launch(launch, stream);
}

void Backward::launch_chunks() {
  const mx::Dtype dtype = arrays.in.q.dtype();
  AttentionSizes of_grid = sizes;
  of_grid.q_len = rows_of_queries(kChunkRows);
  const WeightChunks chunks = weight_chunks(of_grid, params.common, mx::size_of(dtype),
                                            device_traits(stream.device).apple.cores,
                                            choices(stream.device).attention_stored_kb << 10);
  params.rows = static_cast<int32_t>(chunks.rows);
  params.stored_keys = static_cast<int32_t>(chunks.stored_keys);
  copy_strides(params.d_k_strides, *arrays.d_k);
  copy_strides(params.d_v_strides, *arrays.d_v);
  const bool vectors = moves_vectors(arrays.in, {arrays.d_out, arrays.d_k, arrays.d_v});

  // Two chunks take turns, so that the next one does not wait for the sums of the last one.
  const auto scratch = [&](mx::Shape shape, mx::Dtype of) { return Scratch(shape, of, stream); };
  std::vector<Scratch> weights;
  for (int i = 0; i < (chunks.has_all(of_grid) ? 1 : 2); ++i) {
    weights.push_back(scratch({static_cast<int>(chunks.heads), static_cast<int>(chunks.rows),
                               2 * static_cast<int>(chunks.stored_keys)},
                              dtype));
  }
  const SumsTile& tile = sums_tile(dtype_name(arrays.in.q), sizes);
  const bool splits_rows = chunks.rows < of_grid.q_len;
  const mx::Shape sums = {splits_rows ? static_cast<int>(blocks_of_keys(tile.keys) * tile.keys) : 1,
                          splits_rows ? tile.head_dim : 1};
  Sums of_values{false, arrays.d_out, arrays.d_v, scratch(sums, mx::float32)};
  Sums of_keys{true, &arrays.in.q, arrays.d_k, scratch(sums, mx::float32)};

  size_t turn = 0;
  const int64_t all_heads = sizes.batch * sizes.q_heads;
  for (int64_t head = 0; head < all_heads; head += chunks.heads) {
    const int64_t heads = std::min(chunks.heads, all_heads - head);
    params.first_head = static_cast<int32_t>(head);
    for (int64_t row = 0; row == 0 || row < of_grid.q_len; row += chunks.rows) {
      params.first_row = static_cast<int32_t>(row);
      const Scratch& of_chunk = weights[turn++ % weights.size()];
      if (sizes.q_len > 0) {
        launch_queries(&of_chunk, heads);
      }
      launch_sums(tile, of_values, of_chunk, heads, vectors);
      launch_sums(tile, of_keys, of_chunk, heads, vectors);
    }
  }
}

}  // namespace

void attention_backward_gpu(const AttentionConfig& config,
                            const AttentionSizes& sizes,
                            const AttentionBackwardArrays& arrays,
                            const mx::Stream& stream) {
  if (sizes.batch * sizes.q_heads == 0) {
    return;
  }
  Backward backward{config, sizes, arrays, {}, Scratch(arrays.lse->shape(), mx::float32, stream),
                    stream};
  AttentionBackwardParams& params = backward.params;
  params.common = attention_params(config, sizes, arrays.in);
  params.sequences = static_cast<int32_t>(packed_sequences(config, sizes, arrays.in.sequences));
  copy_strides(params.out_strides, *arrays.out);
  copy_strides(params.d_out_strides, *arrays.d_out);
  if (arrays.d_lse) {
    copy_strides(params.d_lse_strides, *arrays.d_lse);
  }
  // Without queries there are no rows, but zero gradients must still be written.
  if (sizes.q_len > 0) {
    backward.launch_delta();
  }
  if (arrays.d_sinks) {
    backward.launch_sinks();
  }
  const bool wants_keys = arrays.d_k && sizes.kv_len > 0;
  if (wants_keys && !device_traits(stream.device).matrix_units) {
    backward.launch_chunks();
    return;
  }
  if ((arrays.d_q || arrays.d_mask) && sizes.q_len > 0) {
    backward.launch_queries();
  }
  if (wants_keys) {
    backward.launch_keys();
  }
}

}  // namespace mlx_anvil
