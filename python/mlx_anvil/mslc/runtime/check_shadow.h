// What the checks remember about memory: for every two bytes the last write and two reads.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mslc {

// Two bytes, because neighbouring half or bfloat elements usually belong to different threads. Of
// single-byte accesses to the two halves of a cell only the latest is remembered.
constexpr unsigned kBytesPerCell = 2;

struct ShadowEntry {
  uint32_t stamp;  // SyncClock::now of the access; 0: none yet
  int32_t pc;      // from the kernel's entry
  uint32_t threadgroup;
  uint16_t thread;
  uint8_t bytes;  // of the cell, as bits
  uint8_t atomic : 1;
  uint8_t initialised
      : 2;  // in a write: bytes of the cell that this threadgroup has written so far
};

// Two reads suffice to find every conflict with a later write: the latest read, and the one
// furthest from it (another lane, another SIMD group, another threadgroup). Whoever writes differs
// from one of them in that respect.
struct ShadowCell {
  ShadowEntry write;
  ShadowEntry reads[2];
};

// Zeroed cells for `bytes` of memory; they take memory only where they are used. Null on failure.
ShadowCell* allocate_shadow(size_t bytes);
void clear_shadow(ShadowCell* cells, size_t bytes);
void free_shadow(ShadowCell* cells, size_t bytes);

}  // namespace mslc
