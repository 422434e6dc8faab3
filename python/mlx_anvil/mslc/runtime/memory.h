// Memory owned by a worker: stacks for its fibers, and the memory of its current threadgroup.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "fiber.h"

namespace mslc {

// A fiber's stack, above guard pages. On systems without guard pages, a word at the low end is
// checked when the thread returns.
struct Stack {
  static constexpr size_t kSize = 256 * 1024;
  char* base;
  size_t size;  // kSize plus up to a page
  Stack* next;

  bool contains(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(base) < size;
  }
  // Tells if a thread reaches an address when its stack overflows.
  bool guards(uintptr_t address) const;
  void mark_end();
  bool overflowed() const;
};

// A last-in, first-out list of stacks, so that the one still in the cache is reused first.
class StackPool {
 public:
  Stack* acquire();
  void release(Stack* stack) {
    stack->next = free_;
    free_ = stack;
  }

 private:
  void grow();
  Stack* free_ = nullptr;
};

inline unsigned threadgroup_memory_limit(const mslc_launch& launch) {
  return launch.threadgroup_memory_limit ? launch.threadgroup_memory_limit
                                         : MSLC_MAX_THREADGROUP_MEMORY;
}

// The memory of a threadgroup: first the buffers passed at launch, then the variables that the
// kernel declares, in the order of their first use. Objects are aligned exactly as requested and no
// better, and filled with 0xFF bytes (a NaN in every floating-point type).
class ThreadgroupMemory {
 public:
  ThreadgroupMemory();
  // `limit` is in bytes, at most MSLC_MOST_THREADGROUP_MEMORY. `apart` leaves gaps, so that an
  // index out of one object does not reach another.
  void reset(size_t limit, bool apart) {
    used_ = count_ = 0;
    end_ = base_;
    limit_ = limit;
    apart_ = apart;
  }
  void* allocate(size_t size, size_t alignment, const mslc_variable* key = nullptr);
  void* variable(const mslc_variable* key, size_t size, size_t alignment);
  size_t used() const { return used_; }
  bool exhausted() const { return used_ > limit_ || count_ == kMaxObjects; }

  struct Object {
    const mslc_variable* key;  // null for a buffer passed at launch
    char* address;
    size_t offset;  // without the gaps of `apart`
    size_t size;
  };
  struct Place {
    int object;
    int64_t offset;  // from the start of the object; may be out of bounds
  };

  bool contains(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(base_) < kCapacity;
  }
  // Finds the object that an address belongs to. Requires objects placed apart.
  Place place(uintptr_t address) const {
    const size_t distance = address - reinterpret_cast<uintptr_t>(base_);
    const auto index = static_cast<int>(distance / kSlot);
    const char* start = index < count_ ? objects_[index].address
                                       : base_ + static_cast<size_t>(index) * kSlot + kLead;
    return {index, static_cast<int64_t>(address - reinterpret_cast<uintptr_t>(start))};
  }
  const Object* object(int index) const { return index < count_ ? &objects_[index] : nullptr; }

 private:
  static constexpr int kMaxObjects = 256;
  static constexpr size_t kCounted = 16;  // sizes are rounded up to multiples of this many bytes
  static constexpr size_t kSlot = 256 * 1024;
  static constexpr size_t kLead = 16 * 1024;
  static constexpr size_t kCapacity = kMaxObjects * kSlot;

  char* base_;
  char* end_ = nullptr;  // end of the last object, if objects are not placed apart
  size_t used_ = 0;
  size_t limit_ = 0;
  bool apart_ = false;
  int count_ = 0;
  Object objects_[kMaxObjects];
};

}  // namespace mslc
