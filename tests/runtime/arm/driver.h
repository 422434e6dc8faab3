// What the checks of driver.cpp share.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/isa.h"

using namespace mlx_anvil;

void check_products();
void check_attention();

inline std::mt19937 random_bits;
inline int failures = 0;

inline float uniform(float low, float high) {
  return low + (high - low) * static_cast<float>(random_bits()) * 0x1p-32f;
}

// ---- dtypes -------------------------------------------------------------------------------------

inline std::vector<char> stored(KernelDtype dtype, const std::vector<float>& numbers) {
  std::vector<char> bytes(numbers.size() * element_size(dtype));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (dtype == KernelDtype::kFloat32) {
      std::memcpy(&bytes[4 * i], &numbers[i], 4);
    } else if (dtype == KernelDtype::kFloat16) {
      const auto half = static_cast<__fp16>(numbers[i]);
      std::memcpy(&bytes[2 * i], &half, 2);
    } else {
      uint32_t bits;
      std::memcpy(&bits, &numbers[i], 4);
      const auto upper = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
      std::memcpy(&bytes[2 * i], &upper, 2);
    }
  }
  return bytes;
}

inline double loaded(KernelDtype dtype, const std::vector<char>& bytes, size_t i) {
  if (dtype == KernelDtype::kFloat32) {
    float number;
    std::memcpy(&number, &bytes[4 * i], 4);
    return number;
  }
  uint16_t half;
  std::memcpy(&half, &bytes[2 * i], 2);
  if (dtype == KernelDtype::kFloat16) {
    __fp16 number;
    std::memcpy(&number, &half, 2);
    return static_cast<double>(number);
  }
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// ---- checks -------------------------------------------------------------------------------------

inline void check(bool good, const std::string& what) {
  if (!good && ++failures <= 20) {
    std::printf("%s\n", what.c_str());
  }
}
