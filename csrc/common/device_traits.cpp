#include "common/device_traits.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "mlx/backend/gpu/device_info.h"

namespace mlx_anvil {

namespace {

constexpr int32_t kM1 = 13, kM5 = 17;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// The name says more than the letter: Pro and Max chips share "s".
AppleGpuClass class_of(char letter, std::string_view name) {
  constexpr std::pair<std::string_view, AppleGpuClass> kEnds[] = {
      {" Pro", AppleGpuClass::kPro},
      {" Max", AppleGpuClass::kMax},
      {" Ultra", AppleGpuClass::kUltra}};
  constexpr std::pair<char, AppleGpuClass> kLetters[] = {{'p', AppleGpuClass::kPhone},
                                                         {'g', AppleGpuClass::kBase},
                                                         {'s', AppleGpuClass::kMax},
                                                         {'d', AppleGpuClass::kUltra}};
  if (letter != 'p') {  // "Apple A17 Pro" is a phone's
    for (const auto& [end, size] : kEnds) {
      if (name.ends_with(end)) {
        return size;
      }
    }
  }
  const auto* const known =
      std::find_if(std::begin(kLetters), std::end(kLetters),
                   [letter](const auto& entry) { return entry.first == letter; });
  return known == std::end(kLetters) ? AppleGpuClass::kUnknown : known->second;
}

// Metal does not report the cores. Later generations get those of the last known one.
int32_t most_cores(int32_t generation, AppleGpuClass size) {
  constexpr int32_t kCores[][4] = {// base, Pro, Max, Ultra of M1 to M5
                                   {8, 16, 32, 64},
                                   {10, 19, 38, 76},
                                   {10, 18, 40, 80},
                                   {10, 20, 40, 80},
                                   {10, 20, 40, 80}};
  if (generation < kM1 || size < AppleGpuClass::kBase) {
    return 0;
  }
  const int32_t row = std::min(generation, kM5) - kM1;
  return kCores[row][static_cast<int32_t>(size) - static_cast<int32_t>(AppleGpuClass::kBase)];
}

}  // namespace

AppleGpu apple_gpu(std::string_view architecture, std::string_view name) {
  AppleGpu gpu;
  if (architecture.size() < 3) {
    return gpu;
  }
  // As MLX reads it: two digits and a letter at the end.
  const std::string_view end = architecture.substr(architecture.size() - 3);
  if (is_digit(end[0]) && is_digit(end[1])) {
    gpu.generation = 10 * (end[0] - '0') + (end[1] - '0');
  }
  gpu.size = class_of(end[2], name);
  gpu.cores = most_cores(gpu.generation, gpu.size);
  gpu.neural_accelerators = gpu.generation >= (gpu.size == AppleGpuClass::kPhone ? kM5 + 1 : kM5);
  return gpu;
}

std::string gpu_fact(const std::string& key) {
  const auto& facts = mx::gpu::device_info();
  const auto fact = facts.find(key);
  const auto* text = fact == facts.end() ? nullptr : std::get_if<std::string>(&fact->second);
  return text ? *text : "";
}

}  // namespace mlx_anvil
