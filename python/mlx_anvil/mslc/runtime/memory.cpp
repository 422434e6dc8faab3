#include "memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "placement.h"

namespace mslc {
namespace {

constexpr uint64_t kCanary = 0x6d736c632d666962;
constexpr unsigned kStacksPerGrowth = 32;
// Shifts the stacks against each other: with equal alignment, equal offsets would compete for the
// same few cache sets.
constexpr size_t kShift = 832;
constexpr size_t kMostShift = 4096;
constexpr int kInstallGuard = 102;  // MADV_GUARD_INSTALL, which older headers lack
// Each one splits a mapping, and a process is limited to 65530 mappings.
constexpr unsigned kMostProtected = 8192;

char* map(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  return static_cast<char*>(memory);
}

size_t page_size() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Kernels probe every page of a frame, so a thread cannot jump over the guard pages.
size_t guard_size() {
  return 2 * page_size();
}

// Makes accesses to [memory, memory + size) fault, if the system supports it.
void guard(char* memory, size_t size) {
  static unsigned count_protected = 0;
  if (!madvise(memory, size, kInstallGuard)) return;
  if (__atomic_fetch_add(&count_protected, 1, __ATOMIC_RELAXED) < kMostProtected)
    mprotect(memory, size, PROT_NONE);
}

}  // namespace

bool Stack::guards(uintptr_t address) const {
  return reinterpret_cast<uintptr_t>(base) - 1 - address < guard_size();
}

void Stack::mark_end() {
  memcpy(base, &kCanary, sizeof kCanary);
}

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
  const size_t page = page_size();
  const size_t stride = (guard_size() + Stack::kSize + kMostShift + page - 1) / page * page;
  char* memory = map(stride * kStacksPerGrowth);
  auto* stacks = static_cast<Stack*>(malloc(sizeof(Stack) * kStacksPerGrowth));
  if (!stacks) abort();
  for (unsigned i = kStacksPerGrowth; i-- > 0;) {
    guard(memory + stride * i, guard_size());
    stacks[i].base = memory + stride * i + guard_size();
    stacks[i].size = Stack::kSize + i * kShift % kMostShift;
    stacks[i].mark_end();
    release(&stacks[i]);
  }
}

ThreadgroupMemory::ThreadgroupMemory() : base_(map(kCapacity)) {}

void* ThreadgroupMemory::allocate(size_t size, size_t alignment, const mslc_variable* key) {
  const size_t counted = alignment < kCounted ? kCounted : alignment;
  const size_t offset = (used_ + counted - 1) & ~(counted - 1);
  used_ = offset + size;
  if (exhausted()) return base_;  // the launch stops before the memory is used
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
