// A worker runs threadgroups one after the other on one host thread. It owns everything that the
// running threadgroup needs, so workers share only the launch.
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

// The state shared by the workers of one launch.
struct Launch {
  const mslc_launch* request;
  Findings* findings;
  mslc_size grid;     // threadgroups
  mslc_size threads;  // threads in the whole grid
  uint64_t threadgroup_count;
  uint64_t order_step, order_start;  // the i-th threadgroup is (i * step + start) % count
  uint64_t next = 0;                 // claimed atomically
  int stopped = 0;                   // set atomically by the first failure
  // For instrumented launches:
  AccessSink sink = nullptr;
  Profile* profile = nullptr;  // for profiled launches, which use one worker
  DeviceArena* arena = nullptr;
  Image image;  // the compiled library
};

// Numbers the synchronisation events of a worker. A stamp smaller than a field belongs to an access
// before the last event of that kind.
struct SyncClock {
  uint32_t generation = 0;  // stamps of different generations are not comparable
  uint32_t now = 0;
  uint32_t start;                       // start of the threadgroup
  uint32_t threadgroup_memory;          // last barrier that orders threadgroup memory
  uint32_t device_memory;               // last barrier that orders device memory
  uint32_t simdgroup[MSLC_SIMD_WIDTH];  // last operation that all live lanes joined
};

struct CheckState;  // of the race checks

// One Metal thread. It has a stack only between its start and its return.
struct Thread {
  mslc_thread descriptor;
  Context context;
  Stack* stack = nullptr;
  void* value = nullptr;  // operand of the collective that the thread waits in
  mslc_combine combine = nullptr;
  const mslc_site* site = nullptr;
  const void* pc = nullptr;  // position in the compiled kernel where the thread waits
  unsigned fences = 0;       // fences of the barrier that the thread waits in
};

// The lanes of one SIMD group by state, as bit sets. Each present lane is in exactly one of the
// others.
struct SimdGroup {
  Thread* lanes;
  uint32_t present;     // lanes that exist; fewer than 32 in a threadgroup's last group
  uint32_t ready;       // can run
  uint32_t collective;  // waiting for other lanes in a SIMD-group operation
  uint32_t barrier;     // waiting in a threadgroup barrier
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
  // Returns the SIMD group that the scheduler works on.
  unsigned running_group() const { return group_order_[cursor_]; }
  uint32_t threadgroup_index() const { return threadgroup_index_; }
  uint64_t launch_number() const { return launch_number_; }  // counts the launches of this worker
  const char* entry_address() const {
    return reinterpret_cast<const char*>(launch_->request->kernel->entry);
  }
  // Returns a finding about this thread, to be completed and passed to report() or stop().
  mslc_finding finding(int kind, const mslc_site* site, const void* pc) const;
  // `pc` is where the overflow was detected, or null.
  mslc_finding stack_overflow(const void* pc) const;
  void report(const mslc_finding& finding) { launch_->findings->add(finding); }
  // Reports, stops the launch, and does not return.
  [[noreturn]] void stop(const mslc_finding& finding);
  CheckState* check_state = nullptr;
  FaultState fault;  // used by faults.cpp

  const Counters& counters() const { return counters_; }

  Worker* next_idle = nullptr;  // link of the pool's list

 private:
  // Kernels look up their lane often. The initial-exec model makes that a single load.
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
  Context scheduler_;          // the host thread, outside all fibers
  Thread* current_ = nullptr;  // null while no kernel code runs
  bool shuffled_ = false;
  bool failed_ = false;
  uint64_t random_state_ = 1;
  uint64_t steps_left_ = 0;
  SyncClock clock_;
  uint32_t threadgroup_index_ = 0;
  uint64_t launch_number_ = 0;
  unsigned thread_count_ = 0, group_count_ = 0;
  unsigned cursor_ = 0;  // index into group_order_: groups before it are blocked until the next
                         // barrier
  uint8_t group_order_[MSLC_SIMD_WIDTH];
  SimdGroup groups_[MSLC_SIMD_WIDTH];
  Thread threads_[MSLC_MAX_THREADS_PER_THREADGROUP];
};

}  // namespace mslc
