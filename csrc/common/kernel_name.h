// Kernel names as lookup keys. A launch builds and hashes no string; the text is made once, when
// the kernel is first needed.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/inline_vector.h"

namespace mlx_anvil {

struct FunctionConstant {
  uint32_t index;
  bool value;
};

// Values of some of a kernel's function constants. Their indices are below 32.
class FunctionConstants {
 public:
  FunctionConstants() = default;
  FunctionConstants(std::initializer_list<FunctionConstant> constants) { add(constants); }

  void add(std::initializer_list<FunctionConstant> constants) {
    for (const FunctionConstant& constant : constants) {
      const uint32_t bit = uint32_t{1} << constant.index;
      given_ |= bit;
      values_ |= constant.value ? bit : 0;
    }
  }

  std::vector<FunctionConstant> list() const;
  size_t hash() const { return (uint64_t{given_} << 32 | values_) * 0x9E3779B97F4A7C15; }
  bool operator==(const FunctionConstants&) const = default;

 private:
  uint32_t given_ = 0;
  uint32_t values_ = 0;
};

// A name as a sequence of numbers and of strings with static storage. Two names are equal if their
// pieces are.
class KernelName {
 public:
  class Piece {
   public:
    Piece() = default;
    Piece(const char* text) : text_(text) {}
    Piece(std::integral auto number) : number_(static_cast<int64_t>(number)) {}

    std::string text() const { return text_ ? text_ : std::to_string(number_); }
    size_t hash() const { return reinterpret_cast<size_t>(text_) + static_cast<size_t>(number_); }
    bool operator==(const Piece&) const = default;

   private:
    const char* text_ = nullptr;  // compared by address
    int64_t number_ = 0;
  };

  KernelName(std::initializer_list<Piece> pieces) : pieces_(pieces) {}

  std::string text() const;
  size_t hash() const;
  bool operator==(const KernelName&) const = default;

 private:
  InlineVector<Piece, 12> pieces_;
};

}  // namespace mlx_anvil
