// Which thread of a threadgroup runs next, and what opens collectives and barriers.
#include <stdio.h>
#include <string.h>

#include "profile.h"
#include "worker.h"

namespace mslc {
namespace {

unsigned lowest(uint32_t set) {
  return static_cast<unsigned>(__builtin_ctz(set));
}

// Returns the n-th member of `set`.
unsigned nth_member(uint32_t set, unsigned n) {
  while (n--) set &= set - 1;
  return lowest(set);
}

bool same_site(const mslc_site* a, const mslc_site* b) {
  return a == b || (a->line == b->line && a->column == b->column && !strcmp(a->file, b->file));
}

}  // namespace

uint64_t Worker::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

void Worker::shuffle_groups() {
  if (!shuffled_) return;
  for (unsigned i = group_count_; i > 1; --i) {
    unsigned j = random() % i;
    uint8_t swapped = group_order_[i - 1];
    group_order_[i - 1] = group_order_[j];
    group_order_[j] = swapped;
  }
}

// Returns the next thread to run, or null if the threadgroup is finished or has failed. The lanes
// of a SIMD group run until all are blocked, then the next group runs. A threadgroup barrier opens
// when no thread can run any more.
Thread* Worker::pick() {
  while (!failed_) {
    if (cursor_ < group_count_) {
      SimdGroup& group = groups_[group_order_[cursor_]];
      if (group.ready || release_collective(group)) return take(group);
      ++cursor_;
    } else if (!release_barrier()) {
      return nullptr;
    }
  }
  return nullptr;
}

Thread* Worker::take(SimdGroup& group) {
  unsigned lane = shuffled_ ? nth_member(group.ready, random() % __builtin_popcount(group.ready))
                            : lowest(group.ready);
  group.ready &= ~(1u << lane);
  return &group.lanes[lane];
}

// Called when no lane of the group can run. Of the lanes that wait in collectives, those at the
// earliest position continue together. Code after a branch is laid out last, so lanes that already
// wait there are met by the others.
bool Worker::release_collective(SimdGroup& group) {
  if (!group.collective) return false;
  const Thread* first = nullptr;
  for (uint32_t set = group.collective; set; set &= set - 1) {
    const Thread& thread = group.lanes[lowest(set)];
    if (!first || thread.pc < first->pc) first = &thread;
  }
  mslc_lanes lanes;
  lanes.active = 0;
  lanes.site = first->site;
  for (unsigned i = 0; i < MSLC_SIMD_WIDTH; ++i) lanes.value[i] = nullptr;
  for (uint32_t set = group.collective; set; set &= set - 1) {
    unsigned lane = lowest(set);
    const Thread& thread = group.lanes[lane];
    if (thread.pc != first->pc) continue;
    lanes.active |= 1u << lane;
    lanes.value[lane] = thread.value;
  }
  ++counters_.collectives;
  if (lanes.active != (group.collective | group.barrier)) ++counters_.divergent_collectives;
  const bool together = (lanes.active | group.done) == group.present;
  if (together) clock_.simdgroup[&group - groups_] = ++clock_.now;
  if (Profile* profile = launch_->profile) {
    profile->collective(lanes.active);
    if (together) profile->synchronise(static_cast<unsigned>(&group - groups_));
  }
  if (first->combine) {
    // The accesses of `combine` do not belong to the thread that happened to arrive last.
    Thread* const last = current_;
    current_ = nullptr;
    first->combine(&lanes);
    current_ = last;
  } else if (lanes.active != group.present && launch_->sink) {
    report_lonely_barrier(lanes, *first);
  }
  group.collective &= ~lanes.active;
  group.ready |= lanes.active;
  return true;
}

// Called when every thread waits in a barrier or has returned.
bool Worker::release_barrier() {
  const Thread* waiting = nullptr;
  unsigned returned = 0;
  for (unsigned i = 0; i < group_count_; ++i) {
    SimdGroup& group = groups_[i];
    returned += __builtin_popcount(group.done);
    for (uint32_t set = group.barrier; set; set &= set - 1) {
      const Thread& thread = group.lanes[lowest(set)];
      if (!waiting) {
        waiting = &thread;
      } else if (!same_site(thread.site, waiting->site)) {
        mslc_finding divergence =
            finding(MSLC_FINDING_BARRIER_DIVERGENCE, waiting->site, waiting->pc);
        divergence.thread_index = static_cast<int>(waiting->descriptor.index);
        divergence.other_thread = static_cast<int>(thread.descriptor.index);
        snprintf(divergence.message, sizeof divergence.message,
                 "threadgroup_barrier divergence: thread %u waits at line %u, thread %u at line %u",
                 waiting->descriptor.index, waiting->site->line, thread.descriptor.index,
                 thread.site->line);
        fail(divergence);
        return false;
      }
    }
  }
  if (!waiting) return false;
  if (returned) {
    mslc_finding divergence = finding(MSLC_FINDING_BARRIER_DIVERGENCE, waiting->site, waiting->pc);
    divergence.thread_index = static_cast<int>(waiting->descriptor.index);
    snprintf(divergence.message, sizeof divergence.message,
             "threadgroup_barrier divergence: thread %u waits, %u of %u threads have returned",
             waiting->descriptor.index, returned, thread_count_);
    fail(divergence);
    return false;
  }
  for (unsigned i = 0; i < group_count_; ++i) {
    groups_[i].ready = groups_[i].barrier;
    groups_[i].barrier = 0;
  }
  ++counters_.barriers;
  ++clock_.now;
  if (waiting->fences & MSLC_FENCE_THREADGROUP) clock_.threadgroup_memory = clock_.now;
  if (waiting->fences & MSLC_FENCE_DEVICE) clock_.device_memory = clock_.now;
  for (uint32_t& time : clock_.simdgroup) time = clock_.now;
  if (launch_->profile)
    for (unsigned i = 0; i < group_count_; ++i) launch_->profile->synchronise(i);
  cursor_ = 0;
  shuffle_groups();
  return true;
}

}  // namespace mslc
