// Copies of the bound buffers, placed so far apart that an index out of one never reaches another.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

namespace mslc {

struct ShadowCell;

// Every buffer is in the middle of its own slot, so an address alone identifies the buffer that it
// was derived from. Buffers that overlap in the caller's memory share the slot of the first one.
class DeviceArena {
 public:
  struct Slot {
    char* original = nullptr;  // the caller's memory
    uint64_t offset = 0;       // offset of `original` in the allocated buffer
    uint64_t start = 0;        // offset of the copy in the slot
    uint64_t size = 0;
    ShadowCell* shadow = nullptr;  // for buffers that the kernel may write
    bool written = false;
  };
  struct Place {
    unsigned slot;
    int64_t offset;  // from the start of the buffer; may be out of bounds
  };

  explicit DeviceArena(const mslc_launch& request);
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  // Returns null, or the reason why the buffers cannot be copied.
  const char* failure() const { return failure_; }
  // Copies the buffers that the kernel wrote back to the caller.
  void copy_back();

  // Returns the address of a buffer for the kernel.
  void* address(unsigned binding) const { return addresses_[binding]; }
  bool contains(uintptr_t address) const { return address - base_ < kSize; }
  Place place(uintptr_t address) const {
    const uint64_t offset = address - base_;
    const auto slot = static_cast<unsigned>(offset >> kSlotBits);
    return {slot, static_cast<int64_t>(offset & (kSlotSize - 1)) -
                      static_cast<int64_t>(slots_[slot].start)};
  }
  Slot& slot(unsigned index) { return slots_[index]; }

 private:
  static constexpr unsigned kSlotBits = 33;
  static constexpr uint64_t kSlotSize = uint64_t{1} << kSlotBits;
  static constexpr uint64_t kSlots = 32;  // the number of bindings, rounded up
  static constexpr uint64_t kSize = kSlots * kSlotSize;

  void group_overlapping(const mslc_launch& request);
  bool copy_in(unsigned slot);

  uintptr_t base_ = 0;
  const char* failure_ = nullptr;
  Slot slots_[kSlots];
  void* addresses_[MSLC_MAX_BUFFERS] = {};
};

}  // namespace mslc
