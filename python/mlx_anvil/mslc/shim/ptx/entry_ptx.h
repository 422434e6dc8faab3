// Looks up a kernel's arguments on a GPU. Arguments bound by index are parameters of the entry.
//
// Pointers and `device` references are passed as addresses. A small `constant` reference is passed
// by value: the host passes bytes, as with Metal's setBytes, and reads go to the parameter bank.
// Dynamic threadgroup memory is one block; the host passes the offsets of its second and further
// buffers.
#pragma once

// Has no static storage: the launch sets its length.
extern "C" threadgroup uchar mslc_dynamic_threadgroup_memory[] __attribute__((aligned(16)));

namespace mslc {

template <class Function, int Index>
struct ParameterAt;
template <class First, class... Rest, int Index>
struct ParameterAt<void (*)(First, Rest...), Index> : ParameterAt<void (*)(Rest...), Index - 1> {};
template <class First, class... Rest>
struct ParameterAt<void (*)(First, Rest...), 0> {
  using type = First;
};

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

template <class P>
MSLC_INLINE P threadgroup_buffer(uint offset) {
  threadgroup uchar* start = mslc_dynamic_threadgroup_memory + offset;
  if constexpr (__is_pointer(P))
    return (P)start;
  else
    return *(__remove_reference_t(P)*)start;
}

// ---- positions and sizes

struct Size3 {
  uint x, y, z;
};

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

// Names match the attributes.
namespace builtin {
MSLC_INLINE Size3 single(uint value) {
  return {value, 0, 0};
}
MSLC_INLINE Size3 product(Size3 a, Size3 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z};
}
MSLC_INLINE uint volume(Size3 size) {
  return size.x * size.y * size.z;
}
MSLC_INLINE Size3 thread_position_in_grid() {
  const Size3 base = product(block_position(), block_size()), position = thread_position();
  return {base.x + position.x, base.y + position.y, base.z + position.z};
}
MSLC_INLINE Size3 threads_per_grid() {
  return product(grid_blocks(), block_size());
}
MSLC_INLINE Size3 grid_size() {
  return threads_per_grid();
}
MSLC_INLINE Size3 grid_origin() {
  return {0, 0, 0};
}
MSLC_INLINE Size3 thread_position_in_threadgroup() {
  return thread_position();
}
MSLC_INLINE Size3 threads_per_threadgroup() {
  return block_size();
}
// All threadgroups of a launch have the same size.
MSLC_INLINE Size3 dispatch_threads_per_threadgroup() {
  return block_size();
}
MSLC_INLINE Size3 threadgroup_position_in_grid() {
  return block_position();
}
MSLC_INLINE Size3 threadgroups_per_grid() {
  return grid_blocks();
}
MSLC_INLINE Size3 thread_index_in_threadgroup() {
  return single(thread_index());
}
MSLC_INLINE Size3 thread_index_in_simdgroup() {
  return single(lane_id());
}
MSLC_INLINE Size3 simdgroup_index_in_threadgroup() {
  return single(thread_index() / 32);
}
MSLC_INLINE Size3 thread_index_in_quadgroup() {
  return single(lane_id() % 4);
}
MSLC_INLINE Size3 quadgroup_index_in_threadgroup() {
  return single(thread_index() / 4);
}
MSLC_INLINE Size3 threads_per_simdgroup() {
  return single(32);
}
MSLC_INLINE Size3 thread_execution_width() {
  return single(32);
}
MSLC_INLINE Size3 simdgroups_per_threadgroup() {
  return single((volume(block_size()) + 31) / 32);
}
MSLC_INLINE Size3 dispatch_simdgroups_per_threadgroup() {
  return simdgroups_per_threadgroup();
}
MSLC_INLINE Size3 quadgroups_per_threadgroup() {
  return single((volume(block_size()) + 3) / 4);
}
MSLC_INLINE Size3 dispatch_quadgroups_per_threadgroup() {
  return quadgroups_per_threadgroup();
}
}  // namespace builtin

}  // namespace mslc
