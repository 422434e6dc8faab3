// How a decode is cut into threadgroups on a GPU: by rows, which are the queries of all query heads
// of a kv head, and by parts of the keys.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/device_traits.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// A kernel of metal/flash_attention/tiles.h.
struct DecodeTile {
  const char* pass;
  const char* dtype;
  int head_dim;
  int rows;
  int threads;
  bool matrix_units;
};

struct DecodePlan {
  const DecodeTile* tile;
  int64_t row_blocks;  // of a kv head
  int64_t parts;       // of the keys
};

// What keys and values are: elements, codes (quantized.h), or codes that the kernels for matrix
// units take where the GPU has these, all of 4 bits or not.
enum class DecodeKeys { kPlain, kQuantized, kMatrixCodes, kWideMatrixCodes };

// The number of parts of `keys` with which `threadgroups` of each fill as many as the GPU runs at
// once.
int64_t parts_of_keys(int64_t keys, int64_t least_keys, int64_t threadgroups, int64_t resident);

// Cores of an Apple GPU, or those of a usual one if they are unknown.
int64_t apple_cores(const DeviceTraits& traits);

// The parts that keep a GPU busy if the sequences of a batch have other lengths, which the host
// does not know: large parts of the longest one would run on when all others have ended.
int64_t parts_of_unlike_lengths(const DecodePlan& plan,
                                const AttentionSizes& sizes,
                                int64_t keys,
                                const DeviceTraits& traits);

// Keys of a part of which every row is computed alike, wherever the keys end.
inline constexpr int kKeysOfFixedPart = 2048;

// The plan of a row_invariant call: depends on neither the queries nor the GPU.
DecodePlan row_invariant_plan(DecodeKeys kind, std::string_view dtype, const AttentionSizes& sizes);

// `keys` are those that some query sees. Depends on nothing but its arguments.
DecodePlan decode_plan(DecodeKeys kind,
                       std::string_view dtype,
                       const AttentionSizes& sizes,
                       int64_t keys,
                       const DeviceTraits& traits);

}  // namespace mlx_anvil
