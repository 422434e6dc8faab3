// The dtypes of the kernels, for headers that must not include MLX (see isa.h).
#pragma once

#include <cstdint>

namespace mlx_anvil {

enum class KernelDtype : int32_t { kFloat32, kFloat16, kBfloat16 };

[[gnu::always_inline]] constexpr int64_t element_size(KernelDtype dtype) {
  return dtype == KernelDtype::kFloat32 ? 4 : 2;
}

// One kernel, or one table of kernels, per dtype.
template <class T>
struct PerDtype {
  T float32;
  T float16;
  T bfloat16;

  [[gnu::always_inline]] constexpr const T& operator[](KernelDtype dtype) const {
    return dtype == KernelDtype::kFloat32   ? float32
           : dtype == KernelDtype::kFloat16 ? float16
                                            : bfloat16;
  }
};

}  // namespace mlx_anvil
