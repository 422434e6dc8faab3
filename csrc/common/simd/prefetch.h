// Prefetches. For kernel files only (see common/simd/simd.h).
#pragma once

#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

template <class T>
inline void prefetch_block(const T* from) {
  constexpr int64_t kLine = 64, kBytes = kBlock * sizeof(T);
  constexpr int kToSecondLevel = 2;
  for (int64_t byte = 0; byte < kBytes; byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, kToSecondLevel);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
