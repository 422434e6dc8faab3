#include "worker.h"

#include <stdio.h>

#include "check_races.h"
#include "profile.h"

namespace mslc {

__thread Worker* Worker::running = nullptr;

// ---- one launch ---------------------------------------------------------------------------------

void Worker::run(Launch& launch) {
  launch_ = &launch;
  counters_ = {};
  failed_ = false;
  shuffled_ = launch.request->seed != 0;
  ++launch_number_;
  if (clock_.now >> 31) {  // the stamps are about to overflow
    ++clock_.generation;
    clock_.now = 0;
  }
  fault.handling = false;
  const SignalStack signals(fault);
  Worker* outer = running;
  running = this;
  while (!__atomic_load_n(&launch.stopped, __ATOMIC_RELAXED)) {
    uint64_t i = __atomic_fetch_add(&launch.next, 1, __ATOMIC_RELAXED);
    if (i >= launch.threadgroup_count) break;
    const uint64_t count = launch.threadgroup_count;
    run_threadgroup((i * launch.order_step % count + launch.order_start) % count);
  }
  running = outer;
  launch_ = nullptr;
}

void Worker::set_up_threadgroup(uint64_t index) {
  const mslc_launch& request = *launch_->request;
  const mslc_size full = request.threadgroup_size;
  mslc_threadgroup& group = threadgroup_;
  group.grid = launch_->grid;
  group.threads_per_grid = launch_->threads;
  group.dispatch_size = full;
  group.position = {static_cast<unsigned>(index % group.grid.x),
                    static_cast<unsigned>(index / group.grid.x % group.grid.y),
                    static_cast<unsigned>(index / group.grid.x / group.grid.y)};
  auto extent = [](unsigned total, unsigned size, unsigned position) {
    unsigned left = total - size * position;
    return left < size ? left : size;
  };
  group.size = {extent(group.threads_per_grid.x, full.x, group.position.x),
                extent(group.threads_per_grid.y, full.y, group.position.y),
                extent(group.threads_per_grid.z, full.z, group.position.z)};

  for (unsigned i = 0; i < MSLC_MAX_BUFFERS; ++i)
    group.buffers[i] = i >= request.buffer_count ? nullptr
                       : launch_->arena          ? launch_->arena->address(i)
                                                 : request.buffers[i].data;
  memory_.reset(threadgroup_memory_limit(request), launch_->arena != nullptr);
  for (unsigned i = 0; i < request.threadgroup_buffer_count; ++i)
    group.threadgroup_buffers[i] =
        memory_.allocate(request.threadgroup_lengths[i], MSLC_THREADGROUP_BUFFER_ALIGNMENT);

  thread_count_ = group.size.x * group.size.y * group.size.z;
  group_count_ = (thread_count_ + MSLC_SIMD_WIDTH - 1) / MSLC_SIMD_WIDTH;
  group.simdgroups = group_count_;
  mslc_size position = {0, 0, 0};
  for (unsigned i = 0; i < thread_count_; ++i) {
    threads_[i].descriptor = {&threadgroup_, position, i};
    threads_[i].stack = nullptr;
    if (++position.x == group.size.x) {
      position.x = 0;
      if (++position.y == group.size.y) {
        position.y = 0;
        ++position.z;
      }
    }
  }
  for (unsigned i = 0; i < group_count_; ++i) {
    unsigned lanes = thread_count_ - i * MSLC_SIMD_WIDTH;
    uint32_t present = lanes >= MSLC_SIMD_WIDTH ? ~0u : (1u << lanes) - 1;
    groups_[i] = {threads_ + i * MSLC_SIMD_WIDTH, present, present, 0, 0, 0};
    group_order_[i] = static_cast<uint8_t>(i);
  }
  cursor_ = 0;
  threadgroup_index_ = static_cast<uint32_t>(index);
  clock_.start = ++clock_.now;
  clock_.threadgroup_memory = clock_.device_memory = clock_.start;
  for (uint32_t& time : clock_.simdgroup) time = clock_.start;
  steps_left_ = request.step_limit ? request.step_limit : ~uint64_t{0};
  // Seed from the threadgroup, so that the schedule does not depend on which worker runs it.
  random_state_ = (request.seed + 1) * 0x9E3779B97F4A7C15 ^ (index + 1) * 0xD1B54A32D192ED03;
  if (!random_state_) random_state_ = 1;
  shuffle_groups();
}

void Worker::run_threadgroup(uint64_t index) {
  set_up_threadgroup(index);
  if (Thread* first = pick()) resume(scheduler_, first);
  if (check_state) finish_threadgroup_checks(*this);
  if (launch_->profile) launch_->profile->finish_threadgroup();
  ++counters_.threadgroups;
  if (memory_.used() > counters_.threadgroup_memory) counters_.threadgroup_memory = memory_.used();
  if (failed_)  // reclaim the stacks of abandoned fibers
    for (unsigned i = 0; i < thread_count_; ++i) {
      if (Stack* stack = threads_[i].stack) {
        stack->mark_end();
        stacks_.release(stack);
      }
    }
}

// ---- switching ----------------------------------------------------------------------------------

void Worker::resume(Context& from, Thread* next) {
  current_ = next;
  if (!next) {
    switch_fiber(from, scheduler_);
    return;
  }
  if (!next->stack) {
    next->stack = stacks_.acquire();
    prepare_fiber(next->context, next->stack->base, next->stack->size, fiber_main);
  }
  switch_fiber(from, next->context);
}

void Worker::park() {
  Thread* self = current_;
  Thread* next = pick();
  if (next != self) resume(self->context, next);
}

void Worker::fiber_main() {
  running->thread_main();
}

// A fiber runs its thread to the end and then the next unstarted thread on the same stack. A kernel
// without synchronisation therefore never switches fibers.
void Worker::thread_main() {
  for (;;) {
    Thread* self = current_;
    launch_->request->kernel->entry(&self->descriptor);
    const unsigned group = self->descriptor.index / MSLC_SIMD_WIDTH;
    groups_[group].done |= 1u << lane();
    if (launch_->profile && groups_[group].done == groups_[group].present)
      launch_->profile->synchronise(group);
    Stack* stack = self->stack;
    self->stack = nullptr;
    if (stack->overflowed()) {
      stack->mark_end();
      fail(stack_overflow(nullptr));
    }
    Thread* next = pick();
    if (next && !next->stack) {
      next->stack = stack;
      current_ = next;
      continue;
    }
    stacks_.release(stack);
    Context finished;
    resume(finished, next);
    __builtin_unreachable();
  }
}

void Worker::abandon() {
  Context finished;
  resume(finished, nullptr);
  __builtin_unreachable();
}

// ---- the kernel's calls -------------------------------------------------------------------------

void Worker::collective(void* value, mslc_combine combine, const mslc_site* site, const void* pc) {
  Thread& self = *current_;
  self.value = value;
  self.combine = combine;
  self.site = site;
  self.pc = pc;
  step();
  groups_[self.descriptor.index / MSLC_SIMD_WIDTH].collective |= 1u << lane();
  park();
}

void Worker::threadgroup_barrier(unsigned fences, const mslc_site* site, const void* pc) {
  Thread& self = *current_;
  self.fences = fences;
  self.site = site;
  self.pc = pc;
  step();
  groups_[self.descriptor.index / MSLC_SIMD_WIDTH].barrier |= 1u << lane();
  park();
}

void* Worker::threadgroup_variable(const mslc_variable* key,
                                   size_t size,
                                   size_t alignment,
                                   const void* pc) {
  void* address = memory_.variable(key, size, alignment);
  if (memory_.exhausted()) {
    mslc_finding excess = finding(MSLC_FINDING_THREADGROUP_MEMORY, nullptr, pc);
    snprintf(excess.message, sizeof excess.message,
             "threadgroup memory exceeds %u bytes: the kernel uses at least %zu",
             threadgroup_memory_limit(*launch_->request), memory_.used());
    stop(excess);
  }
  return address;
}

void Worker::exceed_steps(const void* pc) {
  mslc_finding limit = finding(MSLC_FINDING_STEP_LIMIT, pc ? nullptr : current_->site, pc);
  snprintf(limit.message, sizeof limit.message,
           "stopped after %llu steps in one threadgroup: the kernel does not seem to end",
           launch_->request->step_limit);
  stop(limit);
}

mslc_finding Worker::stack_overflow(const void* pc) const {
  mslc_finding overflow = finding(MSLC_FINDING_STACK_OVERFLOW, nullptr, pc);
  snprintf(overflow.message, sizeof overflow.message,
           "a thread used more than %zu KB of stack: a large array, or recursion that does not end",
           Stack::kSize / 1024);
  return overflow;
}

// ---- findings -----------------------------------------------------------------------------------

mslc_finding Worker::finding(int kind, const mslc_site* site, const void* pc) const {
  mslc_finding finding = {};
  finding.kind = kind;
  finding.count = 1;
  finding.kernel = launch_->request->kernel->name;
  finding.pc = pc;
  if (site) {
    finding.file = site->file;
    finding.line = site->line;
    finding.column = site->column;
  }
  finding.threadgroup_position = threadgroup_.position;
  finding.thread_index = current_ ? static_cast<int>(current_->descriptor.index) : -1;
  finding.other_thread = -1;
  finding.buffer = -1;
  return finding;
}

void Worker::stop(const mslc_finding& finding) {
  fail(finding);
  abandon();
}

void Worker::fail(const mslc_finding& finding) {
  report(finding);
  failed_ = true;
  __atomic_store_n(&launch_->stopped, 1, __ATOMIC_RELAXED);
}

}  // namespace mslc
