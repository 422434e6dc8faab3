#include "common/ids.h"

#include <limits>
#include <string>
#include <vector>

#include "common/errors.h"

namespace mlx_anvil {

namespace {

// Handles views with any strides. Elements repeated by a broadcast are read once if `once`.
template <class T, class Use>
void for_each_from(const T* ids, const mx::array& of, size_t axis, bool once, const Use& use) {
  if (axis == of.ndim()) {
    return use(*ids);
  }
  const int64_t stride = of.strides()[axis];
  const int count = once && stride == 0 ? 1 : of.shape()[axis];
  for (int i = 0; i < count; ++i) {
    for_each_from(ids + i * stride, of, axis + 1, once, use);
  }
}

template <class T, class Use>
void for_each_of(const mx::array& ids, bool once, const Use& use) {
  if (!ids.flags().row_contiguous) {
    return for_each_from(ids.data<T>(), ids, 0, once, use);
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    use(ids.data<T>()[i]);
  }
}

// Calls `use` with each id, in its own type.
template <class Use>
void for_each_id(const mx::array& ids, bool once, const Use& use) {
  switch (ids.dtype()) {
    case mx::int8:
      return for_each_of<int8_t>(ids, once, use);
    case mx::int16:
      return for_each_of<int16_t>(ids, once, use);
    case mx::int32:
      return for_each_of<int32_t>(ids, once, use);
    case mx::int64:
      return for_each_of<int64_t>(ids, once, use);
    case mx::uint8:
      return for_each_of<uint8_t>(ids, once, use);
    case mx::uint16:
      return for_each_of<uint16_t>(ids, once, use);
    case mx::uint32:
      return for_each_of<uint32_t>(ids, once, use);
    default:
      return for_each_of<uint64_t>(ids, once, use);
  }
}

template <class T>
bool is_inside(T id, int64_t least, int64_t count) {
  return id < 0 ? static_cast<int64_t>(id) >= least
                : static_cast<uint64_t>(id) < static_cast<uint64_t>(count);
}

}  // namespace

bool ids_are_readable(const mx::array& ids, const mx::Stream& stream) {
  return stream.device == mx::Device::cpu && ids.is_available() && !ids.is_tracer() &&
         ids.size() > 0;
}

void for_each_readable(const mx::array& integers,
                       const mx::Stream& stream,
                       const std::function<void(int64_t, int64_t)>& use) {
  if (!ids_are_readable(integers, stream)) {
    return;
  }
  int64_t before = 0;
  for_each_id(integers, false, [&](auto number) {
    const auto next = static_cast<int64_t>(number);
    use(next, before);
    before = next;
  });
}

void require_ids(const char* op,
                 const mx::array& ids,
                 int64_t count,
                 const IdsText& text,
                 const mx::Stream& stream) {
  if (!ids_are_readable(ids, stream)) {
    return;
  }
  for_each_id(ids, true, [&](auto id) {
    if (!is_inside(id, -count, count)) {
      throw_value_error(op, std::string(text.name) + " has " + std::to_string(id) +
                                text.before_count + std::to_string(count) + text.after_count +
                                "; allowed: " + std::to_string(-count) + " to " +
                                std::to_string(count - 1) + ".");
    }
  });
}

mx::array ids_in_32_bits(const mx::array& ids, mx::Stream s) {
  constexpr int64_t kLeast = std::numeric_limits<int32_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const mx::Dtype dtype = ids.dtype();
  if (dtype == mx::int32 || dtype == mx::uint32) {
    return ids;
  }
  if (dtype == mx::int64) {
    return mx::astype(mx::clip(ids, mx::array(kLeast, mx::int64), mx::array(kMost, mx::int64), s),
                      mx::int32, s);
  }
  if (dtype == mx::uint64) {
    return mx::astype(mx::minimum(ids, mx::array(kMost, mx::uint64), s), mx::int32, s);
  }
  return mx::astype(ids, mx::int32, s);
}

mx::array ids_in_int32(const mx::array& ids, mx::Stream s) {
  const mx::array numbers = ids_in_32_bits(ids, s);
  if (numbers.dtype() == mx::int32) {
    return numbers;
  }
  const mx::array most(static_cast<uint32_t>(std::numeric_limits<int32_t>::max()), mx::uint32);
  return mx::astype(mx::minimum(numbers, most, s), mx::int32, s);
}

mx::array ids_up_to(const mx::array& ids, int most, mx::Stream s) {
  const mx::array numbers = ids_in_32_bits(ids, s);
  const auto like = [&](int value) { return mx::array(value, numbers.dtype()); };
  return mx::astype(mx::clip(numbers, like(0), like(most), s), mx::int32, s);
}

void require_permutation(const char* op,
                         const char* name,
                         const mx::array& places,
                         const mx::Stream& stream) {
  if (!ids_are_readable(places, stream)) {
    return;
  }
  const auto count = static_cast<int64_t>(places.size());
  std::vector<bool> seen(places.size());
  for_each_id(places, false, [&](auto place) {
    const bool is_new = is_inside(place, 0, count) && !seen[static_cast<size_t>(place)];
    if (!is_new) {
      throw_value_error(op, std::string(name) + " has " + std::to_string(place) +
                                (is_inside(place, 0, count) ? " twice" : "") +
                                "; allowed: each number from 0 to " + std::to_string(count - 1) +
                                " once.");
    }
    seen[static_cast<size_t>(place)] = true;
  });
}

}  // namespace mlx_anvil
