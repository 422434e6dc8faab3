// Workers and the host threads that drive them. Workers are kept between launches: their stacks
// and thread tables are worth more than a launch.
#pragma once

#include "worker.h"

namespace mslc {

// Runs `launch` on up to `threads` host threads, the calling one included. Adds up the counters.
Counters run_on_workers(Launch& launch, unsigned threads);

unsigned available_cores();

}  // namespace mslc
