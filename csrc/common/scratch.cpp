#include "common/scratch.h"

#include <type_traits>
#include <utility>

#include "common/allocate.h"
#include "common/launch.h"

namespace mlx_anvil {

static_assert(!std::is_constructible_v<Scratch, mx::array>, "no array of the graph gets in");
static_assert(!std::is_copy_constructible_v<Scratch>, "one owner");

Scratch::Scratch(mx::Shape shape, mx::Dtype dtype, const mx::Stream& stream)
    : array_(std::move(shape), dtype, nullptr, {}), stream_(stream) {
  array_.set_data(allocate(array_.nbytes(), stream));
}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
  leave_to_stream();
  array_ = std::move(other.array_);
  stream_ = other.stream_;
  return *this;
}

Scratch::~Scratch() {
  leave_to_stream();
}

void Scratch::leave_to_stream() noexcept {
  // A moved-from array holds nothing. If the array was copied, the copy keeps the memory.
  if (is_unshared()) {
    keep_until_done({std::move(array_)}, stream_);
  }
}

}  // namespace mlx_anvil
