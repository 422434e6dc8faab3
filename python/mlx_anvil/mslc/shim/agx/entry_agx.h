// Looks up a kernel's arguments: addresses in uniform registers, four 16-bit halves each, where
// Metal's driver puts them too. Behind them are the sizes of the launch.
#pragma once

MSLC_NIR_PURE uint nir_load_preamble(uint base);
typedef uint mslc_uint3 __attribute__((ext_vector_type(3)));
MSLC_NIR_PURE mslc_uint3 nir_load_local_invocation_id();
MSLC_NIR_PURE mslc_uint3 nir_load_workgroup_id();

// The launch sets its length; mslc subtracts this one from the statistics.
inline threadgroup uchar mslc_dynamic_threadgroup_memory[16384] __attribute__((aligned(16)));

#include "../gpu/parameters_gpu.h"

namespace mslc {

constexpr uint threadgroup_size_uniform = 112, grid_size_uniform = 120;

MSLC_INLINE ulong uniform_address(uint position) {
  return nir_load_preamble(4 * position) | static_cast<ulong>(nir_load_preamble(4 * position + 2))
                                               << 32;
}

template <class P>
struct Passed;
template <class T>
struct Passed<T*> {
  static MSLC_INLINE T* get(uint position) { return (T*)uniform_address(position); }
};
template <class T>
struct Passed<T&> {
  static MSLC_INLINE T& get(uint position) { return *(T*)uniform_address(position); }
};

// ---- positions and sizes

MSLC_INLINE Size3 uniform_size(uint first) {
  return {nir_load_preamble(first), nir_load_preamble(first + 2), nir_load_preamble(first + 4)};
}
MSLC_INLINE Size3 block_size() {
  return uniform_size(threadgroup_size_uniform);
}
MSLC_INLINE Size3 grid_blocks() {
  return uniform_size(grid_size_uniform);
}
MSLC_INLINE Size3 block_position() {
  const mslc_uint3 position = nir_load_workgroup_id();
  return {position.x, position.y, position.z};
}
MSLC_INLINE Size3 thread_position() {
  const mslc_uint3 position = nir_load_local_invocation_id();
  return {position.x, position.y, position.z};
}
MSLC_INLINE uint thread_index() {
  return nir_load_local_invocation_index();
}

}  // namespace mslc

#include "../gpu/positions_gpu.h"
