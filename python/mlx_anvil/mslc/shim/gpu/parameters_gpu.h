// The parameters of a kernel, for the entry points of GPU targets. The target has declared
// mslc_dynamic_threadgroup_memory.
#pragma once

namespace mslc {

template <class Function, int Index>
struct ParameterAt;
template <class First, class... Rest, int Index>
struct ParameterAt<void (*)(First, Rest...), Index> : ParameterAt<void (*)(Rest...), Index - 1> {};
template <class First, class... Rest>
struct ParameterAt<void (*)(First, Rest...), 0> {
  using type = First;
};

template <class P>
MSLC_INLINE P threadgroup_buffer(uint offset) {
  threadgroup uchar* start = mslc_dynamic_threadgroup_memory + offset;
  if constexpr (__is_pointer(P))
    return (P)start;
  else
    return *(__remove_reference_t(P)*)start;
}

struct Size3 {
  uint x, y, z;
};

}  // namespace mslc
