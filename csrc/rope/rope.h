// The op functions: rope for one array, rope_qk for queries and keys in one kernel, rope_and_cache
// which also writes keys and values into caches.
#pragma once

#include <array>
#include <optional>
#include <utility>
#include <variant>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

struct RopeOptions {
  int64_t dims = 0;
  bool traditional = false;
  std::optional<double> base;
  double scale = 1.0;
  // Positions count modulo 2^64: those from 2^63 up are stored as negative numbers.
  std::variant<int64_t, mx::array> offset = int64_t{0};
  std::optional<mx::array> freqs;  // replaces base
};

mx::array rope(const mx::array& x, const RopeOptions& options, mx::StreamOrDevice stream = {});

std::pair<mx::array, mx::array> rope_qk(const mx::array& q,
                                        const mx::array& k,
                                        const RopeOptions& options,
                                        mx::StreamOrDevice stream = {});

// Returns the rotated q and both caches, which share memory with k_cache and v_cache if nothing
// else refers to those. Without k and v, of which both or none are given, q has the heads of all.
std::array<mx::array, 3> rope_and_cache(const mx::array& q,
                                        const std::optional<mx::array>& k,
                                        const std::optional<mx::array>& v,
                                        const mx::array& k_cache,
                                        const mx::array& v_cache,
                                        const RopeOptions& options,
                                        mx::StreamOrDevice stream = {});

// The same for one token, in a model's attention. The elements of q are [batch, heads, head_dim],
// and those of k and v [batch, kv_heads, head_dim], in any shape. The queries are [batch, heads, 1,
// head_dim]. Also returns the rows of both caches up to the token. None if rope_and_cache() has to
// do it: on a GPU, inside a transformation, for shapes and dtypes that do not match.
std::optional<std::array<mx::array, 5>> rope_and_cache_of_token(const mx::array& q,
                                                                const mx::array& k,
                                                                const mx::array& v,
                                                                const mx::array& k_cache,
                                                                const mx::array& v_cache,
                                                                int heads,
                                                                const RopeOptions& options,
                                                                mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil
