// The threads behind `parallel_for` on Linux. They are shared by all callers, start when they are
// first needed and stay for the life of the process.
#pragma once

#include <cstdint>
#include <functional>

namespace mlx_anvil {

// Calls `body(i)` once for every i in [0, count): on the calling thread and on up to `helpers`
// others. Nothing waits for a thread that has not started: each thread takes the next index when it
// is ready, and the calling thread takes all of them if no other comes. `body` must not throw.
void run_on_pool(int64_t count, int helpers, const std::function<void(int64_t)>& body);

}  // namespace mlx_anvil
