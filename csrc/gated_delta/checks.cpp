#include "gated_delta/checks.h"

#include <cmath>
#include <string>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"

namespace mlx_anvil {

void check_gated_delta(const mx::array& q,
                       const mx::array& k,
                       const mx::array& v,
                       const mx::array& g,
                       const mx::array& beta,
                       const GatedDeltaOptions& options) {
  require_kernel_dtypes(kGatedDelta, {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}});
  for (const auto& [name, x] : {NamedArray{"q", q}, NamedArray{"v", v}}) {
    if (x.ndim() != 4 || x.shape(2) == 0 || x.shape(3) == 0) {
      throw_value_error(kGatedDelta, shape_text(name, x) +
                                         "; allowed: rank 4, [batch, length, heads, dim], with one "
                                         "head or more and a last axis of at least 1.");
    }
  }
  require_shape(kGatedDelta, {"k", k}, q.shape(), "the shape of q");
  if (v.shape(0) != q.shape(0) || v.shape(1) != q.shape(1) || v.shape(2) % q.shape(2) != 0) {
    throw_value_error(kGatedDelta, shape_text("v", v) + " and " + shape_text("q", q) +
                                       "; allowed: one batch and length, and heads of v that are a "
                                       "multiple of those of q.");
  }
  const mx::Shape heads = {v.shape(0), v.shape(1), v.shape(2)};
  const mx::Shape channels = {heads[0], heads[1], heads[2], q.shape(3)};
  if (g.shape() != heads && g.shape() != channels) {
    throw_value_error(kGatedDelta, shape_text("g", g) + "; allowed: " + to_text(heads) +
                                       ", a factor per head, or " + to_text(channels) +
                                       ", a factor per channel.");
  }
  require_shape(kGatedDelta, {"beta", beta}, heads, "one number per head of v");
  if (options.state) {
    require_kernel_dtypes(kGatedDelta, {{"state", *options.state}});
    require_shape(kGatedDelta, {"state", *options.state},
                  {v.shape(0), v.shape(2), v.shape(3), q.shape(3)},
                  "[batch, heads of v, dim of v, dim of q]");
  }
  if (options.normalize_eps &&
      !(*options.normalize_eps >= 0 && std::isfinite(*options.normalize_eps))) {
    throw_value_error(kGatedDelta, "normalize_eps is " + std::to_string(*options.normalize_eps) +
                                       "; allowed: None, or a finite number, 0 or more.");
  }
}

mx::array checked_lengths(const char* op,
                          const mx::array& lengths,
                          const NamedArray& sequence,
                          mx::Stream s) {
  const int steps = sequence.value.shape(1);
  require_integers(op, {"lengths", lengths});
  require_shape(op, {"lengths", lengths}, {sequence.value.shape(0)}, "one length per batch");
  for_each_readable(lengths, s, [&](int64_t length, int64_t) {
    require_inside(op, "lengths", length, 0, steps);
  });
  return ids_up_to(lengths, steps, s);
}

std::optional<mx::array> checked_positions(const char* op,
                                           const ReturnStates& return_states,
                                           const NamedArray& sequence,
                                           mx::Stream s) {
  if (std::holds_alternative<std::monostate>(return_states)) {
    return std::nullopt;
  }
  const int batch = sequence.value.shape(0), steps = sequence.value.shape(1);
  const auto check = [&](int64_t position) {
    if (steps == 0) {
      throw_value_error(op, "return_states has " + std::to_string(position) + " and " +
                                sequence.name + " has no steps; allowed: no positions.");
    }
    require_inside(op, "return_states", position, 0, steps - 1);
  };
  if (const auto* list = std::get_if<std::vector<int64_t>>(&return_states)) {
    std::vector<int32_t> numbers;
    for (int64_t position : *list) {
      check(position);
      numbers.push_back(static_cast<int32_t>(position));
    }
    const int count = static_cast<int>(numbers.size());
    return count == 1 ? mx::reshape(mx::array(numbers[0]), {1, 1}, s)  // mx.compile merges scalars
                      : mx::array(numbers.begin(), {1, count}, mx::int32);
  }
  const mx::array& given = std::get<mx::array>(return_states);
  require_integers(op, {"return_states", given});
  const bool is_of_all = given.ndim() == 1;
  if (!is_of_all && (given.ndim() != 2 || given.shape(0) != batch)) {
    throw_value_error(op, shape_text("return_states", given) +
                              "; allowed: [positions], or [batch, positions] with a batch of " +
                              std::to_string(batch) + ".");
  }
  if (steps == 0 && given.size() > 0) {
    check(0);
  }
  for_each_readable(given, s, [&](int64_t position, int64_t) { check(position); });
  const mx::array numbers = ids_up_to(given, steps, s);
  return is_of_all ? mx::expand_dims(numbers, 0, s) : numbers;
}

}  // namespace mlx_anvil
