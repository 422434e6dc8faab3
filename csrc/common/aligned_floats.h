// Memory of one call for the CPU drivers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace mlx_anvil {

// A float buffer aligned to a cache line: a vector load across two lines takes twice as long.
class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t count) : data_(new (kLine) float[static_cast<size_t>(count)]) {}
  float* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(float* data) const { ::operator delete[](data, kLine); }
  };
  std::unique_ptr<float[], Free> data_;
};

}  // namespace mlx_anvil
