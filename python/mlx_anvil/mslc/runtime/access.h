// Memory accesses of kernels that were compiled with -fsanitize=thread. One set of callbacks serves
// checks and profiles: it finds out what an access touches, stops the launch at one that lies
// outside everything or is misaligned, and hands all others to the launch's sink.
// -fsanitize=alignment tells beforehand which addresses a type does not allow.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

namespace mslc {

class Worker;

constexpr uintptr_t kFirstPage = 4096;  // addresses below it are null, or null and an offset

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

  uint64_t offset;  // into the buffer, or into the threadgroup's memory without gaps
  const void* pc;   // return address in the kernel: one place in the compiled code
  uint32_t size;    // bytes
  int16_t buffer;   // binding index, or kThreadgroup. Overlapping bindings count as the lowest one.
  AccessKind kind;
  const volatile void* address;  // in the simulator's copy, which still has the old contents
};

// Called for every access, before it happens, on the fiber of the thread.
using AccessSink = void (*)(Worker& worker, const Access& access);

// A finding about an access, to be completed.
mslc_finding access_finding(const Worker& worker, int kind, const Access& access);

struct Description {
  char text[120];
};
// "4 bytes at byte 12 of buffer 'out'"
Description describe(const Worker& worker, const Access& access);

}  // namespace mslc
