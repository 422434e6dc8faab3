// Looks up a kernel's arguments on a GPU. Arguments bound by index are parameters of the entry.
//
// Pointers and `device` references are passed as addresses. A small `constant` reference is passed
// by value: the host passes bytes, as with Metal's setBytes, and reads go to the parameter bank.
// Dynamic threadgroup memory is one block; the host passes the offsets of its second and further
// buffers.
#pragma once

// Has no static storage: the launch sets its length.
extern "C" threadgroup uchar mslc_dynamic_threadgroup_memory[] __attribute__((aligned(16)));

#include "../gpu/parameters_gpu.h"

namespace mslc {

constexpr unsigned long largest_value_parameter = 1024;

// How parameter P is passed. `type` is the entry's parameter; `get` converts it to the kernel's
// argument.
template <class P>
struct Passed;
template <class T>
struct Passed<T*> {
  using type = device uchar*;
  static MSLC_INLINE T* get(type& address) { return (T*)(uchar*)address; }
};
template <class T>
struct Passed<T&> {
  using type = device uchar*;
  static MSLC_INLINE T& get(type& address) { return *(T*)(uchar*)address; }
};
template <class T>
  requires(sizeof(T) <= largest_value_parameter && !__is_array(T) && __is_trivially_copyable(T))
struct Passed<constant T&> {
  using type = T;
  static MSLC_INLINE constant T& get(type& value) { return *(constant T*)&value; }
};

// ---- positions and sizes

MSLC_INLINE Size3 block_size() {
  return {static_cast<uint>(__nvvm_read_ptx_sreg_ntid_x()),
          static_cast<uint>(__nvvm_read_ptx_sreg_ntid_y()),
          static_cast<uint>(__nvvm_read_ptx_sreg_ntid_z())};
}
MSLC_INLINE Size3 block_position() {
  return {static_cast<uint>(__nvvm_read_ptx_sreg_ctaid_x()),
          static_cast<uint>(__nvvm_read_ptx_sreg_ctaid_y()),
          static_cast<uint>(__nvvm_read_ptx_sreg_ctaid_z())};
}
MSLC_INLINE Size3 grid_blocks() {
  return {static_cast<uint>(__nvvm_read_ptx_sreg_nctaid_x()),
          static_cast<uint>(__nvvm_read_ptx_sreg_nctaid_y()),
          static_cast<uint>(__nvvm_read_ptx_sreg_nctaid_z())};
}
MSLC_INLINE Size3 hardware_position() {
  return {static_cast<uint>(__nvvm_read_ptx_sreg_tid_x()),
          static_cast<uint>(__nvvm_read_ptx_sreg_tid_y()),
          static_cast<uint>(__nvvm_read_ptx_sreg_tid_z())};
}

// Both sides number threads with x first and split them into SIMD groups of 32.
MSLC_INLINE uint thread_index() {
  const Size3 size = block_size(), position = hardware_position();
  const uint linear = position.x + size.x * (position.y + size.y * position.z);
  return (linear & ~31u) | lane_of_hardware(linear & 31);
}

MSLC_INLINE Size3 thread_position() {
  const Size3 size = block_size(), position = hardware_position();
  if constexpr (!lanes_are_permuted) return position;
  // Each SIMD group is within one row, so only x is renumbered.
  if (size.x % 32 == 0) [[likely]]
    return {(position.x & ~31u) | lane_of_hardware(position.x & 31), position.y, position.z};
  const uint index = thread_index(), row = index / size.x;
  return {index % size.x, row % size.y, row / size.y};
}

}  // namespace mslc

#include "../gpu/positions_gpu.h"
