// The op function kv_append: checks and the graph node.
#include "kv_append/kv_append.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "kv_append/primitive.h"
#include "rope/arguments.h"

namespace mlx_anvil {

namespace {

using Place = std::variant<std::monostate, int64_t, mx::array>;

Arrays parts_of(const KvCache& cache) {
  if (const auto* array = std::get_if<mx::array>(&cache)) {
    return {*array};
  }
  const auto& matrix = std::get<QuantizedMatrix>(cache);
  Arrays parts = {matrix.w, matrix.scales};
  OptionalInputs::append(parts, matrix.biases);
  return parts;
}

KvCache cache_of(const KvCache& like, const Arrays& arrays, size_t& at) {
  if (std::holds_alternative<mx::array>(like)) {
    return arrays[at++];
  }
  const bool has_biases = std::get<QuantizedMatrix>(like).biases.has_value();
  QuantizedMatrix matrix{arrays[at], arrays[at + 1],
                         has_biases ? std::optional(arrays[at + 2]) : std::nullopt};
  at += 2 + has_biases;
  return matrix;
}

// ---- checks -------------------------------------------------------------------------------------

void check_tokens(const mx::array& k, const mx::array& v) {
  require_kernel_dtypes(kKvAppend, {{"k", k}, {"v", v}});
  for (const auto& [name, x] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (x->ndim() != 4) {
      throw_value_error(kKvAppend, shape_text(name, *x) +
                                       "; allowed: rank 4, [batch, kv_heads, length, head_dim].");
    }
  }
  if (k.dtype() != v.dtype()) {
    throw_value_error(kKvAppend, "k has dtype " + to_text(k.dtype()) + ", v has dtype " +
                                     to_text(v.dtype()) + "; allowed: one dtype.");
  }
  if (!std::equal(k.shape().begin(), k.shape().end() - 1, v.shape().begin())) {
    throw_value_error(kKvAppend, shape_text("k", k) + ", " + shape_text("v", v) +
                                     "; allowed: equal batch, heads and length.");
  }
}

void check_cache(const std::string& name,
                 const KvCache& cache,
                 const mx::array& x,
                 const QuantizedFormat& format) {
  if (const auto* matrix = std::get_if<QuantizedMatrix>(&cache)) {
    check_matrix(kKvAppend, (name + " ").c_str(), format, *matrix, x.shape(3));
    if (columns_of(format, *matrix) != x.shape(3)) {
      throw_value_error(kKvAppend, name + " has rows of " +
                                       std::to_string(columns_of(format, *matrix)) + " codes and " +
                                       shape_text(name == "cache_k" ? "k" : "v", x) +
                                       "; allowed: rows of one length.");
    }
  }
  const Arrays parts = parts_of(cache);
  const mx::array& first = parts[0];
  const bool is_plain = parts.size() == 1;
  if (is_plain) {
    require_kernel_dtypes(kKvAppend, {{name.c_str(), first}});
  }
  if (first.ndim() != 4) {
    throw_value_error(kKvAppend,
                      shape_text(name, first) +
                          "; allowed: rank 4, [batch or pages, kv_heads, capacity, head_dim].");
  }
  const bool fits = first.shape(1) == x.shape(1) && (!is_plain || first.shape(3) == x.shape(3)) &&
                    (first.shape(0) == x.shape(0) || x.shape(0) == 1);
  if (!fits) {
    throw_value_error(kKvAppend, shape_text(name == "cache_k" ? "k" : "v", x) + ", " +
                                     shape_text(name, first) +
                                     "; allowed: equal heads, head_dim and batch, or a batch of 1 "
                                     "for a cache of pages.");
  }
  for (size_t i = is_plain ? 0 : 1; i < parts.size(); ++i) {
    if (parts[i].dtype() != x.dtype() && (is_plain || format.has_biases())) {
      throw_value_error(kKvAppend, name + (is_plain ? "" : " scales or biases") + " has dtype " +
                                       to_text(parts[i].dtype()) + ", k has dtype " +
                                       to_text(x.dtype()) + "; allowed: one dtype.");
    }
  }
}

void require_integers(const char* name, const mx::array& x) {
  if (!mx::issubdtype(x.dtype(), mx::integer)) {
    throw_value_error(kKvAppend, std::string(name) + " has dtype " + to_text(x.dtype()) +
                                     "; allowed: an integer dtype.");
  }
}

// What all rows or positions derive from.
struct Tokens {
  int batch, length;
  int64_t rows;  // that a batch row of the cache has
};

[[noreturn]] void throw_outside(const char* name, int64_t number, const Tokens& tokens) {
  throw_value_error(kKvAppend, std::string(name) + " has " + std::to_string(number) + " and k " +
                                   std::to_string(tokens.length) +
                                   " tokens; allowed: places among the " +
                                   std::to_string(tokens.rows) + " rows of the cache.");
}

// ---- rows and positions -------------------------------------------------------------------------

// The first number of each batch row, from which its tokens count: int64 [batch or 1, 1].
mx::array counted_from(const char* name, const Place& first, const Tokens& tokens, mx::Stream s) {
  // A scalar, which mx.compile merges with equal ones.
  const int64_t* number = std::get_if<int64_t>(&first);
  const mx::array array = number ? mx::array(*number, mx::int64) : std::get<mx::array>(first);
  require_integers(name, array);
  const bool fits = array.ndim() <= 1 && (array.size() == 1 || array.shape(0) == tokens.batch);
  if (!fits) {
    throw_value_error(kKvAppend, shape_text(name, array) + "; allowed: a scalar, or shape (" +
                                     std::to_string(tokens.batch) + ",) with one per batch row.");
  }
  return mx::reshape(mx::astype(array, mx::int64, s), {static_cast<int>(array.size()), 1}, s);
}

// One number per token: [batch, length], or [length] of a batch of 1.
mx::array one_per_token(const char* name, const mx::array& x, const Tokens& tokens, mx::Stream s) {
  require_integers(name, x);
  const mx::Shape shape = {tokens.batch, tokens.length};
  const bool fits =
      x.shape() == shape || (tokens.batch == 1 && x.shape() == mx::Shape{tokens.length});
  if (!fits) {
    throw_value_error(kKvAppend,
                      shape_text(name, x) + "; allowed: " + to_text(shape) + ", one per token.");
  }
  return mx::reshape(mx::astype(x, mx::int64, s), shape, s);
}

mx::array rows_of(const KvAppendOptions& options, const Tokens& tokens, mx::Stream s) {
  if (options.slots) {
    mx::array rows = one_per_token("slots", *options.slots, tokens, s);
    for_each_readable(*options.slots, s, [&](int64_t slot, int64_t) {
      if (slot >= tokens.rows) {
        throw_outside("slots", slot, tokens);
      }
    });
    return rows;
  }
  const auto require_inside = [&](int64_t offset) {
    if (offset < 0 || offset > tokens.rows - tokens.length) {
      throw_outside("offset", offset, tokens);
    }
  };
  if (const int64_t* number = std::get_if<int64_t>(&options.offset)) {
    require_inside(*number);
  }
  const mx::array rows = counted_from("offset", options.offset, tokens, s);
  if (const auto* array = std::get_if<mx::array>(&options.offset)) {
    for_each_readable(*array, s, [&](int64_t offset, int64_t) { require_inside(offset); });
  }
  return rows;
}

mx::array positions_of(const KvAppendOptions& options, const Tokens& tokens, mx::Stream s) {
  const Place& own = options.rope_offset;
  if (std::holds_alternative<std::monostate>(own)) {
    return counted_from("offset", options.offset, tokens, s);
  }
  const auto* array = std::get_if<mx::array>(&own);
  const bool is_counted = !array || array->size() == 1 || (array->ndim() == 1 && tokens.batch > 1);
  return is_counted ? counted_from("rope offset", own, tokens, s)
                    : one_per_token("rope offset", *array, tokens, s);
}

// ---- the node -----------------------------------------------------------------------------------

mx::array* array_in(Place& place) {
  return std::get_if<mx::array>(&place);
}

// The arrays of a call, in the order in which a shapeless node takes them.
std::vector<mx::array*> arrays_of(KvAppendOptions& options) {
  std::vector<mx::array*> arrays;
  for (mx::array* x : {array_in(options.offset), options.slots ? &*options.slots : nullptr,
                       array_in(options.rope_offset),
                       options.rope && options.rope->freqs ? &*options.rope->freqs : nullptr}) {
    if (x) {
      arrays.push_back(x);
    }
  }
  return arrays;
}

bool any_is_shapeless(const Arrays& arrays) {
  return std::any_of(arrays.begin(), arrays.end(),
                     [](const mx::array& x) { return traces_shapeless({&x}); });
}

void check_places(const KvAppendOptions& options, const mx::array& k) {
  const bool has_offset = !std::holds_alternative<std::monostate>(options.offset);
  if (has_offset == options.slots.has_value()) {
    throw_value_error(kKvAppend, std::string("offset and slots are ") +
                                     (has_offset ? "given" : "None") +
                                     "; allowed: one of them, the other None.");
  }
  if (!options.rope) {
    return;
  }
  check_options(kKvAppend, *options.rope);
  if (options.rope->dims > k.shape(3)) {
    throw_value_error(kKvAppend, "dims is " + std::to_string(options.rope->dims) + " and " +
                                     shape_text("k", k) + "; allowed: dims up to the last axis.");
  }
  if (options.slots && std::holds_alternative<std::monostate>(options.rope_offset)) {
    throw_value_error(kKvAppend,
                      "rope has no offset, and slots are no positions; allowed with slots: rope "
                      "with offset, an int or an array.");
  }
}

}  // namespace

std::pair<KvCache, KvCache> kv_append(const KvCache& cache_k,
                                      const KvCache& cache_v,
                                      const mx::array& k,
                                      const mx::array& v,
                                      const KvAppendOptions& options,
                                      mx::StreamOrDevice stream) {
  check_tokens(k, v);
  const bool is_quantized = std::holds_alternative<QuantizedMatrix>(cache_k);
  const QuantizedFormat k_format = checked_format(kKvAppend, options.k_format, "kv_");
  const QuantizedFormat v_format = checked_format(kKvAppend, options.v_format, "kv_");
  check_cache("cache_k", cache_k, k, k_format);
  check_cache("cache_v", cache_v, v, v_format);
  const Arrays k_parts = parts_of(cache_k), v_parts = parts_of(cache_v);
  const mx::array& first = k_parts[0];
  if (!std::equal(first.shape().begin(), first.shape().end() - 1, v_parts[0].shape().begin())) {
    throw_value_error(kKvAppend, shape_text("cache_k", first) + ", " +
                                     shape_text("cache_v", v_parts[0]) +
                                     "; allowed: equal batch or pages, heads and capacity.");
  }
  check_places(options, k);
  const mx::Stream s = require_stream(kKvAppend, stream);

  Arrays caches = k_parts;
  caches.insert(caches.end(), v_parts.begin(), v_parts.end());
  KvAppendOptions own = options;
  Arrays inputs = {k, v};
  inputs.insert(inputs.end(), caches.begin(), caches.end());
  for (const mx::array* x : arrays_of(own)) {
    inputs.push_back(*x);
  }
  const auto result = [&](const Arrays& arrays) -> std::pair<KvCache, KvCache> {
    size_t at = 0;
    KvCache keys = cache_of(cache_k, arrays, at);
    return {std::move(keys), cache_of(cache_v, arrays, at)};
  };
  if (any_is_shapeless(inputs)) {
    return result(shapeless_node(kKvAppend, s, std::move(inputs), [=](const Arrays& in) -> Arrays {
      size_t at = 2;
      const KvCache keys = cache_of(cache_k, in, at), values = cache_of(cache_v, in, at);
      KvAppendOptions again = options;
      for (mx::array* x : arrays_of(again)) {
        *x = in[at++];
      }
      const auto [a, b] = kv_append(keys, values, in[0], in[1], again, s);
      Arrays outputs = parts_of(a);
      const Arrays more = parts_of(b);
      outputs.insert(outputs.end(), more.begin(), more.end());
      return outputs;
    }));
  }
  inputs.clear();

  const int batch = k.shape(0), length = k.shape(2);
  const Tokens tokens = {batch, length,
                         batch == 0 ? 0 : int64_t{first.shape(0)} / batch * first.shape(2)};
  if (batch == 0) {
    return {cache_k, cache_v};
  }
  KvAppendArrays arrays{{k, v}, rows_of(options, tokens, s), {}, std::nullopt, std::nullopt};
  KvAppendConfig config;
  config.parts[0] = static_cast<int>(k_parts.size());
  config.parts[1] = static_cast<int>(v_parts.size());
  config.distinct = !options.slots;
  if (options.rope) {
    config.rope = config_of(*options.rope);
    arrays.positions = positions_of(options, tokens, s);
    arrays.freqs = checked_freqs(kKvAppend, *options.rope, s);
  }
  if (is_quantized && k_format.has_biases()) {
    config.bits[0] = k_format.bits;
    config.bits[1] = v_format.bits;
    config.group = k_format.group;
  } else if (is_quantized) {
    // MLX quantizes to these formats with other arithmetic on each device; its own op keeps its
    // bits.
    mx::array keys = k;
    if (config.rope) {
      keys = rotated_keys(*config.rope, arrays, s);
      config.rope.reset();
      arrays.positions.reset();
      arrays.freqs.reset();
    }
    const auto quantized = [&](const mx::array& x, const QuantizedFormat& format) {
      return mx::quantize(x, format.group, format.bits, mode_name(format.kind), std::nullopt, s);
    };
    arrays.tokens = quantized(keys, k_format);
    const Arrays values = quantized(v, v_format);
    arrays.tokens.insert(arrays.tokens.end(), values.begin(), values.end());
  }
  arrays.caches = std::move(caches);
  return result(apply_kv_append(config, std::move(arrays), s));
}

}  // namespace mlx_anvil
