#include "faults.h"

#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include "access.h"
#include "image.h"
#include "signals.h"
#include "worker.h"

namespace mslc {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
constexpr size_t kCount = sizeof kSignals / sizeof *kSignals;

struct sigaction previous[kCount];

// ---- decoding a signal --------------------------------------------------------------------------

#if defined(__x86_64__)
constexpr uint64_t kWrites = 2;  // bit in a page fault's error code

void read(FaultState& fault, const ucontext_t& context) {
  const auto& registers = context.uc_mcontext.gregs;
  fault.instruction = static_cast<uintptr_t>(registers[REG_RIP]);
  fault.stack_pointer = static_cast<uintptr_t>(registers[REG_RSP]);
  fault.is_write = static_cast<uint64_t>(registers[REG_ERR]) & kWrites;
}

// Makes the thread continue in `function`, as if the instruction had called it, on the given stack.
bool go_on(ucontext_t& context, void (*function)(), uintptr_t top) {
  auto& registers = context.uc_mcontext.gregs;
  registers[REG_RSP] = static_cast<greg_t>((top & ~uintptr_t{15}) - 8);
  registers[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uintptr_t>(function));
  return true;
}
#elif defined(__aarch64__)
void read(FaultState& fault, const ucontext_t& context) {
  fault.instruction = context.uc_mcontext.pc;
  fault.stack_pointer = context.uc_mcontext.sp;
  fault.is_write = false;
}

bool go_on(ucontext_t& context, void (*function)(), uintptr_t top) {
  context.uc_mcontext.sp = top & ~uintptr_t{15};
  context.uc_mcontext.pc = reinterpret_cast<uintptr_t>(function);
  return true;
}
#else
void read(FaultState&, const ucontext_t&) {}
bool go_on(ucontext_t&, void (*)(), uintptr_t) {
  return false;
}
#endif

// ---- the finding --------------------------------------------------------------------------------

// Returns a return address that identifies the position in the kernel: the faulting instruction, or
// the call that led to it if the fault is in another library or a callback.
const void* place(const Worker& worker, const FaultState& fault) {
  const Image image = image_of(reinterpret_cast<uintptr_t>(worker.entry_address()));
  if (image.has_code(fault.instruction))
    return reinterpret_cast<const void*>(fault.instruction + 1);
  const Stack& stack = *worker.thread().stack;
  const auto base = reinterpret_cast<uintptr_t>(stack.base);
  uintptr_t at = stack.contains(fault.stack_pointer) ? fault.stack_pointer & ~uintptr_t{7} : base;
  for (; at + sizeof(uintptr_t) <= base + stack.size; at += sizeof(uintptr_t)) {
    uintptr_t word;
    memcpy(&word, reinterpret_cast<const void*>(at), sizeof word);
    if (image.has_code(word)) return reinterpret_cast<const void*>(word);
  }
  return nullptr;
}

mslc_finding finding_of(const Worker& worker, const FaultState& fault) {
  const void* pc = place(worker, fault);
  const Stack& stack = *worker.thread().stack;
  if (stack.guards(fault.address) || stack.guards(fault.stack_pointer))
    return worker.stack_overflow(pc);
  const char* verb = fault.is_write ? "write" : "read";
  mslc_finding finding = worker.finding(MSLC_FINDING_DEVICE_BOUNDS, nullptr, pc);
  char* text = finding.message;
  if (fault.signal == SIGILL || fault.signal == SIGTRAP) {
    finding.kind = MSLC_FINDING_TRAP;
    snprintf(text, sizeof finding.message,
             "the kernel reached an instruction that stops it: a trap, or code after what is "
             "undefined behaviour");
  } else if (fault.signal == SIGBUS || fault.code == SI_KERNEL) {
    // x86 reports a misaligned operand of a vector instruction as a fault without an address.
    finding.kind = MSLC_FINDING_MISALIGNED;
    snprintf(text, sizeof finding.message,
             "access to a vector that is not aligned as its type requires");
  } else if (fault.address < kFirstPage) {
    snprintf(text, sizeof finding.message, "%s through a null pointer (is every buffer bound?)",
             verb);
  } else {
    finding.offset = static_cast<long long>(fault.address);
    snprintf(text, sizeof finding.message,
             "%s at an unmapped address, outside every buffer and variable", verb);
  }
  return finding;
}

[[noreturn]] void stop() {
  Worker& worker = *Worker::current();
  worker.stop(finding_of(worker, worker.fault));
}

// ---- signals ------------------------------------------------------------------------------------

void handle(int signal, siginfo_t* info, void* context) {
  size_t which = 0;
  while (kSignals[which] != signal) ++which;
  Worker* worker = Worker::current();
  auto& interrupted = *static_cast<ucontext_t*>(context);
  const bool is_ours =
      worker && worker->in_kernel() && info->si_code > 0 && !worker->fault.handling;
  if (is_ours) {
    FaultState& fault = worker->fault;
    fault.signal = signal;
    fault.code = info->si_code;
    fault.address = reinterpret_cast<uintptr_t>(info->si_addr);
    read(fault, interrupted);
    fault.handling = true;
    if (go_on(interrupted, stop, reinterpret_cast<uintptr_t>(fault.stack + FaultState::kSize)))
      return;
  }
  pass_on(previous[which], signal, info, context);
}

}  // namespace

SignalStack::SignalStack(FaultState& state) {
  stack_t ours = {};
  ours.ss_sp = state.signal_stack;
  ours.ss_size = FaultState::kSize;
  installed_ = !sigaltstack(&ours, &previous_);
}

SignalStack::~SignalStack() {
  if (installed_) sigaltstack(&previous_, nullptr);
}

void survive_faults() {
  for (size_t i = 0; i < kCount; ++i) install_handler(kSignals[i], handle, previous[i]);
}

}  // namespace mslc
