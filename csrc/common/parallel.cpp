#include "common/parallel.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <optional>
#include <thread>

#if defined(__APPLE__)
#include <dispatch/dispatch.h>
#else
#include <sched.h>

#include "common/thread_pool.h"
#endif

namespace mlx_anvil {

namespace {

// Ranges get shorter, so that threads finish at nearly the same time with few ranges each. The
// numbers are a thread's successive shares, in units.
constexpr int kUnits[] = {7, 6, 4, 3, 2, 1, 1};
constexpr int kUnitsPerThread = 24;
static_assert(std::accumulate(std::begin(kUnits), std::end(kUnits), 0) == kUnitsPerThread);

// Smaller jobs get ranges of equal length instead.
constexpr int kEqualRangesPerThread = 4;

class Ranges {
 public:
  Ranges(int64_t count, int64_t grains, int threads)
      : count_(count), threads_(threads), shorten_(grains >= kUnitsPerThread * threads) {
    ranges_ = shorten_ ? static_cast<int64_t>(std::size(kUnits)) * threads
                       : std::min<int64_t>(kEqualRangesPerThread * threads, grains);
  }

  int64_t number() const { return ranges_; }

  int64_t begin(int64_t range) const {
    if (!shorten_) {
      return count_ * range / ranges_;
    }
    const int64_t round = range / threads_;
    const int64_t before = std::accumulate(kUnits, kUnits + round, int64_t{0}) * threads_;
    const int64_t units = range == ranges_ ? before : before + range % threads_ * kUnits[round];
    return count_ * units / (kUnitsPerThread * threads_);
  }

 private:
  int64_t count_;
  int threads_;
  bool shorten_;
  int64_t ranges_;
};

}  // namespace

namespace {

// 0: no limit.
int env_threads() {
  for (const char* name : {
           "OMP_NUM_THREADS",
#if defined(__APPLE__)
           "VECLIB_MAXIMUM_THREADS",
#endif
       }) {
    const char* text = std::getenv(name);
    if (text && std::atoi(text) > 0) {
      return std::atoi(text);
    }
  }
  return 0;
}

#if defined(__linux__)
// The CPU quota of the container in cores (cgroup v2). Empty if there is no limit.
std::optional<int> container_cores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  int64_t quota = 0, period = 0;  // the file says "max 100000" if there is no limit
  if (file >> quota >> period && quota > 0 && period > 0) {
    return static_cast<int>((quota + period - 1) / period);
  }
  return std::nullopt;
}
#endif

int usable_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    cores = CPU_COUNT(&set);
  }
  cores = std::min(cores, container_cores().value_or(cores));
#endif
  return std::max(1, cores);
}

#if defined(__APPLE__)
struct Job {
  const std::function<void(int64_t, int64_t)>* body;
  Ranges ranges;
};

void run_range(void* context, size_t index) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t i = static_cast<int64_t>(index);
  (*job.body)(job.ranges.begin(i), job.ranges.begin(i + 1));
}

#endif

}  // namespace

int max_threads() {
  static const int threads = [] {
    const int cores = usable_cores();
    const int asked = env_threads();
    return asked > 0 ? std::min(asked, cores) : cores;
  }();
  return threads;
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) {
    return;
  }
  const int threads = max_threads();
  const int64_t grains = count / std::max<int64_t>(1, grain);
  if (threads == 1 || grains <= 1) {
    body(0, count);
    return;
  }
  const Ranges ranges(count, grains, threads);
#if defined(__APPLE__)
  Job job{&body, ranges};
  dispatch_apply_f(static_cast<size_t>(ranges.number()), DISPATCH_APPLY_AUTO, &job, run_range);
#else
  const int team = static_cast<int>(std::min<int64_t>(threads, ranges.number()));
  run_on_pool(ranges.number(), team - 1,
              [&](int64_t i) { body(ranges.begin(i), ranges.begin(i + 1)); });
#endif
}

}  // namespace mlx_anvil
