// What takes long to build and is built once: a kernel's pipeline, asked for by launches and by
// prebuild() at the same time.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "common/without_gil.h"

namespace mlx_anvil {

// Values stay where they are for the life of the object. A thread that asks for what another one
// builds waits for that one. What failed is tried again by the next who asks.
template <class Key, class Value>
class BuildOnce {
 public:
  template <class Build>
  const Value& get(const Key& key, Build build) {
    Entry& entry = entry_of(key);
    if (!entry.is_built.load(std::memory_order_acquire)) {
      // The thread that builds calls Python.
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
