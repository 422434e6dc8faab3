// A worker runs threadgroups, one after the other, on one host thread. It owns everything that the
// running threadgroup needs, so workers share nothing but the launch.
#pragma once

#include <stdint.h>

#include "abi.h"
#include "access.h"
#include "device_arena.h"
#include "faults.h"
#include "fiber.h"
#include "image.h"
#include "memory.h"
#include "report.h"

namespace mslc {

class Profile;

// What the workers of one launch share.
struct Launch {
  const mslc_launch* request;
  Findings* findings;
  mslc_size grid;     // threadgroups
  mslc_size threads;  // threads in the whole grid
  uint64_t threadgroup_count;
  uint64_t order_step, order_start;  // visits threadgroup (i * step + start) % count in turn
  uint64_t next = 0;                 // claimed atomically
  int stopped = 0;                   // set atomically by the first failure
  // Of instrumented launches:
  AccessSink sink = nullptr;
  Profile* profile = nullptr;  // of profiled launches, which use one worker
  DeviceArena* arena = nullptr;
  Image image;  // the compiled library
};

// Numbers the synchronisations of a worker. What carries a smaller stamp than a field happened
// before the last event of that kind.
struct SyncClock {
  uint32_t generation = 0;  // stamps of different generations do not compare
  uint32_t now = 0;
  uint32_t start;                       // of the threadgroup
  uint32_t threadgroup_memory;          // the last barrier that orders threadgroup memory
  uint32_t device_memory;               // the last barrier that orders device memory
  uint32_t simdgroup[MSLC_SIMD_WIDTH];  // the last operation in which all live lanes met
};

struct CheckState;  // of the race checks

// One Metal thread. It has a stack only between its start and its return.
struct Thread {
  mslc_thread descriptor;
  Context context;
  Stack* stack = nullptr;
  void* value = nullptr;  // operand of the collective it waits in
  mslc_combine combine = nullptr;
  const mslc_site* site = nullptr;
  const void* pc = nullptr;  // where it waits, in the compiled kernel
  unsigned fences = 0;       // of the barrier it waits in
};

// The lanes of one SIMD group by state, as bit sets. A lane is in exactly one of them.
struct SimdGroup {
  Thread* lanes;
  uint32_t present;     // exist: fewer than all in the last group of a threadgroup
  uint32_t ready;       // can run
  uint32_t collective;  // waits for other lanes in a SIMD-group operation
  uint32_t barrier;     // waits in a threadgroup barrier
  uint32_t done;
};

struct Counters {
  uint64_t threadgroups, barriers, collectives, divergent_collectives, threadgroup_memory;
};

class Worker {
 public:
  // Claims and runs threadgroups of `launch` until none is left or the launch is stopped.
  void run(Launch& launch);

  // ---- called on a fiber, by the kernel through the C interface
  unsigned lane() const { return current_->descriptor.index % MSLC_SIMD_WIDTH; }
  void collective(void* value, mslc_combine combine, const mslc_site* site, const void* pc);
  void threadgroup_barrier(unsigned fences, const mslc_site* site, const void* pc);
  void* threadgroup_variable(const mslc_variable* key,
                             size_t size,
                             size_t alignment,
                             const void* pc);
  void step(const void* pc = nullptr) {
    if (__builtin_expect(steps_left_-- == 0, 0)) exceed_steps(pc);
  }

  // ---- for checks
  static Worker* current() { return running; }
  bool in_kernel() const { return current_ != nullptr; }
  const Thread& thread() const { return *current_; }
  const mslc_threadgroup& threadgroup() const { return threadgroup_; }
  const Launch& launch() const { return *launch_; }
  const ThreadgroupMemory& memory() const { return memory_; }
  const SyncClock& clock() const { return clock_; }
  // The SIMD group that the scheduler works on.
  unsigned running_group() const { return group_order_[cursor_]; }
  uint32_t threadgroup_index() const { return threadgroup_index_; }
  uint64_t launch_number() const { return launch_number_; }  // counts the launches of this worker
  const char* entry_address() const {
    return reinterpret_cast<const char*>(launch_->request->kernel->entry);
  }
  // A finding of this thread, to be completed and passed to report() or stop().
  mslc_finding finding(int kind, const mslc_site* site, const void* pc) const;
  // `pc`: where the stack was found to be full, or null.
  mslc_finding stack_overflow(const void* pc) const;
  void report(const mslc_finding& finding) { launch_->findings->add(finding); }
  // Reports, stops the launch, and does not come back.
  [[noreturn]] void stop(const mslc_finding& finding);
  CheckState* check_state = nullptr;
  FaultState fault;  // of faults.cpp

  const Counters& counters() const { return counters_; }

  Worker* next_idle = nullptr;  // link of the pool's list

 private:
  // Initial-exec keeps the lane lookup at one load: kernels ask for it often.
  static __thread Worker* running __attribute__((tls_model("initial-exec")));

  void run_threadgroup(uint64_t index);
  void set_up_threadgroup(uint64_t index);
  Thread* pick();
  Thread* take(SimdGroup& group);
  bool release_collective(SimdGroup& group);
  bool release_barrier();
  void report_lonely_barrier(const mslc_lanes& lanes, const Thread& first);
  void park();
  void resume(Context& from, Thread* next);
  [[noreturn]] void thread_main();
  static void fiber_main();
  void fail(const mslc_finding& finding);
  [[noreturn]] void exceed_steps(const void* pc);
  [[noreturn]] void abandon();
  void shuffle_groups();
  uint64_t random();

  Launch* launch_ = nullptr;
  mslc_threadgroup threadgroup_;
  ThreadgroupMemory memory_;
  StackPool stacks_;
  Counters counters_;
  Context scheduler_;          // of the host thread, outside all fibers
  Thread* current_ = nullptr;  // null while no kernel code runs
  bool shuffled_ = false;
  bool failed_ = false;
  uint64_t random_state_ = 1;
  uint64_t steps_left_ = 0;
  SyncClock clock_;
  uint32_t threadgroup_index_ = 0;
  uint64_t launch_number_ = 0;
  unsigned thread_count_ = 0, group_count_ = 0;
  unsigned cursor_ = 0;  // into group_order_: groups before it are blocked until the next barrier
  uint8_t group_order_[MSLC_SIMD_WIDTH];
  SimdGroup groups_[MSLC_SIMD_WIDTH];
  Thread threads_[MSLC_MAX_THREADS_PER_THREADGROUP];
};

}  // namespace mslc
