// Sums over rows: pairwise over up to eight rows, then Kahan summation. The error does not grow
// with the number of rows.
#include "common/simd/simd.h"
#include "common/sum_kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

constexpr int kRowsAtOnce = 8;

template <class T>
inline f32v load_columns(const T* from, int64_t count) {
  if (count >= kLanes) {
    return load_lanes(from);
  }
  T some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load_lanes(some);
}

template <int kRows, class T>
inline f32v pairwise(const T* from, int64_t step, int64_t count) {
  if constexpr (kRows == 1) {
    return load_columns(from, count);
  } else {
    return pairwise<kRows / 2>(from, step, count) +
           pairwise<kRows / 2>(from + kRows / 2 * step, step, count);
  }
}

struct Compensated {
  f32v sum, lost;

  // An infinite sum has lost nothing. inf - inf would turn it into NaN.
  void add(f32v x) {
    const f32v corrected = x - lost;
    const f32v next = sum + corrected;
    const f32v rounded_away = (next - sum) - corrected;
    lost = rounded_away == rounded_away ? rounded_away : f32v{};
    sum = next;
  }
};

template <class T>
void add_rows(
    const void* from, int64_t rows, int64_t step, int64_t columns, float* sums, float* lost) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    const T* x = static_cast<const T*>(from) + column;
    const int64_t count = columns - column;
    Compensated total = {load_lanes(sums + column), load_lanes(lost + column)};
    int64_t row = 0;
    for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce, x += kRowsAtOnce * step) {
      total.add(pairwise<kRowsAtOnce>(x, step, count));
    }
    for (; row < rows; ++row, x += step) {
      total.add(load_columns(x, count));
    }
    store_lanes(sums + column, total.sum);
    store_lanes(lost + column, total.lost);
  }
}

template <class T>
void store(const float* from, int64_t count, void* to) {
  T* const out = static_cast<T*>(to);
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32v x = load_columns(from + i, count - i);
    if (count - i >= kLanes) {
      store_lanes(out + i, x);
    } else {
      T some[kLanes];
      store_lanes(some, x);
      std::memcpy(out + i, some, (count - i) * sizeof(T));
    }
  }
}

}  // namespace

constinit const PerDtype<SumKernels> sum_kernels_table = {
    .float32 = {.add_rows = add_rows<float>, .store = store<float>},
    .float16 = {.add_rows = add_rows<f16>, .store = store<f16>},
    .bfloat16 = {.add_rows = add_rows<bf16>, .store = store<bf16>},
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
