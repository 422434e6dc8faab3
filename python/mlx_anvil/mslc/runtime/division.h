// Integer division without a quotient: by zero, or of the lowest number by -1.
#pragma once

namespace mslc {

constexpr const char* kNoQuotient =
    "integer division that has no quotient: by zero, or of the lowest number by -1";

// In Metal such a quotient is unspecified, and the kernel goes on. Processors that trap instead are
// told to go on, too: on all threads that run kernels, from now on.
void survive_division();

}  // namespace mslc
