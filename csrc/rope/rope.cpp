#include "rope/rope.h"

#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "rope/arguments.h"
#include "rope/primitive.h"

namespace mlx_anvil {

namespace {

void check_tensor(const char* op, const char* name, const mx::array& x, int64_t dims) {
  if (x.ndim() < 3) {
    throw_value_error(
        op, shape_text(name, x) + "; allowed: rank 3 or more, [batch, ..., length, head_dim].");
  }
  if (dims > x.shape(-1)) {
    throw_value_error(op, "dims is " + std::to_string(dims) + " and " + shape_text(name, x) +
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
    throw_value_error(op, shape_text("q", q) + " and dtype " + to_text(q.dtype()) + ", " +
                              shape_text("k", k) + " and dtype " + to_text(k.dtype()) +
                              "; allowed: one dtype, batch, length and head_dim.");
  }
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
  RopePositions positions = checked_positions(op, options, tensors[0].shape(0), s);
  Arrays inputs;
  inputs.reserve(tensors.size() + 2);
  for (const mx::array& x : tensors) {
    inputs.push_back(with_heads(x, s));
  }
  Arrays outputs = apply_rope(config_of(options), std::move(inputs), std::move(positions), s);
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
