// The callbacks that instrumented kernels call.
#include "access.h"

#include <stdio.h>
#include <string.h>

#include "compiler_checks.h"
#include "worker.h"

#define MSLC_CALLBACK extern "C" __attribute__((visibility("default")))

namespace mslc {
namespace {

const char* buffer_name(const Worker& worker, int kind, int index) {
  const mslc_kernel& kernel = *worker.launch().request->kernel;
  for (unsigned i = 0; i < kernel.parameter_count; ++i) {
    const mslc_parameter& parameter = kernel.parameters[i];
    if (parameter.kind == kind && parameter.index == index) return parameter.name;
  }
  return "?";
}

// Returns the name of threadgroup object `index`. The buffers passed at launch come first.
const char* object_name(const Worker& worker, int index) {
  const ThreadgroupMemory::Object* object = worker.memory().object(index);
  if (!object) return "?";
  return object->key ? object->key->name : buffer_name(worker, MSLC_PARAMETER_THREADGROUP, index);
}

// Formats a position like "byte 12 of buffer 'out'".
Description place_of(const Worker& worker, const Access& access) {
  uint64_t offset = access.offset;
  const char* memory = "buffer";
  const char* name = "?";
  if (access.buffer != Access::kThreadgroup) {
    name = buffer_name(worker, MSLC_PARAMETER_BUFFER, access.buffer);
  } else {
    memory = "threadgroup memory";
    int index = 0;
    while (worker.memory().object(index + 1) && worker.memory().object(index + 1)->offset <= offset)
      ++index;
    name = object_name(worker, index);
    offset -= worker.memory().object(index)->offset;
  }
  Description description;
  snprintf(description.text, sizeof description.text, "byte %llu of %s '%s'",
           static_cast<unsigned long long>(offset), memory, name);
  return description;
}

// ---- invalid accesses ---------------------------------------------------------------------------

const char* verb(AccessKind kind) {
  return is_write(kind) ? "write" : "read";
}

[[noreturn]] void stop_out_of_bounds(Worker& worker,
                                     int finding_kind,
                                     const Access& access,
                                     int64_t offset,
                                     uint64_t size,
                                     const char* memory,
                                     const char* name) {
  mslc_finding finding = access_finding(worker, finding_kind, access);
  finding.offset = offset;
  snprintf(finding.message, sizeof finding.message,
           "%s of %u bytes at byte %lld of %s '%s', which has %llu bytes", verb(access.kind),
           access.size, static_cast<long long>(offset), memory, name,
           static_cast<unsigned long long>(size));
  worker.stop(finding);
}

[[noreturn]] void stop_at_null(Worker& worker, const Access& access, const char* verb) {
  mslc_finding finding = access_finding(worker, MSLC_FINDING_DEVICE_BOUNDS, access);
  finding.buffer = -1;
  finding.offset = 0;
  snprintf(finding.message, sizeof finding.message,
           "%s through a null pointer (is every buffer bound?)", verb);
  worker.stop(finding);
}

[[noreturn]] void stop_outside_everything(Worker& worker, const Access& access, uintptr_t address) {
  if (address < kFirstPage) stop_at_null(worker, access, verb(access.kind));
  mslc_finding finding = access_finding(worker, MSLC_FINDING_DEVICE_BOUNDS, access);
  finding.buffer = -1;
  finding.offset = static_cast<long long>(address);
  snprintf(finding.message, sizeof finding.message,
           "%s of %u bytes far outside every buffer and variable", verb(access.kind), access.size);
  worker.stop(finding);
}

[[noreturn]] void stop_misaligned(Worker& worker, const Access& access) {
  mslc_finding finding = access_finding(worker, MSLC_FINDING_MISALIGNED, access);
  snprintf(finding.message, sizeof finding.message, "%s of %s, which is not aligned to %u bytes",
           verb(access.kind), describe(worker, access).text, access.size);
  worker.stop(finding);
}

// Reports an address that violates a type's alignment. `where` describes the address.
[[noreturn]] void stop_misaligned(Worker& worker,
                                  const TypeMismatch& use,
                                  const Access& access,
                                  const char* where) {
  constexpr const char* kUses[] = {"read", "write"};
  mslc_finding finding = access_finding(worker, MSLC_FINDING_MISALIGNED, access);
  snprintf(finding.message, sizeof finding.message,
           "%s of type %.100s at %s, which is not aligned to %u bytes",
           use.use < 2 ? kUses[use.use] : "use", use.type->name, where, access.size);
  worker.stop(finding);
}

// ---- classification -----------------------------------------------------------------------------

// Tells if an address belongs to the thread's own variables.
bool is_on_stack(const Worker& worker, uintptr_t address) {
  return worker.thread().stack->contains(address);
}

// Tells if an address belongs to the thread's descriptor or to constants of the compiled library.
bool is_of_simulator(const Worker& worker, uintptr_t address) {
  return address - reinterpret_cast<uintptr_t>(&worker) < sizeof(Worker) ||
         worker.launch().image.contains(address);
}

bool fits(int64_t offset, uint64_t size, uint64_t limit) {
  return offset >= 0 && static_cast<uint64_t>(offset) + size <= limit;
}

// Stops the launch if `pointer` is inside the kernel's memory. For a pointer outside of it, the
// check of the access that follows reports more.
void check_alignment(const TypeMismatch& use, const void* pointer, const void* pc) {
  Worker* const running = Worker::current();
  if (!running || !running->in_kernel()) return;
  Worker& worker = *running;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const uint32_t alignment = 1u << use.log_alignment;
  Access access = {0, pc, alignment, Access::kThreadgroup, AccessKind::kRead, pointer};
  if (address < kFirstPage) {
    // Unused references may be null, for example a parameter that a function constant disables.
    if (use.use < 2) stop_at_null(worker, access, use.use ? "write" : "read");
    return;
  }
  Description where;
  if (is_on_stack(worker, address)) {
    stop_misaligned(worker, use, access, "a variable of the thread");
  } else if (worker.memory().contains(address)) {
    const ThreadgroupMemory::Place place = worker.memory().place(address);
    const ThreadgroupMemory::Object* object = worker.memory().object(place.object);
    if (!object || !fits(place.offset, 1, object->size)) return;
    access.offset = object->offset + static_cast<uint64_t>(place.offset);
    where = place_of(worker, access);
  } else if (worker.launch().arena->contains(address)) {
    const DeviceArena::Place place = worker.launch().arena->place(address);
    if (!fits(place.offset, 1, worker.launch().arena->slot(place.slot).size)) return;
    access.buffer = static_cast<int16_t>(place.slot);
    access.offset = static_cast<uint64_t>(place.offset);
    where = place_of(worker, access);
  } else {
    if (is_of_simulator(worker, address)) stop_misaligned(worker, use, access, "a constant");
    return;
  }
  stop_misaligned(worker, use, access, where.text);
}

// `alignment` is what the type of the access requires.
__attribute__((always_inline)) inline void handle(
    const volatile void* pointer, size_t size, size_t alignment, AccessKind kind, const void* pc) {
  Worker* const running = Worker::current();
  if (!running || !running->in_kernel()) return;
  Worker& worker = *running;
  const Launch& launch = worker.launch();
  if (!launch.sink || !size) return;
  worker.step(pc);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (is_on_stack(worker, address)) return;
  Access access = {0, pc, static_cast<uint32_t>(size), Access::kThreadgroup, kind, pointer};
  if (worker.memory().contains(address)) {
    const ThreadgroupMemory::Place place = worker.memory().place(address);
    const ThreadgroupMemory::Object* object = worker.memory().object(place.object);
    if (__builtin_expect(!object || !fits(place.offset, size, object->size), 0))
      stop_out_of_bounds(worker, MSLC_FINDING_THREADGROUP_BOUNDS, access, place.offset,
                         object ? object->size : 0, "threadgroup memory",
                         object_name(worker, place.object));
    access.offset = object->offset + static_cast<uint64_t>(place.offset);
  } else if (launch.arena->contains(address)) {
    const DeviceArena::Place place = launch.arena->place(address);
    DeviceArena::Slot& slot = launch.arena->slot(place.slot);
    access.buffer = static_cast<int16_t>(place.slot);
    if (__builtin_expect(!fits(place.offset, size, slot.size), 0))
      stop_out_of_bounds(worker, MSLC_FINDING_DEVICE_BOUNDS, access, place.offset, slot.size,
                         "buffer", buffer_name(worker, MSLC_PARAMETER_BUFFER, access.buffer));
    access.offset = static_cast<uint64_t>(place.offset);
    if (is_write(kind) && !__atomic_load_n(&slot.written, __ATOMIC_RELAXED))
      __atomic_store_n(&slot.written, true, __ATOMIC_RELAXED);
  } else {
    if (__builtin_expect(!is_of_simulator(worker, address), 0))
      stop_outside_everything(worker, access, address);
    return;
  }
  if (__builtin_expect((address & (alignment - 1)) != 0, 0)) stop_misaligned(worker, access);
  launch.sink(worker, access);
}

}  // namespace

mslc_finding access_finding(const Worker& worker, int kind, const Access& access) {
  mslc_finding finding = worker.finding(kind, nullptr, access.pc);
  finding.buffer = access.buffer;
  finding.offset = static_cast<long long>(access.offset);
  finding.size = access.size;
  return finding;
}

Description describe(const Worker& worker, const Access& access) {
  Description description;
  snprintf(description.text, sizeof description.text, "%u bytes at %s", access.size,
           place_of(worker, access).text);
  return description;
}

}  // namespace mslc

using mslc::AccessKind;
using mslc::handle;

// Called before the use of a pointer that is misaligned for its type.
MSLC_CALLBACK void __ubsan_handle_type_mismatch_v1(const mslc::TypeMismatch* use,
                                                   const void* pointer) {
  mslc::check_alignment(*use, pointer, __builtin_return_address(0));
}

// ---- plain accesses -----------------------------------------------------------------------------

MSLC_CALLBACK void __tsan_init() {}
MSLC_CALLBACK void __tsan_func_entry(void*) {}
MSLC_CALLBACK void __tsan_func_exit() {}

// These callbacks imply natural alignment. For accesses that it knows to be less aligned, the
// compiler calls the unaligned variants.
#define MSLC_ACCESS(size)                                                         \
  MSLC_CALLBACK void __tsan_read##size(void* address) {                           \
    handle(address, size, size, AccessKind::kRead, __builtin_return_address(0));  \
  }                                                                               \
  MSLC_CALLBACK void __tsan_write##size(void* address) {                          \
    handle(address, size, size, AccessKind::kWrite, __builtin_return_address(0)); \
  }                                                                               \
  MSLC_CALLBACK void __tsan_unaligned_read##size(void* address) {                 \
    handle(address, size, 1, AccessKind::kRead, __builtin_return_address(0));     \
  }                                                                               \
  MSLC_CALLBACK void __tsan_unaligned_write##size(void* address) {                \
    handle(address, size, 1, AccessKind::kWrite, __builtin_return_address(0));    \
  }
MSLC_ACCESS(1)
MSLC_ACCESS(2)
MSLC_ACCESS(4)
MSLC_ACCESS(8)
MSLC_ACCESS(16)
#undef MSLC_ACCESS

MSLC_CALLBACK void* __tsan_memcpy(void* to, const void* from, size_t size) {
  handle(from, size, 1, AccessKind::kRead, __builtin_return_address(0));
  handle(to, size, 1, AccessKind::kWrite, __builtin_return_address(0));
  return memcpy(to, from, size);
}
MSLC_CALLBACK void* __tsan_memmove(void* to, const void* from, size_t size) {
  handle(from, size, 1, AccessKind::kRead, __builtin_return_address(0));
  handle(to, size, 1, AccessKind::kWrite, __builtin_return_address(0));
  return memmove(to, from, size);
}
MSLC_CALLBACK void* __tsan_memset(void* to, int value, size_t size) {
  handle(to, size, 1, AccessKind::kWrite, __builtin_return_address(0));
  return memset(to, value, size);
}

// ---- atomics: the callback performs the operation too -------------------------------------------

// Metal's atomics are relaxed, so `order` is ignored.
#define MSLC_ATOMIC_OPERATION(bits, operation)                                                 \
  MSLC_CALLBACK uint##bits##_t __tsan_atomic##bits##_fetch_##operation(                        \
      volatile uint##bits##_t* object, uint##bits##_t value, int) {                            \
    handle(object, bits / 8, bits / 8, AccessKind::kAtomicWrite, __builtin_return_address(0)); \
    return __atomic_fetch_##operation(object, value, __ATOMIC_RELAXED);                        \
  }
#define MSLC_ATOMIC(bits)                                                                         \
  MSLC_CALLBACK uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* object,  \
                                                          int) {                                  \
    handle(object, bits / 8, bits / 8, AccessKind::kAtomicRead, __builtin_return_address(0));     \
    return __atomic_load_n(object, __ATOMIC_RELAXED);                                             \
  }                                                                                               \
  MSLC_CALLBACK void __tsan_atomic##bits##_store(volatile uint##bits##_t* object,                 \
                                                 uint##bits##_t value, int) {                     \
    handle(object, bits / 8, bits / 8, AccessKind::kAtomicWrite, __builtin_return_address(0));    \
    __atomic_store_n(object, value, __ATOMIC_RELAXED);                                            \
  }                                                                                               \
  MSLC_CALLBACK uint##bits##_t __tsan_atomic##bits##_exchange(volatile uint##bits##_t* object,    \
                                                              uint##bits##_t value, int) {        \
    handle(object, bits / 8, bits / 8, AccessKind::kAtomicWrite, __builtin_return_address(0));    \
    return __atomic_exchange_n(object, value, __ATOMIC_RELAXED);                                  \
  }                                                                                               \
  MSLC_CALLBACK uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(                        \
      volatile uint##bits##_t* object, uint##bits##_t expected, uint##bits##_t value, int, int) { \
    handle(object, bits / 8, bits / 8, AccessKind::kAtomicWrite, __builtin_return_address(0));    \
    __atomic_compare_exchange_n(object, &expected, value, false, __ATOMIC_RELAXED,                \
                                __ATOMIC_RELAXED);                                                \
    return expected;                                                                              \
  }                                                                                               \
  MSLC_ATOMIC_OPERATION(bits, add)                                                                \
  MSLC_ATOMIC_OPERATION(bits, sub)                                                                \
  MSLC_ATOMIC_OPERATION(bits, and)                                                                \
  MSLC_ATOMIC_OPERATION(bits, or)                                                                 \
  MSLC_ATOMIC_OPERATION(bits, xor)
MSLC_ATOMIC(32)
MSLC_ATOMIC(64)
#undef MSLC_ATOMIC
#undef MSLC_ATOMIC_OPERATION

MSLC_CALLBACK void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
MSLC_CALLBACK void __tsan_atomic_signal_fence(int) {}
