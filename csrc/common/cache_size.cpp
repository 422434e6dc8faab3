#include "common/cache_size.h"

#include <algorithm>
#include <fstream>
#include <string>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace mlx_anvil {

namespace {

// A server's shared cache is larger, but a few threads gain nothing from the excess: most of it is
// far from their cores, and other cores fill it.
constexpr int64_t kMaxBytes = int64_t{32} << 20;

#if defined(__APPLE__)

int64_t read_size() {
  int64_t bytes = 0;
  size_t length = sizeof(bytes);
  return sysctlbyname("hw.perflevel0.l2cachesize", &bytes, &length, nullptr, 0) == 0 ? bytes : 0;
}

#else

// sysconf() is unsuitable: glibc returns the sum over a package, ten times what one core of a large
// AMD processor can use.
int64_t read_size() {
  for (int index = 4; index >= 2; --index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    int64_t size = 0;
    char unit = 0;
    if (file >> size) {
      file >> unit;
      return size * (unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : 1);
    }
  }
  return 0;
}

#endif

}  // namespace

int64_t last_level_cache_bytes() {
  static const int64_t bytes = [] {
    const int64_t reported = read_size();
    return reported > 0 ? std::min(reported, kMaxBytes) : kMaxBytes;
  }();
  return bytes;
}

bool streams_outputs(int64_t bytes) {
  return bytes >= last_level_cache_bytes() / 4;
}

}  // namespace mlx_anvil
