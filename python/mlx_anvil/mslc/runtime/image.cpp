#include "image.h"

#include <link.h>

namespace mslc {
namespace {

struct Search {
  uintptr_t address;
  Image found;
};

int visit(dl_phdr_info* info, size_t, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  uintptr_t start = ~uintptr_t{0}, end = 0;
  Image image;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t low = info->dlpi_addr + segment.p_vaddr, high = low + segment.p_memsz;
    start = low < start ? low : start;
    end = high > end ? high : end;
    if (segment.p_flags & PF_X) {
      image.code_start = low;
      image.code_size = segment.p_memsz;
    }
  }
  if (search.address < start || search.address >= end) return 0;
  image.start = start;
  image.size = end - start;
  search.found = image;
  return 1;
}

}  // namespace

Image image_of(uintptr_t address) {
  Search search = {address, {}};
  dl_iterate_phdr(visit, &search);
  return search.found;
}

}  // namespace mslc
