#include "check_races.h"

#include <stdio.h>
#include <string.h>

#include "check_shadow.h"
#include "placement.h"
#include "worker.h"

namespace mslc {
namespace {

// ---- ordering of accesses -----------------------------------------------------------------------

// The running thread and its synchronisation history. An access stamped before `barrier` precedes
// the last barrier that orders this memory. An access by the same SIMD group stamped before
// `simdgroup` precedes the last operation that all its lanes joined.
struct Now {
  uint32_t stamp, barrier, simdgroup;
  uint32_t threadgroup;
  uint16_t thread;
};

enum Distance { kSameThread, kSameSimdgroup, kSameThreadgroup, kOtherThreadgroup };

Distance distance(uint32_t threadgroup, unsigned thread, const ShadowEntry& entry) {
  if (entry.threadgroup != threadgroup) return kOtherThreadgroup;
  if (entry.thread == thread) return kSameThread;
  return entry.thread / MSLC_SIMD_WIDTH == thread / MSLC_SIMD_WIDTH ? kSameSimdgroup
                                                                    : kSameThreadgroup;
}

// Returns the distance to the thread of `entry` if nothing orders its access before the current
// one, and kSameThread if the accesses are ordered.
template <bool kDevice>
Distance concurrent(const ShadowEntry& entry, const Now& now) {
  if (!entry.stamp) return kSameThread;
  const Distance far = distance(now.threadgroup, now.thread, entry);
  if (kDevice && far == kOtherThreadgroup) return far;
  if (entry.stamp < now.barrier) return kSameThread;
  if (far == kSameSimdgroup && entry.stamp < now.simdgroup) return kSameThread;
  return far;
}

// ---- one worker's state -------------------------------------------------------------------------

// Positions already reported in this launch. Without it, a racy loop could report millions of
// findings.
class ReportedPlaces {
 public:
  void reset() {
    for (Place& place : places_) place = {};
  }
  bool add(int kind, const void* pc) {
    Place& place =
        places_[(reinterpret_cast<uintptr_t>(pc) ^ static_cast<unsigned>(kind)) % kPlaces];
    if (place.pc == pc && place.kind == kind) return false;
    place = {pc, kind};
    return true;
  }

 private:
  static constexpr unsigned kPlaces = 512;
  struct Place {
    const void* pc = nullptr;
    int kind = 0;
  };
  Place places_[kPlaces];
};

// Racing writes of the same value are harmless, and kernels rely on them: at the edge of a matrix,
// MLX's last SIMD groups overlap and compute some rows twice. The callback precedes the write, so
// the decision waits for the worker's next access.
struct PendingRace {
  static constexpr unsigned kMaxSize = 16;
  bool exists = false;
  Access access;
  int thread;
  ShadowEntry other;
  Distance distance;
  char before[kMaxSize];
};

}  // namespace

struct CheckState {
  uint64_t launch = 0;
  uint32_t generation = 0;  // of the stamps in threadgroup_shadow
  PendingRace pending;
  ShadowCell* threadgroup_shadow = allocate_shadow(MSLC_MOST_THREADGROUP_MEMORY);
  ReportedPlaces reported;
};

namespace {

CheckState& state_of(Worker& worker) {
  CheckState*& state = worker.check_state;
  if (!state) {
    state = create<CheckState>();
    if (!state->threadgroup_shadow) abort();
  }
  if (state->launch != worker.launch_number()) {
    state->launch = worker.launch_number();
    state->reported.reset();
    state->pending.exists = false;
    if (state->generation != worker.clock().generation) {
      state->generation = worker.clock().generation;
      clear_shadow(state->threadgroup_shadow, MSLC_MOST_THREADGROUP_MEMORY);
    }
  }
  return *state;
}

// ---- findings -----------------------------------------------------------------------------------

const char* verb(bool write, bool atomic) {
  if (write) return atomic ? "atomic write" : "write";
  return atomic ? "atomic read" : "read";
}

const char* missing(Distance distance, bool device) {
  if (distance == kOtherThreadgroup) return "threadgroups are not ordered within a launch";
  if (distance == kSameSimdgroup) return "no barrier or SIMD-group operation lies between them";
  return device ? "no threadgroup_barrier(mem_flags::mem_device) lies between them"
                : "no threadgroup_barrier(mem_flags::mem_threadgroup) lies between them";
}

void report_race(Worker& worker,
                 const Access& access,
                 int thread,
                 const ShadowEntry& other,
                 bool other_writes,
                 Distance distance) {
  const bool device = access.buffer != Access::kThreadgroup;
  const int kind = device ? MSLC_FINDING_DEVICE_RACE : MSLC_FINDING_THREADGROUP_RACE;
  if (!state_of(worker).reported.add(kind, access.pc)) return;
  mslc_finding race = access_finding(worker, kind, access);
  race.thread_index = thread;
  race.other_thread = other.thread;
  race.other_pc = worker.entry_address() + other.pc;
  char threadgroup[48] = "";
  if (distance == kOtherThreadgroup)
    snprintf(threadgroup, sizeof threadgroup, " of threadgroup %u", other.threadgroup);
  snprintf(race.message, sizeof race.message, "%s of %s and %s by thread %u%s race: %s",
           verb(is_write(access.kind), is_atomic(access.kind)), describe(worker, access).text,
           verb(other_writes, other.atomic), other.thread, threadgroup, missing(distance, device));
  worker.report(race);
}

void resolve_pending_race(Worker& worker) {
  PendingRace& pending = state_of(worker).pending;
  if (!pending.exists) return;
  pending.exists = false;
  const Access& access = pending.access;
  if (memcmp(pending.before, const_cast<const void*>(access.address), access.size) != 0)
    report_race(worker, access, pending.thread, pending.other, true, pending.distance);
}

void handle_race(Worker& worker,
                 const Access& access,
                 const ShadowEntry& other,
                 bool other_writes,
                 Distance distance) {
  const auto thread = static_cast<int>(worker.thread().descriptor.index);
  if (!other_writes || !is_write(access.kind) || access.size > PendingRace::kMaxSize) {
    report_race(worker, access, thread, other, other_writes, distance);
    return;
  }
  PendingRace& pending = state_of(worker).pending;
  pending.exists = true;
  pending.access = access;
  pending.thread = thread;
  pending.other = other;
  pending.distance = distance;
  memcpy(pending.before, const_cast<const void*>(access.address), access.size);
}

void report_uninitialised(Worker& worker, const Access& access) {
  if (!state_of(worker).reported.add(MSLC_FINDING_UNINITIALISED, access.pc)) return;
  mslc_finding finding = access_finding(worker, MSLC_FINDING_UNINITIALISED, access);
  snprintf(finding.message, sizeof finding.message,
           "read of %s, which no thread of the threadgroup has written",
           describe(worker, access).text);
  worker.report(finding);
}

// ---- one access ---------------------------------------------------------------------------------

struct Conflict {
  const ShadowEntry* entry = nullptr;
  bool writes = false;
  Distance distance = kSameThread;
};

template <bool kDevice>
void remember_read(ShadowCell& cell, const ShadowEntry& mine, const Now& now) {
  ShadowEntry(&reads)[2] = cell.reads;
  // Of the two earlier reads, keep the one that is further away.
  if (concurrent<kDevice>(reads[0], now) >= concurrent<kDevice>(reads[1], now)) {
    if (concurrent<kDevice>(reads[0], now) != kSameThread) reads[1] = reads[0];
  }
  reads[0] = mine;
}

template <bool kDevice>
Conflict record(ShadowCell& cell, const ShadowEntry& mine, bool write, const Now& now) {
  Conflict conflict;
  auto compare = [&](const ShadowEntry& other, bool other_writes) {
    if (!(other.bytes & mine.bytes) || (other.atomic && mine.atomic)) return;
    const Distance far = concurrent<kDevice>(other, now);
    if (far > conflict.distance) conflict = {&other, other_writes, far};
  };
  compare(cell.write, true);
  if (!write) {
    if (!conflict.entry) remember_read<kDevice>(cell, mine, now);
    return conflict;
  }
  compare(cell.reads[0], false);
  compare(cell.reads[1], false);
  return conflict;
}

// Checks both kinds of memory. `start` is the stamp at which the threadgroup began.
template <bool kDevice>
void check_cells(
    Worker& worker, const Access& access, ShadowCell* cells, const Now& now, uint32_t start) {
  const bool write = is_write(access.kind);
  ShadowEntry mine = {};
  mine.stamp = now.stamp;
  mine.pc = static_cast<int32_t>(static_cast<const char*>(access.pc) - worker.entry_address());
  mine.threadgroup = now.threadgroup;
  mine.thread = now.thread;
  mine.atomic = is_atomic(access.kind);
  ShadowEntry other;
  Conflict worst;
  bool uninitialised = false;
  const uint64_t end = access.offset + access.size;
  for (uint64_t at = access.offset; at < end;) {
    ShadowCell& cell = cells[at / kBytesPerCell];
    mine.bytes = at % kBytesPerCell ? 2 : at + 1 < end ? 3 : 1;
    at = (at / kBytesPerCell + 1) * kBytesPerCell;
    const Conflict conflict = record<kDevice>(cell, mine, write, now);
    if (conflict.distance > worst.distance) {
      other = *conflict.entry;
      worst = conflict;
    }
    if constexpr (!kDevice) {
      const unsigned written = cell.write.stamp >= start ? cell.write.initialised : 0;
      if (write)
        mine.initialised = static_cast<uint8_t>((written | mine.bytes) & 3);
      else if (mine.bytes & ~written)
        uninitialised = true;
    }
    if (write) cell.write = mine;
  }
  if (worst.entry) handle_race(worker, access, other, worst.writes, worst.distance);
  if (uninitialised) report_uninitialised(worker, access);
}

// Workers run threadgroups in parallel and share the shadow of device memory.
class CellLock {
 public:
  static constexpr uint64_t kSpan = 128;  // bytes per lock

  explicit CellLock(uint64_t offset) : lock_(locks[offset / kSpan % kLocks]) {
    while (__atomic_exchange_n(&lock_, 1, __ATOMIC_ACQUIRE)) {
    }
  }
  ~CellLock() { __atomic_store_n(&lock_, 0, __ATOMIC_RELEASE); }

 private:
  static constexpr unsigned kLocks = 1024;
  static uint8_t locks[kLocks];
  uint8_t& lock_;
};
uint8_t CellLock::locks[];

void check_device(Worker& worker, const Access& access, ShadowCell* cells, const Now& now) {
  Access piece = access;
  const auto* start = static_cast<const volatile char*>(access.address);
  for (uint64_t end = access.offset + access.size; piece.offset < end; piece.offset += piece.size) {
    piece.address = start + (piece.offset - access.offset);
    const uint64_t left = end - piece.offset,
                   in_span = CellLock::kSpan - piece.offset % CellLock::kSpan;
    piece.size = static_cast<uint32_t>(left < in_span ? left : in_span);
    CellLock lock(piece.offset);
    check_cells<true>(worker, piece, cells, now, 0);
  }
}

}  // namespace

void finish_threadgroup_checks(Worker& worker) {
  if (worker.launch().sink == check_access) resolve_pending_race(worker);
}

void check_access(Worker& worker, const Access& access) {
  resolve_pending_race(worker);
  const SyncClock& clock = worker.clock();
  Now now;
  now.stamp = clock.now;
  now.thread = static_cast<uint16_t>(worker.thread().descriptor.index);
  now.simdgroup = clock.simdgroup[now.thread / MSLC_SIMD_WIDTH];
  now.threadgroup = worker.threadgroup_index();
  if (access.buffer == Access::kThreadgroup) {
    now.barrier = clock.threadgroup_memory;
    check_cells<false>(worker, access, state_of(worker).threadgroup_shadow, now, clock.start);
  } else if (ShadowCell* cells =
                 worker.launch().arena->slot(static_cast<unsigned>(access.buffer)).shadow) {
    now.barrier = clock.device_memory;
    check_device(worker, access, cells, now);
  }
}

}  // namespace mslc
