// Weights and biases in the order of causal_conv1d's CPU kernels, and their gradients back in that
// of memory.
#include <type_traits>

#include "causal_conv1d/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// The element of memory that element i of a block is: only bfloat16 is reordered, into even and odd
// ones.
template <class T>
inline int of_memory(int i) {
  return !std::is_same_v<T, bf16> ? i : i < kLanes ? 2 * i : 2 * (i - kLanes) + 1;
}

// count * kPer numbers in memory order, in float32, with zeros up to a whole block of channels.
template <class T, int kPer>
inline void widen_in_order(const T* from, int64_t count, float (&to)[kPer * kBlock]) {
  T padded[kPer * kBlock] = {};
  if (count < kBlock) {
    std::memcpy(padded, from, count * kPer * sizeof(T));
    from = padded;
  }
  for (int i = 0; i < kPer * kBlock; i += kLanes) {
    store_lanes(to + i, load_lanes(from + i));
  }
}

template <class T, int kWidth>
void widen(const ConvProblem& problem, int64_t group, int64_t first, int64_t last, float* weights) {
  const int64_t at = group * problem.channels;
  const T* const taps = static_cast<const T*>(problem.weight) + at * kWidth;
  const T* const bias = problem.bias ? static_cast<const T*>(problem.bias) + at : nullptr;
  for (int64_t channel = first; channel < last; channel += kBlock) {
    float of_taps[kWidth * kBlock], of_bias[kBlock] = {};
    widen_in_order<T, kWidth>(taps + channel * kWidth, last - channel, of_taps);
    if (bias) {
      widen_in_order<T, 1>(bias + channel, last - channel, of_bias);
    }
    float* const to = weights + (channel - first) * (kWidth + 1);
    for (int i = 0; i < kBlock; ++i) {
      const int from = of_memory<T>(i);
      for (int w = 0; w < kWidth; ++w) {
        to[w * kBlock + i] = of_taps[from * kWidth + w];
      }
      to[kWidth * kBlock + i] = of_bias[from];
    }
  }
}

// Rounds the numbers of count * kPer elements.
template <class T, int kPer>
inline void narrow_in_order(const float (&from)[kPer * kBlock], int64_t count, T* to) {
  T padded[kPer * kBlock];
  for (int i = 0; i < kPer * kBlock; i += kLanes) {
    store_lanes(padded + i, load_lanes(from + i));
  }
  std::memcpy(to, padded, (count < kBlock ? count : kBlock) * kPer * sizeof(T));
}

template <class T, int kWidth>
void narrow(const ConvBackwardArgs& args, int64_t group, const float* sums) {
  const int64_t channels = args.of.channels, at = group * channels;
  T* const d_taps = static_cast<T*>(args.d_weight) + at * kWidth;
  T* const d_bias = args.d_bias ? static_cast<T*>(args.d_bias) + at : nullptr;
  for (int64_t channel = 0; channel < channels; channel += kBlock) {
    const float* const from = sums + channel * (kWidth + 1);
    float of_taps[kWidth * kBlock], of_bias[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const int to = of_memory<T>(i);
      for (int w = 0; w < kWidth; ++w) {
        of_taps[to * kWidth + w] = from[w * kBlock + i];
      }
      of_bias[to] = from[kWidth * kBlock + i];
    }
    narrow_in_order<T, kWidth>(of_taps, channels - channel, d_taps + channel * kWidth);
    if (d_bias) {
      narrow_in_order<T, 1>(of_bias, channels - channel, d_bias + channel);
    }
  }
}

template <class T, int kWidth>
struct VectorsOf {
  static constexpr ConvVectorKernels kernel = {widen<T, kWidth>, narrow<T, kWidth>};
};

}  // namespace

constinit const ConvTable<ConvVectorKernels> conv_vector_kernels_table =
    MLX_ANVIL_CONV_TABLE(VectorsOf);

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
