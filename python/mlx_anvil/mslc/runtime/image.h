// Finds the loaded file that contains an address.
#pragma once

#include <stdint.h>

namespace mslc {

struct Image {
  uintptr_t start = 0, size = 0;
  uintptr_t code_start = 0, code_size = 0;  // the part with instructions

  bool contains(uintptr_t address) const { return address - start < size; }
  bool has_code(uintptr_t address) const { return address - code_start < code_size; }
};

Image image_of(uintptr_t address);

}  // namespace mslc
