#include "common/launch_arrays.h"

#include <algorithm>

#include "common/cache_size.h"

namespace mlx_anvil {

namespace {

bool is_of_vectors(const mx::array& x, int vector_bytes) {
  if (x.size() == 0) {
    return true;
  }
  const auto whole = [&](int64_t elements) {
    return elements * static_cast<int64_t>(x.itemsize()) % vector_bytes == 0;
  };
  // Buffers start at page boundaries, so only the offset into the buffer matters.
  if (x.strides(-1) != 1 || !whole(x.shape(-1)) || x.offset() % vector_bytes != 0) {
    return false;
  }
  for (int axis = 0; axis < static_cast<int>(x.ndim()) - 1; ++axis) {
    if (x.shape(axis) > 1 && !whole(x.strides(axis))) {
      return false;
    }
  }
  return true;
}

}  // namespace

const char* dtype_name(const mx::array& x) {
  return x.dtype() == mx::float32 ? "float32" : x.dtype() == mx::float16 ? "float16" : "bfloat16";
}

bool rows_are_vectors(std::initializer_list<const mx::array*> arrays, int vector_bytes) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [=](const mx::array* x) { return is_of_vectors(*x, vector_bytes); });
}

bool streams_rows(const mx::array& out, int64_t arrays) {
  constexpr size_t kLine = 64;
  return reinterpret_cast<uintptr_t>(out.data<void>()) % kLine == 0 &&
         static_cast<size_t>(out.shape(-1)) * out.itemsize() % kLine == 0 &&
         streams_outputs(arrays * static_cast<int64_t>(out.nbytes()));
}

}  // namespace mlx_anvil
