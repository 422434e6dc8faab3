// Signals that instructions of a kernel raise: findings, after which the process goes on.
#pragma once

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

namespace mslc {

// What a worker needs to leave a kernel that has failed, perhaps because its stack is full.
struct FaultState {
  static constexpr size_t kSize = 64 * 1024;

  bool handling = false;  // a second fault would be the runtime's own
  int signal = 0, code = 0;
  bool is_write = false;
  uintptr_t address = 0, instruction = 0, stack_pointer = 0;
  char signal_stack[kSize];
  char stack[kSize];  // on which the finding is written
};

// Gives the calling thread a stack for signals, as long as this lives.
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

// On all threads that run kernels, from now on.
void survive_faults();

}  // namespace mslc
