// Workers and the host threads that drive them. Workers stay alive between launches, because their
// stacks and thread tables cost more to set up than a launch.
#pragma once

#include "worker.h"

namespace mslc {

// Runs `launch` on up to `threads` host threads, including the calling one, and sums the counters.
Counters run_on_workers(Launch& launch, unsigned threads);

unsigned available_cores();

}  // namespace mslc
