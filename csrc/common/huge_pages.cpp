#include "common/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "mlx/backend/gpu/device_info.h"
#endif

namespace mlx_anvil {

#if defined(__linux__)

namespace {

#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; headers may be older
#endif

struct Range {
  uintptr_t begin, end;
};

// Bytes of a huge page; 0 if there are none.
uintptr_t huge_page() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  uintptr_t bytes = 0;
  return file >> bytes ? bytes : 0;
}

bool collapse(Range range) {
  return madvise(reinterpret_cast<void*>(range.begin), range.end - range.begin, MADV_COLLAPSE) == 0;
}

// Sorts ranges and joins those that meet.
std::vector<Range> merged(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> all;
  for (const Range& range : ranges) {
    if (!all.empty() && range.begin <= all.back().end) {
      all.back().end = std::max(all.back().end, range.end);
    } else {
      all.push_back(range);
    }
  }
  return all;
}

// Collapses a range, or what of it can be: memory beside the arrays may be unmapped, or of another
// kind. Appends what was collapsed.
void collapse_range(Range range, uintptr_t page, std::vector<Range>& collapsed) {
  if (collapse(range)) {
    collapsed.push_back(range);
    return;
  }
  for (uintptr_t at = range.begin; at < range.end; at += page) {
    if (collapse({at, at + page})) {
      collapsed.push_back({at, at + page});
    }
  }
}

int64_t overlap(const std::vector<Range>& a, const std::vector<Range>& b) {
  int64_t bytes = 0;
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    const uintptr_t begin = std::max(i->begin, j->begin), end = std::min(i->end, j->end);
    bytes += end > begin ? static_cast<int64_t>(end - begin) : 0;
    i->end < j->end ? ++i : ++j;
  }
  return bytes;
}

}  // namespace

int64_t use_huge_pages(const std::vector<mlx::core::array>& arrays) {
  const uintptr_t page = huge_page();
  if (page == 0 ||
      mlx::core::gpu::is_available()) {  // MLX's GPU backends allocate in their own way
    return 0;
  }
  // Arrays of a model are often neighbours, and most are no whole number of huge pages.
  std::vector<Range> memory, pages;
  for (const mlx::core::array& x : arrays) {
    if (x.size() > 0) {
      const auto begin = reinterpret_cast<uintptr_t>(x.data<char>());
      const uintptr_t end = begin + x.data_size() * x.itemsize();
      memory.push_back({begin, end});
      pages.push_back({begin / page * page, (end + page - 1) / page * page});
    }
  }
  std::vector<Range> collapsed;
  for (const Range& range : merged(std::move(pages))) {
    collapse_range(range, page, collapsed);
  }
  return overlap(merged(std::move(memory)), collapsed);
}

#else

int64_t use_huge_pages(const std::vector<mlx::core::array>&) {
  return 0;
}

#endif

}  // namespace mlx_anvil
