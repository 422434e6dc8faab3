// The thread pool behind parallel_for() on Linux. All callers share it. Threads start on first use
// and live as long as the process.
#pragma once

#include <cstdint>
#include <functional>

namespace mlx_anvil {

// Calls `body(i)` once for every i in [0, count), on the calling thread and on up to `helpers`
// others. `body` must not throw. No call waits for a thread to start: each thread takes the next
// index when it is ready, and the calling thread takes all of them if no other joins.
void run_on_pool(int64_t count, int helpers, const std::function<void(int64_t)>& body);

}  // namespace mlx_anvil
