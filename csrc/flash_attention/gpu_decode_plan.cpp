#include "flash_attention/gpu_decode_plan.h"

#include <algorithm>
#include <span>

#include "common/errors.h"
#include "common/integers.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/gpu_params.h"
#include "metal/flash_attention/tiles.h"

namespace mlx_anvil {

namespace {

// Smaller parts would do little more than start.
constexpr int64_t kLeastKeysOfPart = 128;
constexpr int64_t kLeastKeysOfQuantizedPart = 256;  // of fewer bytes

// Smaller parts do not pay for more than one wave.
constexpr int64_t kLeastKeysOfRound = 1024;

// Up to as many keys, a second launch to combine parts costs more than reading keys once more.
constexpr int64_t kKeysOfOnePart = 1024;

// Where the number of cores is unknown: that of an M1 Pro.
constexpr int64_t kUsualCores = 16;

// On NVIDIA GPUs, for kernels without matrix products.
constexpr int64_t kEnoughThreadgroups = 256;
constexpr int64_t kLeastKeysOfNvidiaPart = 256;

// Threads per multiprocessor for which decode kernels with matrix products are made.
constexpr int kMatrixThreads = 256;

// Waves at most. A partly filled last wave takes as long as a full one.
constexpr int64_t kMostRounds = 4;

// In a batch of unlike lengths, parts need not be smaller, and as many threadgroups as run at once,
// this many times, are enough.
constexpr int64_t kKeysOfUnlikePart = 1024;
constexpr int64_t kRoundsOfUnlikeParts = 8;

// Returns the tiles of the narrowest head dim that holds the call's, sorted by rows.
std::span<const DecodeTile> narrowest(std::span<const DecodeTile> tiles,
                                      std::string_view dtype,
                                      const AttentionSizes& sizes) {
  const int64_t dim = std::max(sizes.head_dim, sizes.v_head_dim);
  const auto fits = [&](const DecodeTile& tile) {
    return dtype == tile.dtype && dim <= tile.head_dim;
  };
  const auto begin = std::find_if(tiles.begin(), tiles.end(), fits);
  const auto end = std::find_if(begin, tiles.end(), [&](const DecodeTile& tile) {
    return !fits(tile) || tile.head_dim != begin->head_dim;
  });
  return {begin, end};
}

// Returns `tiles` if heads fill them, otherwise none.
std::span<const DecodeTile> filled(std::span<const DecodeTile> tiles, const AttentionSizes& sizes) {
  const bool fill = !tiles.empty() && sizes.head_dim == tiles.front().head_dim &&
                    sizes.v_head_dim == tiles.front().head_dim;
  return fill ? tiles : std::span<const DecodeTile>();
}

std::span<const DecodeTile> decode_tiles(DecodeKeys kind,
                                         std::string_view dtype,
                                         const AttentionSizes& sizes,
                                         bool matrix_units) {
#define TILE(dtype, type, d, rows, steps, row_groups, simdgroups) \
  {"decode", #dtype, d, rows, 32 * (simdgroups), false},
#define MATRIX_TILE(dtype, type, d, keys, simdgroups) \
  {"decode_matrix", #dtype, d, kDecodeRows, 32 * (simdgroups), true},
  static constexpr DecodeTile kTiles[] = {MLX_ANVIL_ATTENTION_DECODE_TILES(TILE)};
  static constexpr DecodeTile kMatrixTiles[] = {
      MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(MATRIX_TILE, float16, half)
          MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(MATRIX_TILE, bfloat16, bfloat)};
#define QUANTIZED_MATRIX_TILE(pass, dtype, type, d, keys, simdgroups) \
  {#pass, #dtype, d, kDecodeRows, 32 * (simdgroups), true},
  static constexpr DecodeTile kQuantizedMatrixTiles[] = {
      MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_MATRIX_TILES(QUANTIZED_MATRIX_TILE)};
  static constexpr DecodeTile kWideMatrixTiles[] = {
      MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_WIDE_TILES(QUANTIZED_MATRIX_TILE)};
#define QUANTIZED_TILE(dtype, type, d, rows, steps, columns, row_groups, simdgroups) \
  {"quantized_decode", #dtype, d, rows, 32 * (simdgroups), false},
  static constexpr DecodeTile kQuantizedTiles[] = {
      MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_TILES(QUANTIZED_TILE)};
#undef QUANTIZED_TILE
#undef QUANTIZED_MATRIX_TILE
#undef MATRIX_TILE
#undef TILE
  const bool quantized = kind != DecodeKeys::kPlain;
  std::span<const DecodeTile> tiles;
  if (matrix_units && kind == DecodeKeys::kPlain) {
    tiles = narrowest(kMatrixTiles, dtype, sizes);
  } else if (matrix_units && kind != DecodeKeys::kQuantized) {
    if (kind == DecodeKeys::kWideMatrixCodes) {
      tiles = filled(narrowest(kWideMatrixTiles, dtype, sizes), sizes);
    }
    if (tiles.empty()) {
      tiles = filled(narrowest(kQuantizedMatrixTiles, dtype, sizes), sizes);
    }
  }
  if (tiles.empty()) {
    tiles = quantized ? narrowest(kQuantizedTiles, dtype, sizes) : narrowest(kTiles, dtype, sizes);
  }
  if (tiles.empty()) {
    throw_internal_error(kFlashAttention, "no decode kernel for this head_dim.");
  }
  return tiles;
}

// Returns the number of parts, from `fewest` to `most`, that fills waves of `resident` threadgroups
// best. Each part takes `threadgroups` threadgroups.
int64_t parts_in_waves(int64_t fewest, int64_t most, int64_t threadgroups, int64_t resident) {
  const auto rounds = [&](int64_t parts) { return ceil_div(parts * threadgroups, resident); };
  int64_t best = fewest;
  for (int64_t parts = fewest + 1; parts <= most; ++parts) {
    // A round takes 1 / parts of the time for all keys. More parts cost more to combine, so they
    // must save at least 5 %.
    if (20 * rounds(parts) * best < 19 * rounds(best) * parts) {
      best = parts;
    }
  }
  return best;
}

DecodePlan plan_of(const DecodeTile& tile, const AttentionSizes& sizes) {
  return {&tile, ceil_div(sizes.group() * sizes.q_len, int64_t{tile.rows}), 1};
}

int64_t threadgroups_of(const DecodePlan& plan, const AttentionSizes& sizes) {
  return sizes.batch * sizes.kv_heads * plan.row_blocks;
}

// One threadgroup keeps a core of an Apple GPU busy.
int64_t threadgroups_at_once(const DecodePlan& plan, const DeviceTraits& traits) {
  return traits.matrix_units
             ? std::max(kMatrixThreads / plan.tile->threads, 1) * int64_t{traits.multiprocessors}
             : apple_cores(traits);
}

// One threadgroup keeps a core of an Apple GPU busy. If there are fewer than cores, few keys are
// read again by threadgroups with fewer rows, and more keys are split.
DecodePlan plan_for_cores(std::span<const DecodeTile> tiles,
                          size_t largest,
                          const AttentionSizes& sizes,
                          int64_t keys,
                          int64_t least_keys,
                          int64_t cores) {
  if (keys <= kKeysOfOnePart) {
    for (size_t i = largest + 1; i-- > 0;) {
      const DecodePlan plan = plan_of(tiles[i], sizes);
      if (4 * threadgroups_of(plan, sizes) >= 3 * cores) {
        return plan;
      }
    }
  }
  DecodePlan plan = plan_of(tiles[largest], sizes);
  plan.parts = parts_of_keys(keys, least_keys, threadgroups_of(plan, sizes), cores);
  return plan;
}

}  // namespace

int64_t parts_of_keys(int64_t keys, int64_t least_keys, int64_t threadgroups, int64_t resident) {
  const int64_t at_once =
      std::clamp<int64_t>(resident / threadgroups, 1, std::max<int64_t>(keys / least_keys, 1));
  const int64_t most = std::min(keys / kLeastKeysOfRound, kMostRounds * resident / threadgroups);
  return parts_in_waves(at_once, most, threadgroups, resident);
}

int64_t apple_cores(const DeviceTraits& traits) {
  return traits.apple.cores > 0 ? traits.apple.cores : kUsualCores;
}

int64_t parts_of_unlike_lengths(const DecodePlan& plan,
                                const AttentionSizes& sizes,
                                int64_t keys,
                                const DeviceTraits& traits) {
  const int64_t rounds = kRoundsOfUnlikeParts * threadgroups_at_once(plan, traits);
  return std::min(ceil_div(keys, kKeysOfUnlikePart), rounds / threadgroups_of(plan, sizes));
}

DecodePlan row_invariant_plan(DecodeKeys kind,
                              std::string_view dtype,
                              const AttentionSizes& sizes) {
  const DecodeTile& largest = decode_tiles(kind, dtype, sizes, false).back();
  DecodePlan plan = plan_of(largest, sizes);
  // Two parts at least: one alone is not combined, which rounds otherwise.
  plan.parts = std::max<int64_t>(ceil_div(sizes.kv_len, int64_t{kKeysOfFixedPart}), 2);
  return plan;
}

DecodePlan decode_plan(DecodeKeys kind,
                       std::string_view dtype,
                       const AttentionSizes& sizes,
                       int64_t keys,
                       const DeviceTraits& traits) {
  const std::span<const DecodeTile> tiles = decode_tiles(kind, dtype, sizes, traits.matrix_units);
  // The smallest tile that takes all rows at once, or else the largest.
  size_t largest = 0;
  while (largest + 1 < tiles.size() && tiles[largest].rows < sizes.group() * sizes.q_len) {
    ++largest;
  }
  if (!traits.matrix_units) {
    const int64_t least_keys =
        kind != DecodeKeys::kPlain ? kLeastKeysOfQuantizedPart : kLeastKeysOfPart;
    return plan_for_cores(tiles, largest, sizes, keys, least_keys, apple_cores(traits));
  }
  DecodePlan plan = plan_of(tiles[largest], sizes);
  const int64_t threadgroups = threadgroups_of(plan, sizes);
  // With matrix products, a part has a key per thread at least: one or two blocks of keys for each
  // SIMD group.
  const int64_t possible = plan.tile->matrix_units ? std::max<int64_t>(keys / plan.tile->threads, 1)
                                                   : ceil_div(keys, kLeastKeysOfNvidiaPart);
  const int64_t resident = threadgroups_at_once(plan, traits);
  plan.parts = plan.tile->matrix_units
                   ? parts_in_waves(1, std::min(possible, kMostRounds * resident / threadgroups),
                                    threadgroups, resident)
                   : std::clamp<int64_t>(possible, 1, ceil_div(kEnoughThreadgroups, threadgroups));
  return plan;
}

}  // namespace mlx_anvil
