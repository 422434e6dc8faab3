// Arguments of the functions that clang's checks call. The layouts match those of its
// undefined-behaviour runtime.
#pragma once

#include <stdint.h>

namespace mslc {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind;
  uint16_t info;  // for integers, bit 0 is the sign and the other bits are log2 of the width
  char name[1];
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};
struct Overflow {
  SourceLocation location;
  const TypeDescriptor* type;
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  uint8_t log_alignment;
  uint8_t use;  // 0 load, 1 store, 2 binding of a reference, 3 member access, 4 member call ...
};

}  // namespace mslc
