#include "common/parallel.h"

#include <algorithm>
#include <cstdlib>
#include <thread>

#if defined(__APPLE__)
#include <dispatch/dispatch.h>
#else
#include <omp.h>
#endif

namespace mlx_anvil {

namespace {
constexpr int kRangesPerThread = 4;
}

#if defined(__APPLE__)

namespace {

int env_threads() {
  for (const char* name : {"OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"}) {
    const char* text = std::getenv(name);
    if (text && std::atoi(text) > 0) {
      return std::atoi(text);
    }
  }
  return 0;
}

struct Job {
  const std::function<void(int64_t, int64_t)>* body;
  int64_t count;
  int64_t ranges;
};

void run_range(void* context, size_t index) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t i = static_cast<int64_t>(index);
  (*job.body)(job.count* i / job.ranges, job.count * (i + 1) / job.ranges);
}

}  // namespace

int max_threads() {
  static const int threads = [] {
    const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const int asked = env_threads();
    return asked > 0 ? std::min(asked, cores) : cores;
  }();
  return threads;
}

#else

int max_threads() {
  return std::min(omp_get_max_threads(), omp_get_num_procs());
}

#endif

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) {
    return;
  }
  const int threads = max_threads();
  const int64_t grains = count / std::max<int64_t>(1, grain);
  const int64_t ranges = threads == 1 ? 1 : std::min<int64_t>(threads * kRangesPerThread, grains);
  if (ranges <= 1) {
    body(0, count);
    return;
  }
#if defined(__APPLE__)
  Job job{&body, count, ranges};
  dispatch_apply_f(static_cast<size_t>(ranges), DISPATCH_APPLY_AUTO, &job, run_range);
#else
  const int team = static_cast<int>(std::min<int64_t>(threads, ranges));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
  for (int64_t i = 0; i < ranges; ++i) {
    body(count * i / ranges, count * (i + 1) / ranges);
  }
#endif
}

}  // namespace mlx_anvil
