// Shadow memory of the checks: the last write and two reads for every two bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mslc {

// Two bytes per cell, because neighbouring half or bfloat elements usually belong to different
// threads. Of single-byte accesses to both halves of a cell, only the latest is kept.
constexpr unsigned kBytesPerCell = 2;

struct ShadowEntry {
  uint32_t stamp;  // SyncClock::now of the access, or 0 before the first one
  int32_t pc;      // relative to the kernel's entry
  uint32_t threadgroup;
  uint16_t thread;
  uint8_t bytes;  // bit set of the bytes in the cell
  uint8_t atomic : 1;
  uint8_t initialised
      : 2;  // in a write: bytes of the cell that this threadgroup has written so far
};

// Two reads find every conflict with a later write: the latest one, and the one furthest from it
// (another lane, SIMD group or threadgroup). The writer differs from at least one of them.
struct ShadowCell {
  ShadowEntry write;
  ShadowEntry reads[2];
};

// Returns zeroed cells for `bytes` of memory, or null on failure. The system commits only the pages
// that are used.
ShadowCell* allocate_shadow(size_t bytes);
void clear_shadow(ShadowCell* cells, size_t bytes);
void free_shadow(ShadowCell* cells, size_t bytes);

}  // namespace mslc
