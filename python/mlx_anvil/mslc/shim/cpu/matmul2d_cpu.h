// The CPU target's matmul2d: one call multiplies the operands of all lanes.
#pragma once

#include "../target.h"
#include "../tensor.h"

namespace mslc {

template <class T>
MSLC_INLINE T implausible() {
  return poison<T>();
}
// A new cooperative tensor has no values.
template <class T, size_t N>
MSLC_INLINE void make_implausible(T (&elements)[N]) {
  for (T& element : elements) element = poison<T>();
}

// In every build: an element too many would be another variable of the lane.
MSLC_INLINE void require_element(uint index, uint count) {
  if (index >= count) mslc_no_element(index, count);
}

inline MSLC_UNINSTRUMENTED void combine_tensor_operation(const mslc_lanes* lanes) {
  if (lanes->active != ~0u)
    mslc_undefined_result(lanes, static_cast<uint>(__builtin_ctz(lanes->active)),
                          "operation on a cooperative tensor without all 32 lanes");
  for (uint lane = 0; lane < simd_width; ++lane)
    if (is_active(lanes, lane) && operand<bool>(lanes, lane))
      return mslc_beyond_tensor(lanes, lane);
}

// All lanes arrive here before a load or store of a tensor that may reach `beyond` its extents.
MSLC_INLINE void tensor_operation(bool beyond, const Site* site) {
  mslc_collective(&beyond, combine_tensor_operation, runtime_site(site));
}

// With relaxed precision MLX multiplies float matrices only where it may use TF32
// (mlx/backend/metal/matmul.cpp, enable_tf32), so that float factors keep 10 bits here.
MSLC_UNINSTRUMENTED inline float relaxed(float x) {
  const uint bits = __builtin_bit_cast(uint, x);
  if ((bits & 0x7F800000u) == 0x7F800000u) return x;
  return __builtin_bit_cast(float, (bits + 0xFFFu + (bits >> 13 & 1)) & ~0x1FFFu);
}

template <class Left, class Right, class Destination>
struct CooperativeOperands {
  Left* left;
  Right* right;
  Destination* destination;
};

// Copies the elements of all lanes to or from a matrix in row order.
template <class Tensor, class Number, class Operand>
MSLC_UNINSTRUMENTED void gather(const mslc_lanes* lanes,
                                Tensor* Operand::* tensor,
                                Number* matrix,
                                bool transposed,
                                bool is_relaxed) {
  using Layout = typename Tensor::layout;
  for (uint lane = 0; lane < simd_width; ++lane) {
    for (uint i = 0; i < Layout::capacity; ++i) {
      const int row = Layout::row(lane, i), column = Layout::column(lane, i);
      Number& to =
          matrix[transposed ? column * Layout::rows + row : row * Layout::columns + column];
      if (!is_active(lanes, lane)) {
        to = poison<Number>();
        continue;
      }
      const auto element = TensorAccess::element(*(operand<Operand>(lanes, lane).*tensor), i);
      to = static_cast<Number>(element);
      if constexpr (__is_same(decltype(element), const float))
        if (is_relaxed) to = relaxed(to);
    }
  }
}

template <auto Product, class Left, class Right, class Destination>
MSLC_UNINSTRUMENTED void combine_multiply(const mslc_lanes* lanes) {
  using Operands = CooperativeOperands<Left, Right, Destination>;
  using Layout = typename Destination::layout;
  using D = typename Destination::value_type;
  using Number = metal::conditional_t<__is_same(D, int), int, float>;
  constexpr int m = Product.m, n = Product.n, inner = Product.k;
  constexpr bool accumulates = Product.matmul_mode == decltype(Product)::mode::multiply_accumulate;
  count<MSLC_COUNT_MATRIX_MULTIPLY>(m * n * inner / (8 * 8 * 8));
  if (lanes->active != ~0u)
    mslc_undefined_result(lanes, static_cast<uint>(__builtin_ctz(lanes->active)),
                          "matmul2d without all 32 lanes");

  Number a[m * inner], b[inner * n], d[m * n];
  constexpr bool relaxes = Product.relaxed_precision;
  gather<Left>(lanes, &Operands::left, a, Product.transpose_left, relaxes);
  gather<Right>(lanes, &Operands::right, b, Product.transpose_right, relaxes);
  if constexpr (accumulates)
    gather<Destination>(lanes, &Operands::destination, d, false, false);
  else
    __builtin_memset(d, 0, sizeof d);

  using Row = metal::vec<Number, 16>;
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; column += 16) {
      Row sum;
      __builtin_memcpy(&sum, d + row * n + column, sizeof sum);
      for (int k = 0; k < inner; ++k) {
        Row factor;
        __builtin_memcpy(&factor, b + k * n + column, sizeof factor);
        sum += a[row * inner + k] * factor;
      }
      __builtin_memcpy(d + row * n + column, &sum, sizeof sum);
    }
  }
  for (uint lane = 0; lane < simd_width; ++lane) {
    if (!is_active(lanes, lane)) continue;
    Destination& result = *operand<Operands>(lanes, lane).destination;
    for (uint i = 0; i < Layout::capacity; ++i)
      TensorAccess::element(result, i) =
          static_cast<D>(d[Layout::row(lane, i) * n + Layout::column(lane, i)]);
  }
}

template <auto Product, class Left, class Right, class Destination>
MSLC_INLINE void multiply_cooperative(Left& left,
                                      Right& right,
                                      Destination& destination,
                                      const Site* site) {
  CooperativeOperands<Left, Right, Destination> operands{&left, &right, &destination};
  mslc_collective(&operands, combine_multiply<Product, Left, Right, Destination>,
                  runtime_site(site));
}

}  // namespace mslc
