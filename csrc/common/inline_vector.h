// A vector of fixed capacity that stores its elements inline and never allocates.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>

namespace mlx_anvil {

template <class T, size_t kCapacity>
class InlineVector {
 public:
  InlineVector() = default;
  InlineVector(std::initializer_list<T> elements) { append(elements); }

  void push_back(T element) {
    if (size_ == kCapacity) {
      throw std::length_error("the inline vector is full");
    }
    elements_[size_++] = element;
  }
  void append(std::initializer_list<T> elements) {
    for (const T& element : elements) {
      push_back(element);
    }
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* data() const { return elements_.data(); }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  const T& operator[](size_t i) const { return elements_[i]; }
  bool operator==(const InlineVector& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  std::array<T, kCapacity> elements_{};
  size_t size_ = 0;
};

}  // namespace mlx_anvil
