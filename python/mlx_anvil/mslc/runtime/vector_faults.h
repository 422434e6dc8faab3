#pragma once

namespace mslc {

// x86 faults on a misaligned vector. The checks come before most of them; one element of a vector
// in memory (`p->x`) is none that the compiler checks. Such a fault becomes a finding.
void report_vector_faults();

}  // namespace mslc
