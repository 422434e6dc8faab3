// A cache of values that take long to build, such as a kernel's pipeline. Launches and prebuild()
// may request the same value at the same time.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "common/without_gil.h"

namespace mlx_anvil {

// Builds each value once and never moves it. A thread that requests a value under construction
// waits for it. A failed build is retried by the next caller.
template <class Key, class Value>
class BuildOnce {
 public:
  template <class Build>
  const Value& get(const Key& key, Build build) {
    Entry& entry = entry_of(key);
    if (!entry.is_built.load(std::memory_order_acquire)) {
      // The building thread may call Python, so the waiting threads must not hold the GIL.
      WithoutGil released;
      std::lock_guard lock(entry.building);
      if (!entry.value) {
        entry.value.emplace(build());
        entry.is_built.store(true, std::memory_order_release);
      }
    }
    return *entry.value;
  }

 private:
  struct Entry {
    std::mutex building;
    std::optional<Value> value;
    std::atomic<bool> is_built{false};
  };

  Entry& entry_of(const Key& key) {
    std::lock_guard lock(mutex_);
    std::unique_ptr<Entry>& entry = entries_[key];
    if (!entry) {
      entry = std::make_unique<Entry>();
    }
    return *entry;
  }

  std::mutex mutex_;
  std::map<Key, std::unique_ptr<Entry>> entries_;
};

}  // namespace mlx_anvil
