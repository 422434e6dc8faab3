// Entry points. For every instantiated kernel the rewriter writes
//   Entry<Parameter...>::run(kernel, thread)
// with one of the types below for each parameter of the kernel.
#pragma once

#include "utility.h"

#if defined(__NVPTX__)
#include "ptx/entry_ptx.h"
#else
#include "cpu/entry_cpu.h"
#endif
