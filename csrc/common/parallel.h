#pragma once

#include <cstdint>
#include <functional>

namespace mlx_anvil {

// Threads that `parallel_for` may use: as many as the cores that this process may run on, within
// its container's share of them (Linux), or as OMP_NUM_THREADS says if that is fewer.
int max_threads();

// Calls `body(begin, end)` over disjoint ranges that cover [0, count), on several threads. No range
// is shorter than `grain` unless `count` is, so `grain` is the amount of work that is worth waking
// a thread for, and smaller work stays on the calling thread. There are a few ranges for each
// thread, taken as threads become free, so that a thread that is held up does not hold up the
// whole. The ranges depend on `count`, `grain` and `max_threads()` only. `body` must not throw.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace mlx_anvil
