#include "division.h"

#if defined(__x86_64__)

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <ucontext.h>

#include "worker.h"

namespace mslc {
namespace {

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
struct sigaction previous;

// The length of the div or idiv instruction at `code`, and 0 if there is another one.
unsigned division_length(const uint8_t* code) {
  const uint8_t* at = code;
  if (*at == 0x66) ++at;           // operands of 16 bits
  if ((*at & 0xF0) == 0x40) ++at;  // REX
  if (*at != 0xF6 && *at != 0xF7) return 0;
  const uint8_t modrm = *++at;
  const unsigned mode = modrm >> 6, operation = modrm >> 3 & 7, base = modrm & 7;
  if (operation < 6) return 0;
  ++at;
  bool no_base = base == 5;
  if (mode != 3 && base == 4) no_base = (*at++ & 7) == 5;  // an address with an index
  if (mode == 1) at += 1;
  if (mode == 2 || (mode == 0 && no_base)) at += 4;
  return static_cast<unsigned>(at - code);
}

void handle(int signal, siginfo_t* info, void* context) {
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const unsigned length =
      Worker::current() ? division_length(reinterpret_cast<uint8_t*>(registers[REG_RIP])) : 0;
  if (length) {
    registers[REG_RAX] = registers[REG_RDX] = -1;  // quotient and remainder
    registers[REG_RIP] += length;
  } else if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    ::signal(signal, SIG_DFL);  // the instruction is executed again, and ends the process
  } else {
    previous.sa_handler(signal);
  }
}

}  // namespace

void survive_division() {
  pthread_mutex_lock(&mutex);
  struct sigaction now = {};
  sigaction(SIGFPE, nullptr, &now);
  if (now.sa_sigaction != handle) {
    previous = now;
    struct sigaction ours = {};
    ours.sa_sigaction = handle;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGFPE, &ours, nullptr);
  }
  pthread_mutex_unlock(&mutex);
}

}  // namespace mslc

#else

namespace mslc {
void survive_division() {}  // arm64 gives 0
}  // namespace mslc

#endif
