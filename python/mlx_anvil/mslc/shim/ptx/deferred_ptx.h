// Function constants that get their values when the PTX is loaded.
//
// To the compiler each is a variable in constant memory that somebody else defines: it may assume
// nothing about the value, but that it never changes. mslc then replaces the loads by moves of the
// bare name (ptx.py), and the loader puts 0 or 1 in the name's place: the assembler sees a literal,
// folds it and drops what is not reached, as Metal does when it specialises a pipeline.
#pragma once

#define MSLC_DEFERRED_CONSTANT(name, index)                                               \
  extern "C" const __attribute__((address_space(4))) uint mslc_function_constant_##index; \
  static constexpr struct {                                                               \
    MSLC_INLINE operator bool() const { return mslc_function_constant_##index != 0; }     \
  } name = {}
