// A number that is float32, or of a kernel's dtype.
#pragma once

#include <metal_stdlib>

template <typename T>
METAL_FUNC float load_gate(const device T* from, bool is_float32, long at) {
  return is_float32 ? reinterpret_cast<const device float*>(from)[at] : float(from[at]);
}
