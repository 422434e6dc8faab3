// Integer divisions without a quotient: by zero, or the lowest number by -1.
#pragma once

namespace mslc {

constexpr const char* kNoQuotient =
    "integer division without a quotient: by zero, or the lowest number by -1";

// In Metal, such a quotient is unspecified and the kernel continues. Some processors trap instead;
// this makes all threads that run kernels continue, from now on.
void survive_division();

}  // namespace mslc
