#include "check_shadow.h"

#include <string.h>
#include <sys/mman.h>

namespace mslc {
namespace {

size_t shadow_size(size_t bytes) {
  return (bytes / kBytesPerCell + 1) * sizeof(ShadowCell);
}

}  // namespace

ShadowCell* allocate_shadow(size_t bytes) {
  void* memory = mmap(nullptr, shadow_size(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  madvise(memory, shadow_size(bytes), MADV_HUGEPAGE);  // most of it is touched only once
#endif
  return static_cast<ShadowCell*>(memory);
}

void clear_shadow(ShadowCell* cells, size_t bytes) {
  memset(cells, 0, shadow_size(bytes));
}

void free_shadow(ShadowCell* cells, size_t bytes) {
  munmap(cells, shadow_size(bytes));
}

}  // namespace mslc
