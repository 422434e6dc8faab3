#include "common/freed_memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <string>

#include "common/without_gil.h"
#include "mlx/backend/gpu/device_info.h"
#include "mlx/memory.h"

namespace mlx_anvil {

namespace {

// Smaller outputs come from MLX's 32 MB cache or from the heap, which keeps their pages.
constexpr size_t kLarge = size_t{4} << 20;
constexpr size_t kDefaultCacheLimit = size_t{32} << 20;
constexpr int64_t kReserve = int64_t{512} << 20;
constexpr auto kCheckInterval = std::chrono::milliseconds(50);

const pid_t loaded_by = getpid();

#if defined(__linux__)

// Reads the number after `key` in a file of "key number" lines.
std::optional<int64_t> read_field(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    int64_t value = 0;
    if (word == key && file >> value) {
      return value;
    }
    file.clear();
    file.ignore(1 << 16, '\n');
  }
  return std::nullopt;
}

std::optional<int64_t> read_number(const char* path) {
  std::ifstream file(path);
  int64_t value = 0;  // the file says "max" if the container has no limit
  return file >> value ? std::optional(value) : std::nullopt;
}

// Memory left within the container's limit. The kernel drops inactive file pages when needed.
std::optional<int64_t> available_in_container() {
  const auto limit = read_number("/sys/fs/cgroup/memory.max");
  const auto used = read_number("/sys/fs/cgroup/memory.current");
  if (!limit || !used) {
    return std::nullopt;
  }
  const auto files = read_field("/sys/fs/cgroup/memory.stat", "inactive_file");
  return *limit - *used + files.value_or(0);
}

#endif

void raise_cache_limit() {
  const size_t raised = std::max(kDefaultCacheLimit, mx::get_memory_limit() / 4);
  const size_t before = mx::set_cache_limit(raised);
  if (before != kDefaultCacheLimit) {  // set by the program, so restore it
    mx::set_cache_limit(before);
  }
}

// Returns true if an output of `bytes` needs memory that MLX's cache holds.
bool is_memory_short(size_t bytes) {
  if (mx::get_active_memory() + mx::get_cache_memory() + bytes > mx::get_memory_limit()) {
    return true;
  }
  const auto available = available_memory();
  return available && *available < static_cast<int64_t>(bytes) + kReserve;
}

}  // namespace

std::optional<int64_t> available_memory() {
#if defined(__linux__)
  std::optional<int64_t> available = available_in_container();
  if (const auto kilobytes = read_field("/proc/meminfo", "MemAvailable:")) {
    available = std::min(available.value_or(INT64_MAX), *kilobytes * 1024);
  }
  return available;
#else
  return std::nullopt;
#endif
}

void keep_freed_memory(size_t output_bytes, const mx::Stream& stream) {
  if (output_bytes < kLarge || stream.device != mx::Device::cpu || mx::gpu::is_available()) {
    return;
  }
  // set_cache_limit() and clear_cache() wait for streams whose threads a forked child does not
  // have.
  if (loaded_by != getpid()) {
    return;
  }
  // MLX waits for its streams in these calls, and work on a stream may need the GIL.
  static std::atomic<bool> raised{false};
  if (!raised.exchange(true)) {
    WithoutGil unlocked;
    raise_cache_limit();
  }
  using Clock = std::chrono::steady_clock;
  static std::atomic<Clock::rep> next_check{0};
  const auto now = Clock::now();
  if (now.time_since_epoch().count() < next_check.load(std::memory_order_relaxed)) {
    return;
  }
  next_check = (now + kCheckInterval).time_since_epoch().count();
  if (mx::get_cache_memory() > 0 && is_memory_short(output_bytes)) {
    WithoutGil unlocked;
    mx::clear_cache();
  }
}

}  // namespace mlx_anvil
