#include "rope/arguments.h"

#include <array>
#include <cmath>
#include <cstdio>

#include "common/checks.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {

// Not by a stream: built with GCC 13, one that formats a number crashed beside MLX for CUDA.
std::string number_text(double x) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%g", x);
  return text.data();
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
    throw_value_error(op, shape_text("offset", offset) + "; allowed: a scalar, or shape (" +
                              std::to_string(batch) + ",) with one position per batch row.");
  }
  const mx::Dtype dtype = offset.dtype();
  const bool is_wide = dtype == mx::uint32 || dtype == mx::int64 || dtype == mx::uint64;
  return mx::astype(offset, is_wide ? mx::int64 : mx::int32, s);
}

}  // namespace

std::optional<mx::array> checked_freqs(const char* op, const RopeOptions& options, mx::Stream s) {
  if (!options.freqs) {
    return std::nullopt;
  }
  const mx::array& freqs = *options.freqs;
  require_kernel_dtypes(op, {{"freqs", freqs}});
  const int64_t pairs = options.dims / 2;
  if (freqs.ndim() != 1 || freqs.shape(0) != pairs) {
    throw_value_error(op, shape_text("freqs", freqs) + "; allowed with dims " +
                              std::to_string(options.dims) + ": (" + std::to_string(pairs) + ",).");
  }
  return mx::astype(freqs, mx::float32, s);
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

RopePositions checked_positions(const char* op,
                                const RopeOptions& options,
                                int batch,
                                mx::Stream s) {
  return {checked_offset(op, options, batch, s), checked_freqs(op, options, s)};
}

RopeConfig config_of(const RopeOptions& options) {
  return {static_cast<int>(options.dims / 2),
          options.traditional,
          /*inverse=*/false,
          {options.base.value_or(1.0), options.scale}};
}

}  // namespace mlx_anvil
