// Handles signals raised by a kernel's instructions, in a process that may have other handlers.
#pragma once

#include <signal.h>

namespace mslc {

using SignalHandler = void (*)(int signal, siginfo_t* info, void* context);

// Installs `handler` unless it is already installed, and stores the former handler in `previous`.
void install_handler(int signal, SignalHandler handler, struct sigaction& previous);
// Forwards signals that no kernel raised.
void pass_on(const struct sigaction& previous, int signal, siginfo_t* info, void* context);

}  // namespace mslc
