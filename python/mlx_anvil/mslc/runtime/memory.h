// Memory that a worker owns: stacks for its fibers and the memory of its current threadgroup.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "fiber.h"

namespace mslc {

// One fiber stack, above pages that cannot be touched. Where the system gives no such pages, a word
// at its low end is checked when the thread returns.
struct Stack {
  static constexpr size_t kSize = 256 * 1024;
  char* base;
  size_t size;  // kSize and up to a page
  Stack* next;

  bool contains(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(base) < size;
  }
  // Whether an address is one that a thread reaches when the stack is full.
  bool guards(uintptr_t address) const;
  void mark_end();
  bool overflowed() const;
};

// A list of stacks, last in first out so that the warm one is used next.
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

// The memory a threadgroup may use: buffers passed at launch first, then the variables that the
// kernel declares, in the order in which they are first reached. What is handed out is aligned as
// asked and no better, and poisoned with 0xFF bytes (a NaN in every floating-point type).
class ThreadgroupMemory {
 public:
  ThreadgroupMemory();
  // `limit`: bytes, at most MSLC_MOST_THREADGROUP_MEMORY. `apart`: leave gaps, so that an index
  // which leaves one object does not reach another.
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
    const mslc_variable* key;  // null: a buffer passed at launch
    char* address;
    size_t offset;  // as if there were no gaps but those that kCounted makes
    size_t size;
  };
  struct Place {
    int object;
    int64_t offset;  // into the object; may lie outside
  };

  bool contains(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(base_) < kCapacity;
  }
  // What an address belongs to, where objects lie apart.
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
  static constexpr size_t kCounted = 16;  // bytes: sizes count as multiples of this
  static constexpr size_t kSlot = 128 * 1024;
  static constexpr size_t kLead = 16 * 1024;
  static constexpr size_t kCapacity = kMaxObjects * kSlot;

  char* base_;
  char* end_ = nullptr;  // of the last object, where they do not lie apart
  size_t used_ = 0;
  size_t limit_ = 0;
  bool apart_ = false;
  int count_ = 0;
  Object objects_[kMaxObjects];
};

}  // namespace mslc
