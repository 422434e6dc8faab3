// kv_append: writes keys and values into a cache, rotated and quantized on the way.
#pragma once

#include <optional>
#include <utility>
#include <variant>

#include "quantized_matmul/checks.h"
#include "rope/rope.h"

namespace mlx_anvil {

inline constexpr const char* kKvAppend = "kv_append";

// An array, or the parts of a quantized one.
using KvCache = std::variant<mx::array, QuantizedMatrix>;

struct KvAppendOptions {
  std::variant<std::monostate, int64_t, mx::array> offset;
  std::optional<mx::array> slots;
  std::optional<RopeOptions> rope;  // its offset is that of `rope_offset`
  std::variant<std::monostate, int64_t, mx::array> rope_offset;
  QuantizedOptions k_format, v_format;  // of quantized caches
};

// Returns both caches, which share memory with their inputs if nothing else refers to those.
std::pair<KvCache, KvCache> kv_append(const KvCache& cache_k,
                                      const KvCache& cache_v,
                                      const mx::array& k,
                                      const mx::array& v,
                                      const KvAppendOptions& options,
                                      mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil
