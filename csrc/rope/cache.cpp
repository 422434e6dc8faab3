// The op function rope_and_cache: checks and the graph node.
#include <string>
#include <utility>

#include "common/block.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "common/simulate.h"
#include "rope/arguments.h"
#include "rope/cache_primitive.h"

namespace mlx_anvil {

namespace {

constexpr const char* kOp = "rope_and_cache";

void require_rank_4(const char* name, const mx::array& x, const char* axes) {
  if (x.ndim() != 4) {
    throw_value_error(kOp, shape_text(name, x) + "; allowed: rank 4, " + axes + ".");
  }
}

[[noreturn]] void throw_unlike(const char* name,
                               const mx::array& x,
                               const mx::array& q,
                               const std::string& allowed) {
  throw_value_error(kOp, shape_text("q", q) + ", " + shape_text(name, x) + "; allowed: " + allowed);
}

void check_heads(const RopeCacheArrays& arrays) {
  const mx::array& q = arrays.heads[0];
  require_rank_4("q", q, "[batch, heads, length, head_dim]");
  const mx::Shape& cache = arrays.k_cache.shape();
  if (arrays.heads.size() == 1) {
    if (q.shape(1) < 2 * cache[1]) {
      throw_unlike("k_cache", arrays.k_cache, q,
                   "without k and v, q has the heads of queries, keys and values.");
    }
    return;
  }
  for (size_t i = 1; i < 3; ++i) {
    const char* const name = i == 1 ? "k" : "v";
    const mx::array& x = arrays.heads[i];
    require_rank_4(name, x, "[batch, kv_heads, length, head_dim]");
    if (x.shape() != mx::Shape{q.shape(0), cache[1], q.shape(2), q.shape(3)}) {
      throw_unlike(name, x, q,
                   "k and v with the batch, length and head_dim of q and the heads of the caches.");
    }
  }
}

void check_arrays(const RopeCacheArrays& arrays, const RopeOptions& options) {
  const mx::array& q = arrays.heads[0];
  require_rank_4("k_cache", arrays.k_cache, "[batch, kv_heads, capacity, head_dim]");
  check_heads(arrays);
  const mx::Shape& cache = arrays.k_cache.shape();
  if (cache[0] != q.shape(0) || cache[3] != q.shape(3)) {
    throw_unlike("k_cache", arrays.k_cache, q, "caches with the batch and head_dim of q.");
  }
  if (arrays.v_cache.shape() != cache) {
    throw_value_error(kOp, shape_text("k_cache", arrays.k_cache) + ", " +
                               shape_text("v_cache", arrays.v_cache) + "; allowed: one shape.");
  }
  if (options.dims > q.shape(3)) {
    throw_value_error(kOp, "dims is " + std::to_string(options.dims) + " and " +
                               shape_text("q", q) + "; allowed: dims up to the last axis.");
  }
  if (const int64_t* offset = std::get_if<int64_t>(&options.offset)) {
    const int64_t last = int64_t{cache[2]} - q.shape(2);
    if (*offset < 0 || *offset > last) {
      throw_value_error(kOp, "offset is " + std::to_string(*offset) + ", " + shape_text("q", q) +
                                 ", " + shape_text("k_cache", arrays.k_cache) +
                                 "; allowed: positions that the caches have.");
    }
  }
}

void require_one_dtype(const RopeCacheArrays& arrays) {
  const auto require = [&](const char* name, const mx::array& x) {
    require_kernel_dtypes(kOp, {{name, x}});
    const mx::Dtype dtype = arrays.heads[0].dtype();
    if (x.dtype() != dtype) {
      throw_value_error(kOp, "q has dtype " + to_text(dtype) + ", " + name + " has dtype " +
                                 to_text(x.dtype()) + "; allowed: one dtype.");
    }
  };
  for (size_t i = 0; i < arrays.heads.size(); ++i) {
    require(i == 0 ? "q" : i == 1 ? "k" : "v", arrays.heads[i]);
  }
  require("k_cache", arrays.k_cache);
  require("v_cache", arrays.v_cache);
}

Arrays write(const RopeCacheArrays& arrays, const RopeOptions& options, mx::Stream s);

Arrays shapeless(const RopeCacheArrays& arrays, const RopeOptions& options, mx::Stream s) {
  const auto* const offset = std::get_if<mx::array>(&options.offset);
  Arrays inputs = arrays.heads;
  inputs.push_back(arrays.k_cache);
  inputs.push_back(arrays.v_cache);
  if (offset) {
    inputs.push_back(*offset);
  }
  OptionalInputs::append(inputs, options.freqs);
  return shapeless_node(
      kOp, s, std::move(inputs),
      [options, s, heads = arrays.heads.size(), has_offset = offset != nullptr](const Arrays& in) {
        const auto begin = in.begin();
        const RopeCacheArrays own = {Arrays(begin, begin + static_cast<int64_t>(heads)), in[heads],
                                     in[heads + 1]};
        RopeOptions own_options = options;
        if (has_offset) {
          own_options.offset = in[heads + 2];
        }
        OptionalInputs(in, heads + 2 + has_offset).replace(own_options.freqs);
        check_arrays(own, own_options);
        return write(own, own_options, s);
      });
}

Arrays write(const RopeCacheArrays& arrays, const RopeOptions& options, mx::Stream s) {
  if (traces_shapeless({&arrays.heads.front(), &arrays.heads.back(), &arrays.k_cache,
                        &arrays.v_cache, std::get_if<mx::array>(&options.offset),
                        options.freqs ? &*options.freqs : nullptr})) {
    return shapeless(arrays, options, s);
  }
  return apply_rope_and_cache(config_of(options), arrays,
                              checked_positions(kOp, options, arrays.k_cache.shape(0), s), s);
}

}  // namespace

std::array<mx::array, 3> rope_and_cache(const mx::array& q,
                                        const std::optional<mx::array>& k,
                                        const std::optional<mx::array>& v,
                                        const mx::array& k_cache,
                                        const mx::array& v_cache,
                                        const RopeOptions& options,
                                        mx::StreamOrDevice stream) {
  RopeCacheArrays arrays = {{q}, k_cache, v_cache};
  if (k) {
    arrays.heads.push_back(*k);
    arrays.heads.push_back(*v);
  }
  require_one_dtype(arrays);
  check_options(kOp, options);
  check_arrays(arrays, options);
  const Arrays outputs = write(arrays, options, require_stream(kOp, stream));
  return {outputs[0], outputs[1], outputs[2]};
}

std::optional<std::array<mx::array, 5>> rope_and_cache_of_token(const mx::array& q,
                                                                const mx::array& k,
                                                                const mx::array& v,
                                                                const mx::array& k_cache,
                                                                const mx::array& v_cache,
                                                                int heads,
                                                                const RopeOptions& options,
                                                                mx::StreamOrDevice stream) {
  const mx::Stream s = require_stream(kOp, stream);
  const int64_t* const offset = std::get_if<int64_t>(&options.offset);
  const mx::Shape& cache = k_cache.shape();
  if (for_gpu(s) || composing() || !offset || cache.size() != 4 || v_cache.shape() != cache ||
      *offset < 0 || *offset >= cache[2] || heads < 1 || options.dims > cache[3]) {
    return std::nullopt;
  }
  const size_t of_head = static_cast<size_t>(cache[0]) * cache[3];
  if (q.size() != of_head * heads || k.size() != of_head * cache[1] || v.size() != k.size() ||
      q.size() == 0 || k.size() == 0) {
    return std::nullopt;
  }
  for (const mx::array* x : {&q, &k, &v, &k_cache, &v_cache}) {
    if (x->is_tracer() || !is_kernel_dtype(x->dtype()) || x->dtype() != q.dtype()) {
      return std::nullopt;
    }
  }
  if (options.freqs && options.freqs->is_tracer()) {
    return std::nullopt;
  }
  check_options(kOp, options);
  const Arrays out = apply_rope_and_cache_of_token(
      config_of(options), {{q, k, v}, k_cache, v_cache}, heads, static_cast<int>(*offset) + 1,
      checked_positions(kOp, options, cache[0], s), s);
  return std::array<mx::array, 5>{out[0], out[1], out[2], out[3], out[4]};
}

}  // namespace mlx_anvil
