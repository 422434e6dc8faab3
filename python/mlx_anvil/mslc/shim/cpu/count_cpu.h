// Counts events of profiled builds that the runtime cannot observe.
#pragma once

#include "../../runtime/abi.h"

namespace mslc {

template <int What>
MSLC_INLINE void count(uint amount = 1) {
#ifdef MSLC_PROFILED_BUILD
  mslc_count(What, amount);
#endif
}

}  // namespace mslc
