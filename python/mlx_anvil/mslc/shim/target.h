// The only machine-dependent part of the shim. A target defines, in namespace mslc:
//   uint lane_id()
//   T shuffle(T value, uint source, site)            value of lane `source`
//   T reduce<Op, Width>(T value, site)               over the SIMD group (32) or the quad (4)
//   T scan<Op, Width, inclusive>(T value, site)
//   uint ballot(bool value, site)                    bit i: lane i is active and its value is true
//   bool any(bool value, site)                       true if there is such a lane
//   broadcast, shuffle_xor, shuffle_down, shuffle_up if it defines MSLC_OWN_SHUFFLES; see below
//   bool transposes_in_registers<T>                  if true, defines this transpose of a matrix:
//   vec<T, 2> transposed(vec<T, 2>)
//   bool load_rows(vec<T, 2>&, threadgroup T* first, ulong stride, bool transpose)
//                                                    loads a matrix by rows; false if unsupported
//   void barrier(scope, mem_flags, site)
//   vec<D, 2> matrix_multiply_accumulate<D>(a, b, c, site)   8x8x8, two elements per lane
//   threadgroup_variable<T>(variable, alignment), step()
//   namespace target: transcendental functions of one float, atomics
// and in entry_<target>.h the lookup of a kernel's arguments.
#pragma once

#include "vec.h"

// The compiler's description of a call site, in a static object.
namespace std {
struct source_location {
  struct __impl {
    const char* _M_file_name;
    const char* _M_function_name;
    unsigned _M_line;
    unsigned _M_column;
  };
};
}  // namespace std

namespace mslc {

using Site = std::source_location::__impl;

// The last parameter of every synchronising function: the author's call site.
#define MSLC_SITE const ::mslc::Site* site = __builtin_source_location()

constexpr uint simd_width = 32;

// Reduction operators. `identity` is the initial value of a scan.
struct Add {
  template <class T>
  static T apply(T a, T b) {
    return a + b;
  }
  template <class T>
  static T identity() {
    return T(0);
  }
};
struct Multiply {
  template <class T>
  static T apply(T a, T b) {
    return a * b;
  }
  template <class T>
  static T identity() {
    return T(1);
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b);
};
struct Min {
  template <class T>
  static T apply(T a, T b);
};
struct And {
  template <class T>
  static T apply(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return a ^ b;
  }
};

}  // namespace mslc

namespace metal {
// Kernels here have no textures, imageblocks or object data, so those flags need no fence.
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}
}  // namespace metal

#if defined(__NVPTX__)
#include "ptx/target_ptx.h"
#elif defined(__SPIRV__)
#include "agx/target_agx.h"
#else
#include "cpu/target_cpu.h"
#endif

namespace mslc {

#ifndef MSLC_OWN_SHUFFLES
// The value of one lane for all lanes.
template <class T>
MSLC_INLINE T broadcast(T value, uint source, const Site* site) {
  return shuffle(value, source, site);
}
template <class T>
MSLC_INLINE T shuffle_xor(T value, uint mask, const Site* site) {
  return shuffle(value, lane_id() ^ mask, site);
}
// Lanes whose source is outside their group of Width lanes keep their value.
template <uint Width, class T>
MSLC_INLINE T shuffle_down(T value, uint delta, const Site* site) {
  const uint lane = lane_id(), position = lane & (Width - 1);
  return shuffle(value, position + delta < Width ? lane + delta : lane, site);
}
template <uint Width, class T>
MSLC_INLINE T shuffle_up(T value, uint delta, const Site* site) {
  const uint lane = lane_id(), position = lane & (Width - 1);
  return shuffle(value, position >= delta ? lane - delta : lane, site);
}
#endif

// The rewriter adds this to loops that may not end. Findings refer to the author's loop.
MSLC_INLINE __attribute__((nodebug)) constexpr void count_step() {
  if (!__builtin_is_constant_evaluated()) step();
}
// Returns the amount by which a loop counter changes. A loop whose counter stands still never ends,
// so it counts steps.
template <class T>
MSLC_INLINE __attribute__((nodebug)) constexpr T stride(T amount) {
  if (!__builtin_constant_p(amount) && !amount) count_step();
  return amount;
}

}  // namespace mslc
