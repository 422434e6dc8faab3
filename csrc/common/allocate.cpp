#include "common/allocate.h"

#include "mlx/backend/gpu/device_info.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace mlx_anvil {

namespace {

// Smaller blocks come out of MLX's cache or the heap, where their pages have been touched already.
[[maybe_unused]] constexpr size_t kHugePageThreshold = size_t{8} << 20;

void prefer_huge_pages([[maybe_unused]] void* start, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  if (bytes < kHugePageThreshold) {
    return;
  }
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + page - 1) & ~(page - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) & ~(page - 1);
  // Advice only: where the kernel has no huge pages, nothing changes.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

mx::allocator::Data allocate(size_t bytes, const mx::Device& device) {
  mx::allocator::Data data = mx::allocator::malloc(bytes);
  // With a GPU backend the memory may be managed by its driver, whose pages are not ours to advise
  // on.
  if (device == mx::Device::cpu && !mx::gpu::is_available()) {
    prefer_huge_pages(data.buffer().raw_ptr(), bytes);
  }
  return data;
}

}  // namespace mlx_anvil
