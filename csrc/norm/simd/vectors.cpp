// Widens weights and biases for the norms' CPU kernels, and adds up the parts of their gradients.
//
// The element order is that of a loaded block of the rows' dtype.
#include <type_traits>

#include "norm/simd/kernels.h"
#include "norm/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Only bfloat16 blocks are reordered, into even and odd elements.
template <class T>
inline constexpr bool kReorders = std::is_same_v<T, bf16>;

template <class T>
inline Block from_memory_order(Block x) {
  if constexpr (!kReorders<T>) {
    return x;
  } else {
    float in[kBlock], out[kBlock];
    store_block<false>(in, x);
    for (int i = 0; i < kLanes; ++i) {
      out[i] = in[2 * i];
      out[kLanes + i] = in[2 * i + 1];
    }
    return load_block(out);
  }
}

template <class T>
inline Block to_memory_order(Block x) {
  if constexpr (!kReorders<T>) {
    return x;
  } else {
    float in[kBlock], out[kBlock];
    store_block<false>(in, x);
    for (int i = 0; i < kLanes; ++i) {
      out[2 * i] = in[i];
      out[2 * i + 1] = in[kLanes + i];
    }
    return load_block(out);
  }
}

template <class From, class T>
void widen_from(const From* from, float offset, int64_t columns, float* to) {
  for_each_block(0, columns, [&](int64_t column, auto rest) {
    Block x = rest() ? load_rest(from + column, columns - column) : load_block(from + column);
    if constexpr (!std::is_same_v<From, T>) {
      x = from_memory_order<T>(x);
    }
    store_block<false>(to + column, {x.first + offset, x.second + offset});
  });
}

template <class T>
void widen(const void* from, bool is_float32, float offset, int64_t columns, float* to) {
  if (is_float32) {
    widen_from<float, T>(static_cast<const float*>(from), offset, columns, to);
  } else {
    widen_from<T, T>(static_cast<const T*>(from), offset, columns, to);
  }
}

template <class To, class T>
void sum_parts_to(
    const float* parts, int64_t count, int64_t stride, int64_t begin, int64_t end, To* to) {
  for_each_block(0, end - begin, [&](int64_t column, auto rest) {
    Block sum = {};
    for (int64_t part = 0; part < count; ++part) {
      sum = sum + load_block(parts + part * stride + begin + column);
    }
    if constexpr (!std::is_same_v<To, T>) {
      sum = to_memory_order<T>(sum);
    }
    if constexpr (rest()) {
      store_rest(to + begin + column, end - begin - column, sum);
    } else {
      store_block<false>(to + begin + column, sum);
    }
  });
}

template <class T>
void sum_parts(const float* parts,
               int64_t count,
               int64_t stride,
               int64_t begin,
               int64_t end,
               bool is_float32,
               void* to) {
  if (is_float32) {
    sum_parts_to<float, T>(parts, count, stride, begin, end, static_cast<float*>(to));
  } else {
    sum_parts_to<T, T>(parts, count, stride, begin, end, static_cast<T*>(to));
  }
}

}  // namespace

constinit const NormVectorTable norm_vector_kernels_table = {
    .of = {.float32 = {.widen = widen<float>, .sum_parts = sum_parts<float>},
           .float16 = {.widen = widen<f16>, .sum_parts = sum_parts<f16>},
           .bfloat16 = {.widen = widen<bf16>, .sum_parts = sum_parts<bf16>}},
    .block = kBlock,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
