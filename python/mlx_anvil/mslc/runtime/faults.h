// Turns signals raised by a kernel's instructions into findings, so that the process survives.
#pragma once

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

namespace mslc {

// The state a worker needs to leave a failed kernel, whose stack may be full.
struct FaultState {
  static constexpr size_t kSize = 64 * 1024;

  bool handling = false;  // a second fault would be in the runtime itself
  int signal = 0, code = 0;
  bool is_write = false;
  uintptr_t address = 0, instruction = 0, stack_pointer = 0;
  char signal_stack[kSize];
  char stack[kSize];  // stack for reporting the finding
};

// Gives the calling thread a signal stack for the lifetime of this object.
class SignalStack {
 public:
  explicit SignalStack(FaultState& state);
  ~SignalStack();
  SignalStack(const SignalStack&) = delete;
  SignalStack& operator=(const SignalStack&) = delete;

 private:
  stack_t previous_ = {};
  bool installed_;
};

// Installs the handlers for all threads that run kernels.
void survive_faults();

}  // namespace mslc
