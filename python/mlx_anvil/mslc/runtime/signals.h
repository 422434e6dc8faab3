// Signals that an instruction of a kernel raised, in a process that may have handlers of its own.
#pragma once

#include <signal.h>

namespace mslc {

using SignalHandler = void (*)(int signal, siginfo_t* info, void* context);

// Installs `handler` unless it is there, and keeps in `previous` what was there before.
void install_handler(int signal, SignalHandler handler, struct sigaction& previous);
// For signals that are none of ours.
void pass_on(const struct sigaction& previous, int signal, siginfo_t* info, void* context);

}  // namespace mslc
