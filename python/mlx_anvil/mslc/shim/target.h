// The only place where the shim depends on the machine it compiles for. A target defines, in
// namespace mslc:
//   uint lane_id()
//   T shuffle(T value, uint source, site)            value of lane `source`
//   T reduce<Op, Width>(T value, site)               over the SIMD group (32) or the quad (4)
//   T scan<Op, Width, inclusive>(T value, site)
//   uint ballot(bool value, site)                    bit i: lane i is active and its value is true
//   bool any(bool value, site)                       whether there is such a lane
//   bool transposes_in_registers<T>, vec<T, 2> transposed(vec<T, 2>) where true: of a matrix
//   bool load_rows(vec<T, 2>&, threadgroup T* first, ulong stride, bool transpose)
//                                                    a matrix of whole rows; false where it cannot
//   void barrier(scope, mem_flags, site)
//   vec<D, 2> matrix_multiply_accumulate<D>(a, b, c, site)   8x8x8, two elements a lane
//   threadgroup_variable<T>(variable, alignment), step()
//   namespace target: transcendental functions of one float, atomics
// and in entry_<target>.h how an entry point finds a kernel's arguments.
#pragma once

#include "vec.h"

// What the compiler knows about the place of a call, in a static object.
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

// Last parameter of every function that synchronises: where the author called it.
#define MSLC_SITE const ::mslc::Site* site = __builtin_source_location()

constexpr uint simd_width = 32;

// Reduction operators. `identity` is what a scan starts from.
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
// Memories that kernels here do not have (textures, imageblocks, object data) need no fence.
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
#else
#include "cpu/target_cpu.h"
#endif

namespace mslc {

// What the rewriter adds to loops that may not end. Where it stands is the author's loop.
MSLC_INLINE __attribute__((nodebug)) constexpr void count_step() {
  if (!__builtin_is_constant_evaluated()) step();
}
// The amount by which a loop counter changes: a loop whose counter stands still never ends.
template <class T>
MSLC_INLINE __attribute__((nodebug)) constexpr T stride(T amount) {
  if (!__builtin_constant_p(amount) && !amount) count_step();
  return amount;
}

}  // namespace mslc
