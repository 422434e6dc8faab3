#include "vector_faults.h"

#if defined(__x86_64__)

#include <stdint.h>
#include <stdio.h>
#include <ucontext.h>

#include "signals.h"
#include "worker.h"

namespace mslc {
namespace {

constexpr uint64_t kRedZone = 128;

struct sigaction previous;

[[noreturn]] void stop(const void* instruction) {
  Worker& worker = *Worker::current();
  mslc_finding finding =
      worker.finding(MSLC_FINDING_MISALIGNED, nullptr, static_cast<const char*>(instruction) + 1);
  snprintf(finding.message, sizeof finding.message,
           "access to a vector that is not aligned as its type requires");
  worker.stop(finding);
}

// A misaligned operand is a general protection fault: one without an address.
bool is_ours(const siginfo_t& info, uint64_t instruction) {
  const Worker* worker = Worker::current();
  if (!worker || !worker->in_kernel() || info.si_code != SI_KERNEL || info.si_addr) return false;
  const Launch& launch = worker->launch();
  return launch.sink && instruction - launch.image_start < launch.image_size;
}

void handle(int signal, siginfo_t* info, void* context) {
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto instruction = static_cast<uint64_t>(registers[REG_RIP]);
  if (!is_ours(*info, instruction)) {
    pass_on(previous, signal, info, context);
    return;
  }
  // The thread goes on in stop(), as if the instruction had called it.
  const auto stack = static_cast<uint64_t>(registers[REG_RSP]);
  registers[REG_RSP] = static_cast<greg_t>(((stack - kRedZone) & ~uint64_t{15}) - 8);
  registers[REG_RDI] = static_cast<greg_t>(instruction);
  registers[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uintptr_t>(stop));
}

}  // namespace

void report_vector_faults() {
  install_handler(SIGSEGV, handle, previous);
}

}  // namespace mslc

#else

namespace mslc {
void report_vector_faults() {}  // arm64 does not fault
}  // namespace mslc

#endif
