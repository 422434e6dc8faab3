// Entry points. For every instantiated kernel the rewriter writes
//   Entry<Parameter...>::run(kernel, thread)
// with one of the types below for each parameter of the kernel.
#pragma once

#include "utility.h"

namespace mslc {

// A position or size, declared by the kernel as a scalar or a vector of any integer type.
template <class P, class Size>
MSLC_INLINE P as_parameter(Size value) {
  using Plain = metal::remove_cv_t<P>;
  if constexpr (!is_vector<Plain>)
    return static_cast<P>(value.x);
  else if constexpr (length_of<Plain> == 2)
    return make<Plain>(value.x, value.y);
  else
    return make<Plain>(value.x, value.y, value.z);
}

}  // namespace mslc

#if defined(__NVPTX__)
#include "ptx/entry_ptx.h"
#else
#include "cpu/entry_cpu.h"
#endif
