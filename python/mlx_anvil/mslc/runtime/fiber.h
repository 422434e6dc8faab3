// Fibers: a minimal context switch that lets one host thread run all threads of a threadgroup.
#pragma once

#include <stddef.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define MSLC_FIBER_UCONTEXT 1
#endif
#ifdef MSLC_FIBER_UCONTEXT
#include <ucontext.h>
#endif

namespace mslc {

// A saved context: the stack pointer, or a ucontext on processors without assembly here.
struct Context {
#ifdef MSLC_FIBER_UCONTEXT
  ucontext_t ucontext;
#else
  void* stack_pointer = nullptr;
#endif
};

// Prepares `context` to run `function` on the stack [base, base + size) after the first switch to
// it.
void prepare_fiber(Context& context, char* base, size_t size, void (*function)());

// Saves the running context in `from` and continues `to`.
void switch_fiber(Context& from, Context& to);

}  // namespace mslc
