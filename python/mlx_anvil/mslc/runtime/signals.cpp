#include "signals.h"

#include <pthread.h>

namespace mslc {
namespace {

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

}  // namespace

void install_handler(int signal, SignalHandler handler, struct sigaction& previous) {
  pthread_mutex_lock(&mutex);
  struct sigaction now = {};
  sigaction(signal, nullptr, &now);
  if (now.sa_sigaction != handler) {
    previous = now;
    struct sigaction ours = {};
    ours.sa_sigaction = handler;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(signal, &ours, nullptr);
  }
  pthread_mutex_unlock(&mutex);
}

void pass_on(const struct sigaction& previous, int signal, siginfo_t* info, void* context) {
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    ::signal(signal, SIG_DFL);              // the instruction runs again and ends the process
    if (info->si_code <= 0) raise(signal);  // another process sent it
  } else {
    previous.sa_handler(signal);
  }
}

}  // namespace mslc
