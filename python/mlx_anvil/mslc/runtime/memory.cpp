#include "memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "placement.h"

namespace mslc {
namespace {

constexpr uint64_t kCanary = 0x6d736c632d666962;
constexpr unsigned kStacksPerGrowth = 32;
// Equal offsets in equally aligned stacks would all compete for the same few cache sets.
constexpr size_t kStride = Stack::kSize + 832;

char* map(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  return static_cast<char*>(memory);
}

}  // namespace

bool Stack::overflowed() const {
  uint64_t word;
  memcpy(&word, base, sizeof word);
  return word != kCanary;
}

Stack* StackPool::acquire() {
  if (!free_) grow();
  Stack* stack = free_;
  free_ = stack->next;
  return stack;
}

void StackPool::grow() {
  char* memory = map(kStride * kStacksPerGrowth);
  auto* stacks = static_cast<Stack*>(malloc(sizeof(Stack) * kStacksPerGrowth));
  for (unsigned i = kStacksPerGrowth; i-- > 0;) {
    stacks[i].base = memory + kStride * i;
    memcpy(stacks[i].base, &kCanary, sizeof kCanary);
    release(&stacks[i]);
  }
}

ThreadgroupMemory::ThreadgroupMemory() : base_(map(kCapacity)) {}

void* ThreadgroupMemory::allocate(size_t size, size_t alignment, const mslc_variable* key) {
  const size_t counted = alignment < kCounted ? kCounted : alignment;
  const size_t offset = (used_ + counted - 1) & ~(counted - 1);
  used_ = offset + size;
  if (exhausted()) return base_;  // the launch stops before a use
  const char* start = apart_ ? base_ + static_cast<size_t>(count_) * kSlot + kLead : end_;
  auto* address =
      reinterpret_cast<char*>(barely_aligned(reinterpret_cast<uintptr_t>(start), alignment));
  end_ = address + size;
  objects_[count_++] = {key, address, offset, size};
  memset(address, 0xFF, size);
  return address;
}

void* ThreadgroupMemory::variable(const mslc_variable* key, size_t size, size_t alignment) {
  for (int i = 0; i < count_; ++i)
    if (objects_[i].key == key) return objects_[i].address;
  return allocate(size, alignment, key);
}

}  // namespace mslc
