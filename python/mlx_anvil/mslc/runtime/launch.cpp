// The runtime's entry point: validates a launch as Metal would, then runs it.
#include <stdarg.h>
#include <stdio.h>

#include "abi.h"
#include "check_races.h"
#include "division.h"
#include "faults.h"
#include "pool.h"
#include "profile.h"
#include "report.h"

namespace mslc {
namespace {

uint64_t volume(const mslc_size& size) {
  return uint64_t{size.x} * size.y * size.z;
}

uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  while (b) {
    uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

class LaunchCheck {
 public:
  LaunchCheck(const mslc_launch& request, Findings& findings)
      : request_(request), findings_(findings) {}

  __attribute__((format(printf, 3, 4))) void require(bool holds, const char* format, ...) {
    if (holds) return;
    ok_ = false;
    mslc_finding finding = {};
    finding.kind = MSLC_FINDING_BAD_LAUNCH;
    finding.count = 1;
    finding.kernel = request_.kernel->name;
    finding.thread_index = finding.other_thread = finding.buffer = -1;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(finding.message, sizeof finding.message, format, arguments);
    va_end(arguments);
    findings_.add(finding);
  }
  bool ok() const { return ok_; }

 private:
  const mslc_launch& request_;
  Findings& findings_;
  bool ok_ = true;
};

bool check(const mslc_launch& request, Findings& findings) {
  LaunchCheck launch(request, findings);
  const mslc_kernel& kernel = *request.kernel;
  uint64_t threads = volume(request.threadgroup_size);
  launch.require(request.buffer_count <= MSLC_MAX_BUFFERS &&
                     request.threadgroup_buffer_count <= MSLC_MAX_THREADGROUP_BUFFERS,
                 "more than %d buffers are bound", MSLC_MAX_BUFFERS);
  launch.require(threads > 0, "the threadgroup has no threads");
  launch.require(threads <= MSLC_MAX_THREADS_PER_THREADGROUP,
                 "%llu threads per threadgroup, the limit is %d",
                 static_cast<unsigned long long>(threads), MSLC_MAX_THREADS_PER_THREADGROUP);
  launch.require(!kernel.max_threads || threads <= kernel.max_threads,
                 "%llu threads per threadgroup, the kernel declares at most %u",
                 static_cast<unsigned long long>(threads), kernel.max_threads);
  uint64_t bytes = 0;
  for (unsigned i = 0; i < request.threadgroup_buffer_count; ++i)
    bytes += request.threadgroup_lengths[i];
  for (unsigned i = 0; i < request.threadgroup_buffer_count; ++i)
    launch.require(request.threadgroup_lengths[i] % MSLC_THREADGROUP_BUFFER_ALIGNMENT == 0,
                   "threadgroup memory %u has a length of %u bytes, which must be a multiple of %d",
                   i, request.threadgroup_lengths[i], MSLC_THREADGROUP_BUFFER_ALIGNMENT);
  const unsigned limit = threadgroup_memory_limit(request);
  launch.require(limit <= MSLC_MOST_THREADGROUP_MEMORY,
                 "a limit of %u bytes of threadgroup memory; the largest is %d", limit,
                 MSLC_MOST_THREADGROUP_MEMORY);
  launch.require(bytes <= limit, "%llu bytes of threadgroup memory, the limit is %u",
                 static_cast<unsigned long long>(bytes), limit);
  return launch.ok();
}

Counters run_instrumented(Launch& launch, AccessSink sink, unsigned threads) {
  DeviceArena arena(*launch.request);
  LaunchCheck check(*launch.request, *launch.findings);
  check.require(!arena.failure(), "%s", arena.failure());
  if (!check.ok()) {
    launch.stopped = 1;
    return {};
  }
  launch.arena = &arena;
  launch.sink = sink;
  launch.image = image_of(reinterpret_cast<uintptr_t>(launch.request->kernel->entry));
  const Counters counters = run_on_workers(launch, threads);
  arena.copy_back();
  return counters;
}

// Profiles use one host thread, so that the counts need no locks.
Counters run_profiled(Launch& launch) {
  Profile profile(*launch.request);
  launch.profile = &profile;
  const Counters counters = run_instrumented(launch, profile_access, 1);
  profile.write(*launch.request->profile);
  return counters;
}

Counters run(Launch& launch) {
  const mslc_launch& request = *launch.request;
  if (request.flags & MSLC_CHECKED) return run_instrumented(launch, check_access, request.threads);
  if (request.flags & MSLC_PROFILED) return run_profiled(launch);
  return run_on_workers(launch, request.threads);
}

}  // namespace
}  // namespace mslc

extern "C" unsigned int mslc_abi_version(void) {
  return MSLC_ABI_VERSION;
}

extern "C" int mslc_run(const mslc_launch* request, mslc_report* report) {
  using namespace mslc;
  Findings findings(report);
  report->failed = 0;
  if (!check(*request, findings)) return static_cast<int>(report->failed = 1);

  Launch launch;
  launch.request = request;
  launch.findings = &findings;
  const mslc_size size = request->threadgroup_size;
  if (request->flags & MSLC_DISPATCH_THREADS) {
    auto groups = [](unsigned threads, unsigned size) {
      return static_cast<unsigned>((uint64_t{threads} + size - 1) / size);
    };
    launch.threads = request->grid;
    launch.grid = {groups(request->grid.x, size.x), groups(request->grid.y, size.y),
                   groups(request->grid.z, size.z)};
  } else {
    launch.grid = request->grid;
    launch.threads = {request->grid.x * size.x, request->grid.y * size.y, request->grid.z * size.z};
  }
  launch.threadgroup_count = volume(launch.grid);
  launch.order_step = 1;
  launch.order_start = 0;
  if (request->seed && launch.threadgroup_count > 1 &&
      launch.threadgroup_count < uint64_t{1} << 32) {
    const uint64_t count = launch.threadgroup_count;
    launch.order_start = request->seed * 0x9E3779B97F4A7C15 % count;
    launch.order_step = 1 + request->seed * 0xD1B54A32D192ED03 % (count - 1);
    while (greatest_common_divisor(launch.order_step, count) != 1) ++launch.order_step;
  }
  survive_division();
  survive_faults();
  Counters counters = {};
  if (launch.threadgroup_count) counters = run(launch);
  report->threadgroups = counters.threadgroups;
  report->barriers = counters.barriers;
  report->collectives = counters.collectives;
  report->divergent_collectives = counters.divergent_collectives;
  report->threadgroup_memory = counters.threadgroup_memory;
  report->failed = static_cast<unsigned>(launch.stopped);
  return launch.stopped;
}
