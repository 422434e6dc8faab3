// kv_append as a graph node.
#pragma once

#include <optional>

#include "rope/primitive.h"

namespace mlx_anvil {

struct KvAppendConfig {
  // Caches of keys and of values: 1 for an array, 2 or 3 for the parts of a quantized one.
  int parts[2] = {1, 1};
  // 0: each cache takes rows of an array of its own, as they are. Otherwise the three parts take
  // the rows of one array, quantized.
  int bits[2] = {0, 0};
  int group = 64;
  bool distinct = false;           // no two tokens of a batch row have one row
  std::optional<RopeConfig> rope;  // of keys, which are one array

  int arrays(int side) const { return bits[side] == 0 ? parts[side] : 1; }
  bool quantizes() const { return bits[0] != 0; }
  bool operator==(const KvAppendConfig&) const = default;
};

// The arrays of a checked call. Numbers are int64 [batch or 1, length], or [batch or 1, 1]: tokens
// count from the only one.
struct KvAppendArrays {
  Arrays tokens;   // [batch, heads, length, *], of keys, then of values
  mx::array rows;  // int64 [batch or 1, length]; a batch row has pages / batch pages
  Arrays caches;   // [pages, heads, page_size, *], likewise
  std::optional<mx::array> positions;  // numbers, with rope
  std::optional<mx::array> freqs;      // float32
};

// The keys, rotated to `arrays.positions`, by rope's kernel.
mx::array rotated_keys(const RopeConfig& config, const KvAppendArrays& arrays, mx::Stream s);

Arrays apply_kv_append(const KvAppendConfig& config, KvAppendArrays arrays, mx::Stream s);

}  // namespace mlx_anvil
