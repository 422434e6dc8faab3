// Entry points. For every instantiated kernel the rewriter emits
//   Entry<Parameter...>::run(kernel, thread)
// with one of the types below for each parameter of the kernel.
#pragma once

#include "utility.h"

namespace mslc {

// Converts a position or size to the kernel's parameter: a scalar or vector of any integer type.
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
#elif defined(__SPIRV__)
#include "agx/entry_agx.h"
#else
#include "cpu/entry_cpu.h"
#endif
