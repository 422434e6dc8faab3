// Memory accesses of kernels compiled with -fsanitize=thread. Checks and profiles share the
// callbacks. A callback finds the memory behind an address, stops the launch if the access is out
// of bounds or misaligned, and otherwise passes it to the launch's sink. -fsanitize=alignment
// reports addresses that violate a type's alignment beforehand.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

namespace mslc {

class Worker;

constexpr uintptr_t kFirstPage = 4096;  // smaller addresses are null plus an offset

enum class AccessKind : uint8_t { kRead, kWrite, kAtomicRead, kAtomicWrite };

constexpr bool is_write(AccessKind kind) {
  return kind == AccessKind::kWrite || kind == AccessKind::kAtomicWrite;
}
constexpr bool is_atomic(AccessKind kind) {
  return kind >= AccessKind::kAtomicRead;
}

// An access of the running thread (Worker::thread) to device or threadgroup memory, within bounds.
// Accesses to a thread's own variables are not reported.
struct Access {
  static constexpr int kThreadgroup = -1;

  uint64_t offset;  // from the start of the buffer, or of the threadgroup's memory without gaps
  const void* pc;   // return address in the kernel, which identifies the position in the code
  uint32_t size;    // bytes
  int16_t buffer;   // binding index (the lowest of overlapping bindings), or kThreadgroup
  AccessKind kind;
  const volatile void* address;  // in the simulator's copy, which still has the old contents
};

// Called before every access, on the thread's fiber.
using AccessSink = void (*)(Worker& worker, const Access& access);

// Returns a finding about an access, without a message.
mslc_finding access_finding(const Worker& worker, int kind, const Access& access);

struct Description {
  char text[120];
};
// Formats an access like "4 bytes at byte 12 of buffer 'out'".
Description describe(const Worker& worker, const Access& access);

}  // namespace mslc
