// A kernel's wish for resident threadgroups, which bounds its registers. Metal has no equivalent.
#pragma once

namespace mslc {

// At least `count` threadgroups of the most threads that the kernel allows stay resident on a
// multiprocessor, if the function constant with this index is true. mslc turns this line into the
// directive .minnctapersm (ptx.py).
template <int count, int index>
MSLC_INLINE void keep_resident() {
  __asm__ volatile("// mslc.resident %0 %1" : : "n"(count), "n"(index));
}

}  // namespace mslc
