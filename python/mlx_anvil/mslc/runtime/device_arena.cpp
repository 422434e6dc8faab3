#include "device_arena.h"

#include <string.h>
#include <sys/mman.h>

#include "check_shadow.h"
#include "placement.h"

namespace mslc {
namespace {

constexpr uint64_t kPage = 4096;

uint64_t pages(uint64_t bytes) {
  return (bytes + kPage - 1) & ~(kPage - 1);
}

// Tells if a parameter's type lets the kernel write: it has no `const` left of the first * or &.
bool is_writable(const mslc_parameter& parameter) {
  const char* end = strpbrk(parameter.type, "*&");
  const auto length = end ? static_cast<size_t>(end - parameter.type) : strlen(parameter.type);
  auto starts = [&](const char* word) {
    const char* found = strstr(parameter.type, word);
    return found && static_cast<size_t>(found - parameter.type) < length;
  };
  return !starts("const");  // also for `const device T*` and `constant T&`
}

bool may_write(const mslc_kernel& kernel, unsigned binding) {
  for (unsigned i = 0; i < kernel.parameter_count; ++i) {
    const mslc_parameter& parameter = kernel.parameters[i];
    if (parameter.kind == MSLC_PARAMETER_BUFFER && parameter.index == static_cast<int>(binding) &&
        is_writable(parameter))
      return true;
  }
  return false;
}

}  // namespace

DeviceArena::DeviceArena(const mslc_launch& request) {
  void* memory =
      mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    failure_ = "checks need 256 GB of address space (not of memory): is it limited by ulimit -v?";
    return;
  }
  base_ = reinterpret_cast<uintptr_t>(memory);
  group_overlapping(request);
  for (unsigned i = 0; i < kSlots && !failure_; ++i)
    if (slots_[i].size) copy_in(i);
}

DeviceArena::~DeviceArena() {
  for (Slot& slot : slots_)
    if (slot.shadow) free_shadow(slot.shadow, slot.size);
  if (base_) munmap(reinterpret_cast<void*>(base_), kSize);
}

void DeviceArena::group_overlapping(const mslc_launch& request) {
  unsigned slot_of[MSLC_MAX_BUFFERS];
  for (unsigned i = 0; i < request.buffer_count; ++i) {
    auto* data = static_cast<char*>(request.buffers[i].data);
    const uint64_t size = request.buffers[i].size;
    slot_of[i] = i;
    slots_[i].original = data;
    slots_[i].size = data ? size : 0;
    slots_[i].offset = request.buffers[i].offset;
    // Growing a slot can make it overlap another one, so start over after every merge.
    for (unsigned j = 0; j < i; ++j) {
      Slot &mine = slots_[slot_of[i]], &other = slots_[j];
      if (j == slot_of[i] || !mine.size || !other.size ||
          mine.original >= other.original + other.size ||
          other.original >= mine.original + mine.size)
        continue;
      const unsigned kept = j < slot_of[i] ? j : slot_of[i],
                     dropped = j < slot_of[i] ? slot_of[i] : j;
      const Slot& first = mine.original < other.original ? mine : other;
      char* low = first.original;
      const uint64_t offset = first.offset;
      char* mine_end = mine.original + mine.size;
      char* other_end = other.original + other.size;
      slots_[kept].original = low;
      slots_[kept].offset = offset;
      slots_[kept].size =
          static_cast<uint64_t>((mine_end > other_end ? mine_end : other_end) - low);
      slots_[dropped].size = 0;
      for (unsigned k = 0; k <= i; ++k)
        if (slot_of[k] == dropped) slot_of[k] = kept;
      j = ~0u;
    }
  }
  for (unsigned i = 0; i < kSlots; ++i) {
    // The alignment of the caller's memory must not matter, because a GPU's buffers start
    // elsewhere.
    const uint64_t first = barely_aligned(kSlotSize / 2, MSLC_BUFFER_ALIGNMENT);
    slots_[i].start = first + slots_[i].offset % kPage;
  }
  for (unsigned i = 0; i < request.buffer_count; ++i) {
    if (!request.buffers[i].data) continue;
    Slot& slot = slots_[slot_of[i]];
    const auto inside =
        static_cast<uint64_t>(static_cast<char*>(request.buffers[i].data) - slot.original);
    addresses_[i] = reinterpret_cast<void*>(base_ + slot_of[i] * kSlotSize + slot.start + inside);
    if (!slot.size || slot.shadow || !may_write(*request.kernel, i)) continue;
    slot.shadow = allocate_shadow(slot.size);
    if (!slot.shadow) failure_ = "not enough memory to record accesses";
  }
}

bool DeviceArena::copy_in(unsigned index) {
  Slot& slot = slots_[index];
  if (slot.size >= kSlotSize / 2 - kPage) {
    failure_ =
        "checks are limited to buffers of less than 4 GB (they record 24 bytes for each one "
        "written)";
    return false;
  }
  char* copy = reinterpret_cast<char*>(base_ + index * kSlotSize + slot.start);
  char* page = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(copy) & ~(kPage - 1));
  const uint64_t size = pages(static_cast<uint64_t>(copy - page) + slot.size);
  if (mprotect(page, size, PROT_READ | PROT_WRITE)) {
    failure_ = "not enough memory to copy the buffers";
    return false;
  }
  memcpy(copy, slot.original, slot.size);
  return true;
}

void DeviceArena::copy_back() {
  for (unsigned i = 0; i < kSlots; ++i) {
    const Slot& slot = slots_[i];
    if (slot.written)
      memcpy(slot.original, reinterpret_cast<void*>(base_ + i * kSlotSize + slot.start), slot.size);
  }
}

}  // namespace mslc
