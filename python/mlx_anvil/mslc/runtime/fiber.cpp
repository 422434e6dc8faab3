#include "fiber.h"

#ifdef MSLC_FIBER_UCONTEXT

namespace mslc {

void prepare_fiber(Context& context, char* base, size_t size, void (*function)()) {
  getcontext(&context.ucontext);
  context.ucontext.uc_stack.ss_sp = base;
  context.ucontext.uc_stack.ss_size = size;
  context.ucontext.uc_link = nullptr;
  makecontext(&context.ucontext, function, 0);
}

void switch_fiber(Context& from, Context& to) {
  swapcontext(&from.ucontext, &to.ucontext);
}

}  // namespace mslc

#else

// mslc_switch_stack(void** save, void* to) pushes the callee-saved registers, stores the stack
// pointer in *save, loads `to` as the stack pointer and pops the registers again. Kernels do not
// change the floating-point control registers, so it does not switch those.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl mslc_switch_stack
.hidden mslc_switch_stack
.type mslc_switch_stack,@function
mslc_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mslc_switch_stack, .-mslc_switch_stack
)");
#else
asm(R"(
.text
.p2align 4
.globl mslc_switch_stack
.hidden mslc_switch_stack
.type mslc_switch_stack,@function
mslc_switch_stack:
  stp x19, x20, [sp, #-160]!
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x19, x20, [sp], #160
  ret
.size mslc_switch_stack, .-mslc_switch_stack
)");
#endif

extern "C" void mslc_switch_stack(void** save, void* to);

namespace mslc {

void prepare_fiber(Context& context, char* base, size_t size, void (*function)()) {
  // Build the frame that mslc_switch_stack pops: zeroed registers and `function` as return address.
  void** top = reinterpret_cast<void**>((reinterpret_cast<size_t>(base) + size) & ~size_t{63});
#if defined(__x86_64__)
  *--top = nullptr;  // a function starts with the stack 8 bytes off a multiple of 16
  *--top = reinterpret_cast<void*>(function);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = nullptr;
  top[11] = reinterpret_cast<void*>(function);  // x30
#endif
  context.stack_pointer = top;
}

void switch_fiber(Context& from, Context& to) {
  mslc_switch_stack(&from.stack_pointer, to.stack_pointer);
}

}  // namespace mslc

#endif
