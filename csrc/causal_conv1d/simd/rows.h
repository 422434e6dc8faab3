// What the CPU kernels of causal_conv1d share: rows with the state in front, and the windows that
// slide over them. For kernel files only (see common/simd/simd.h).
#pragma once

#include "causal_conv1d/simd/kernels.h"
#include "common/simd/blocks.h"
#include "common/simd/unroll.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// A table with the kernel of each width, which Kernels<T, width>::kernel is for dtype T.
#define MLX_ANVIL_CONV_WIDTH(Kernels, width) \
  {.float32 = Kernels<float, width>::kernel, \
   .float16 = Kernels<f16, width>::kernel,   \
   .bfloat16 = Kernels<bf16, width>::kernel}
#define MLX_ANVIL_CONV_TABLE(Kernels)                                         \
  {.of = {MLX_ANVIL_CONV_WIDTH(Kernels, 2), MLX_ANVIL_CONV_WIDTH(Kernels, 3), \
          MLX_ANVIL_CONV_WIDTH(Kernels, 4), MLX_ANVIL_CONV_WIDTH(Kernels, 5), \
          MLX_ANVIL_CONV_WIDTH(Kernels, 6), MLX_ANVIL_CONV_WIDTH(Kernels, 7), \
          MLX_ANVIL_CONV_WIDTH(Kernels, 8)},                                  \
   .block = kBlock}

inline int64_t valid_length(const ConvProblem& problem, int64_t batch) {
  if (!problem.lengths) {
    return problem.length;
  }
  const int64_t length = problem.lengths[batch];
  return length < 0 ? 0 : length > problem.length ? problem.length : length;
}

template <class T>
inline const T* of_batch(const ConvRows& rows, int64_t batch) {
  return static_cast<const T*>(rows.data) + batch * rows.batch_stride;
}

// The rows of one batch entry, with the state in front.
template <class T, int kWidth>
struct BatchRows {
  const T *x, *state;  // `state` is null where it is zeros
  int64_t x_stride, state_stride;

  BatchRows(const ConvProblem& problem, int64_t batch)
      : x(of_batch<T>(problem.x, batch)),
        state(problem.state.data ? of_batch<T>(problem.state, batch) : nullptr),
        x_stride(problem.x.row_stride),
        state_stride(problem.state.row_stride) {}

  // Null for a row of zeros.
  const T* row(int64_t u) const {
    return u >= kWidth - 1 ? x + (u - (kWidth - 1)) * x_stride
           : state         ? state + u * state_stride
                           : nullptr;
  }

  // Fills all of a window but its newest row: rows u to u + kWidth - 2.
  template <bool kRest>
  MLX_ANVIL_UNROLLED void fill(Block (&window)[kWidth],
                               int64_t u,
                               int64_t channel,
                               int64_t count) const {
    unroll<kWidth - 1>([&](auto w) __attribute__((always_inline)) {
      const T* const from = row(u + w.value);
      window[w.value] = from ? load_columns<kRest>(from + channel, count) : Block{};
    });
  }
};

// The taps of a block of channels, and its bias.
template <int kWidth>
struct Taps {
  Block of[kWidth];
  Block bias;

  MLX_ANVIL_UNROLLED explicit Taps(const float* weights) {
    unroll<kWidth>([&](auto w) __attribute__((always_inline)) {
      of[w.value] = load_block(weights + w.value * kBlock);
    });
    bias = load_block(weights + kWidth * kBlock);
  }

  // The convolution before the activation.
  MLX_ANVIL_UNROLLED Block sum(const Block (&window)[kWidth]) const {
    Block total = bias;
    unroll<kWidth>([&](auto w) __attribute__((always_inline)) {
      total = total + window[w.value] * of[w.value];
    });
    return total;
  }
};

// Drops the first row of a window.
template <int kWidth>
MLX_ANVIL_UNROLLED void slide(Block (&window)[kWidth]) {
  unroll<kWidth - 1>([&](auto w)
                         __attribute__((always_inline)) { window[w.value] = window[w.value + 1]; });
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
