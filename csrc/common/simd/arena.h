// Scratch memory of a kernel. For kernel files only (see simd.h).
#pragma once

#include "common/simd/panels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// A bump allocator over a block of memory. With a null base it only counts.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }

  Panels take_panels(int64_t rows, int64_t columns) {
    return {take<float>(panel_count(columns) * rows * kPanel), rows};
  }
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
