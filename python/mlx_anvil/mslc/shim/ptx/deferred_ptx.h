// Function constants that get their values when the PTX is loaded.
//
// To the compiler, each is an external variable in constant memory: it can assume only that the
// value never changes. mslc then replaces the loads by moves of the bare name (ptx.py), and the
// loader replaces the name by 0 or 1. The assembler sees a literal, folds it and drops dead code,
// as Metal does when it specialises a pipeline.
#pragma once

#define MSLC_DEFERRED_CONSTANT(name, index)                                               \
  extern "C" const __attribute__((address_space(4))) uint mslc_function_constant_##index; \
  static constexpr struct {                                                               \
    MSLC_INLINE operator bool() const { return mslc_function_constant_##index != 0; }     \
  } name = {}
