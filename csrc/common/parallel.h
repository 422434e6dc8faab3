// Data-parallel loops of the CPU kernels, on the thread pool (Linux) or Grand Central Dispatch
// (macOS).
#pragma once

#include <cstdint>
#include <functional>

namespace mlx_anvil {

// The number of threads that parallel_for() may use: the cores in this process's affinity mask,
// limited by the container's quota (Linux) and by OMP_NUM_THREADS.
int max_threads();

// Calls `body(begin, end)` on several threads, over disjoint ranges that cover [0, count). `body`
// must not throw.
//
// No range is shorter than `grain` unless `count` is. `grain` is the smallest amount of work that
// pays for waking a thread; smaller jobs stay on the calling thread. Each thread takes several
// ranges, one at a time, so a preempted thread delays only its current range. The ranges depend
// only on `count`, `grain` and max_threads().
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace mlx_anvil
