#include "rope/rope.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "rope/primitive.h"

namespace mlx_anvil {

namespace {

std::string describe(const char* name, const mx::array& x) {
  return std::string(name) + " has shape " + to_text(x.shape());
}

// Not by a stream: built with GCC 13, one that formats a number crashed beside MLX for CUDA.
std::string number_text(double x) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%g", x);
  return text.data();
}

void check_tensor(const char* op, const char* name, const mx::array& x, int64_t dims) {
  if (x.ndim() < 3) {
    throw_value_error(
        op, describe(name, x) + "; allowed: rank 3 or more, [batch, ..., length, head_dim].");
  }
  if (dims > x.shape(-1)) {
    throw_value_error(op, "dims is " + std::to_string(dims) + " and " + describe(name, x) +
                              "; allowed: dims up to the last axis.");
  }
}

void check_tensors(const char* op, const Arrays& tensors, const RopeOptions& options) {
  if (tensors.size() == 1) {
    return check_tensor(op, "x", tensors[0], options.dims);
  }
  const mx::array &q = tensors[0], &k = tensors[1];
  check_tensor(op, "q", q, options.dims);
  check_tensor(op, "k", k, options.dims);
  const bool alike = q.dtype() == k.dtype() && q.shape(0) == k.shape(0) &&
                     q.shape(-2) == k.shape(-2) && q.shape(-1) == k.shape(-1);
  if (!alike) {
    throw_value_error(op, describe("q", q) + " and dtype " + to_text(q.dtype()) + ", " +
                              describe("k", k) + " and dtype " + to_text(k.dtype()) +
                              "; allowed: one dtype, batch, length and head_dim.");
  }
}

void check_options(const char* op, const RopeOptions& options) {
  const int64_t dims = options.dims;
  if (dims <= 0 || dims % 2 != 0) {
    throw_value_error(op, "dims is " + std::to_string(dims) + "; allowed: positive even numbers.");
  }
  if (!options.freqs && !options.base) {
    throw_value_error(op, "base and freqs are None; allowed: one of them.");
  }
  if (options.freqs && options.base) {
    throw_value_error(op, "base is " + number_text(*options.base) +
                              " and freqs is an array; allowed: one of them, the other None.");
  }
  if (!options.freqs && !(*options.base > 0.0 && std::isfinite(*options.base))) {
    throw_value_error(
        op, "base is " + number_text(*options.base) + "; allowed: positive finite numbers.");
  }
  if (!std::isfinite(options.scale)) {
    throw_value_error(op, "scale is " + number_text(options.scale) + "; allowed: finite numbers.");
  }
}

mx::array checked_offset(const char* op, const RopeOptions& options, int batch, mx::Stream s) {
  if (const int64_t* number = std::get_if<int64_t>(&options.offset)) {
    const auto narrow = static_cast<int32_t>(*number);
    return *number == narrow ? mx::array(narrow) : mx::array(*number, mx::int64);
  }
  const auto& offset = std::get<mx::array>(options.offset);
  if (!mx::issubdtype(offset.dtype(), mx::integer)) {
    throw_value_error(op, "offset has dtype " + to_text(offset.dtype()) +
                              "; allowed: an int, or an array of an integer dtype.");
  }
  const bool fits = offset.ndim() <= 1 && (offset.size() == 1 || offset.shape(0) == batch);
  if (!fits) {
    throw_value_error(op, describe("offset", offset) + "; allowed: a scalar, or shape (" +
                              std::to_string(batch) + ",) with one position per batch row.");
  }
  const mx::Dtype dtype = offset.dtype();
  const bool is_wide = dtype == mx::uint32 || dtype == mx::int64 || dtype == mx::uint64;
  return mx::astype(offset, is_wide ? mx::int64 : mx::int32, s);
}

std::optional<mx::array> checked_freqs(const char* op, const RopeOptions& options, mx::Stream s) {
  if (!options.freqs) {
    return std::nullopt;
  }
  const mx::array& freqs = *options.freqs;
  require_kernel_dtypes(op, {{"freqs", freqs}});
  const int64_t pairs = options.dims / 2;
  if (freqs.ndim() != 1 || freqs.shape(0) != pairs) {
    throw_value_error(op, describe("freqs", freqs) + "; allowed with dims " +
                              std::to_string(options.dims) + ": (" + std::to_string(pairs) + ",).");
  }
  return mx::astype(freqs, mx::float32, s);
}

// Merges the axes between batch and length: [batch, heads, length, head_dim].
mx::array with_heads(const mx::array& x, mx::Stream s) {
  return x.ndim() == 3  ? mx::expand_dims(x, 1, s)
         : x.ndim() > 4 ? mx::flatten(x, 1, static_cast<int>(x.ndim()) - 3, s)
                        : x;
}

mx::array without_heads(mx::array out, const mx::array& x, mx::Stream s) {
  return x.ndim() == 3  ? mx::squeeze(out, 1, s)
         : x.ndim() > 4 ? mx::unflatten(out, 1, {x.shape().begin() + 1, x.shape().end() - 2}, s)
                        : out;
}

Arrays rotate(const char* op, const Arrays& tensors, const RopeOptions& options, mx::Stream s);

Arrays shapeless(const char* op, const Arrays& tensors, const RopeOptions& options, mx::Stream s) {
  const auto* const offset = std::get_if<mx::array>(&options.offset);
  Arrays inputs = tensors;
  if (offset) {
    inputs.push_back(*offset);
  }
  OptionalInputs::append(inputs, options.freqs);
  return shapeless_node(
      op, s, std::move(inputs),
      [op, options, s, count = tensors.size(), has_offset = offset != nullptr](const Arrays& in) {
        const Arrays tensors(in.begin(), in.begin() + static_cast<int64_t>(count));
        RopeOptions own = options;
        if (has_offset) {
          own.offset = in[count];
        }
        OptionalInputs(in, count + has_offset).replace(own.freqs);
        check_tensors(op, tensors, own);
        return rotate(op, tensors, own, s);
      });
}

Arrays rotate(const char* op, const Arrays& tensors, const RopeOptions& options, mx::Stream s) {
  if (traces_shapeless({&tensors.front(), &tensors.back(), std::get_if<mx::array>(&options.offset),
                        options.freqs ? &*options.freqs : nullptr})) {
    return shapeless(op, tensors, options, s);
  }
  RopePositions positions = {checked_offset(op, options, tensors[0].shape(0), s),
                             checked_freqs(op, options, s)};
  const RopeConfig config = {static_cast<int>(options.dims / 2),
                             options.traditional,
                             /*inverse=*/false,
                             {options.base.value_or(1.0), options.scale}};
  Arrays inputs;
  inputs.reserve(tensors.size() + 2);
  for (const mx::array& x : tensors) {
    inputs.push_back(with_heads(x, s));
  }
  Arrays outputs = apply_rope(config, std::move(inputs), std::move(positions), s);
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i] = without_heads(std::move(outputs[i]), tensors[i], s);
  }
  return outputs;
}

}  // namespace

mx::array rope(const mx::array& x, const RopeOptions& options, mx::StreamOrDevice stream) {
  constexpr const char* op = "rope";
  require_kernel_dtypes(op, {{"x", x}});
  check_options(op, options);
  check_tensors(op, {x}, options);
  return rotate(op, {x}, options, require_stream(op, stream))[0];
}

std::pair<mx::array, mx::array> rope_qk(const mx::array& q,
                                        const mx::array& k,
                                        const RopeOptions& options,
                                        mx::StreamOrDevice stream) {
  constexpr const char* op = "rope_qk";
  require_kernel_dtypes(op, {{"q", q}, {"k", k}});
  check_options(op, options);
  check_tensors(op, {q, k}, options);
  const Arrays both = rotate(op, {q, k}, options, require_stream(op, stream));
  return {both[0], both[1]};
}

}  // namespace mlx_anvil
