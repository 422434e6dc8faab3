// Few logits are among the best, so that the others should cost only a vector comparison.
//
//   for each run of kRun logits:
//     round them to the dtype; flag any that is not <= bar
//     if any is flagged: append the positions of the flagged ones
#include <type_traits>

#include "common/simd/panels.h"
#include "quantized_head/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Logits per run. A run is scanned one by one if any of them is above the bar.
constexpr int64_t kRun = 4 * kLanes;

template <class T>
inline f32v rounded(f32v x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    T lanes[kLanes];
    store_lanes(lanes, x);
    return load_lanes(lanes);
  }
}

inline bool any_lane(i32v flags) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, &flags, sizeof(flags));
  int32_t any = 0;
  for (int32_t lane : lanes) {
    any |= lane;
  }
  return any != 0;
}

template <class T>
int64_t above(float* logits, int64_t count, float bar, int32_t* positions) {
  int64_t found = 0;
  for (int64_t first = 0; first < count; first += kRun) {
    const int64_t end = count - first < kRun ? count : first + kRun;
    i32v flags{};
    for (int64_t i = first; i < end; i += kLanes) {
      const f32v x = rounded<T>(load_columns(logits, 1, i, count));
      store_columns(logits, i, count, x);
      flags |= ~(x <= splat(bar));
    }
    if (any_lane(flags)) {
      for (int64_t i = first; i < end; ++i) {
        positions[found] = static_cast<int32_t>(i);
        found += !(logits[i] <= bar);
      }
    }
  }
  return found;
}

int64_t above_of(KernelDtype dtype, float* logits, int64_t count, float bar, int32_t* positions) {
  switch (dtype) {
    case KernelDtype::kFloat32:
      return above<float>(logits, count, bar, positions);
    case KernelDtype::kFloat16:
      return above<f16>(logits, count, bar, positions);
    default:
      return above<bf16>(logits, count, bar, positions);
  }
}

}  // namespace

constinit const QuantizedHeadKernels quantized_head_kernels_table = {.above = above_of};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
