// MetalPerformancePrimitives: mpp::tensor_ops::matmul2d, for one SIMD group.
//
// What it refuses is what Apple's headers refuse (MPPTensorOpsMatMul2dImpl.h of macOS 26.2, and the
// multiples of 16 of 26.4), with the same words, and what mslc lacks.
#pragma once

#include "cooperative_tensor.h"

namespace mslc::metal4 {

// The threads that run an operation together.
template <int Count>
struct execution_simdgroups {};
using execution_simdgroup = execution_simdgroups<1>;
struct execution_thread {};

}  // namespace mslc::metal4

namespace mslc {

// The table of types in MPPTensorOpsMatMul2d.h of macOS 26.2. Either operand may be int8_t.
template <class T, class... Types>
constexpr bool is_one_of = (__is_same(T, Types) || ...);
template <class A, class B, class... Types>
constexpr bool are_operands = is_one_of<A, int8_t, Types...> && is_one_of<B, int8_t, Types...> &&
                              !(__is_same(A, int8_t) && __is_same(B, int8_t));

template <class A, class B, class Destination>
constexpr bool multiplies = false;
template <class A, class B>
constexpr bool multiplies<A, B, float> = are_operands<A, B, half, bfloat, float>;
template <class A, class B>
constexpr bool multiplies<A, B, half> =
    are_operands<A, B, half, bfloat> && (__is_same(A, half) || __is_same(B, half));
template <class A, class B>
constexpr bool multiplies<A, B, bfloat> =
    are_operands<A, B, half, bfloat> && (__is_same(A, bfloat) || __is_same(B, bfloat));
template <class A, class B>
constexpr bool multiplies<A, B, int> = __is_same(A, int8_t) && __is_same(B, int8_t);

// What `run` takes for an operand: a tensor, or a cooperative tensor made for this operand of a
// product of the same types.
template <MatmulOperand Operand, class Tensor>
constexpr bool is_operand = is_tensor<Tensor>;
template <MatmulOperand Operand, class E, class X, class L>
constexpr bool is_operand<Operand, metal4::cooperative_tensor<E, X, L>> = L::operand == Operand;

template <class Tensor, class A, class B, class Destination>
constexpr bool has_types = true;
template <class E, class X, class L, class A, class B, class D>
constexpr bool has_types<metal4::cooperative_tensor<E, X, L>, A, B, D> =
    __is_same(typename L::left_type, A) && __is_same(typename L::right_type, B) &&
    __is_same(typename L::destination_type, D);

// Tells if a cooperative tensor has the rows and columns of an operand.
template <class Layout, class Tensor>
constexpr bool has_shape = true;
template <class Layout, class E, class X, class L>
constexpr bool has_shape<Layout, metal4::cooperative_tensor<E, X, L>> =
    L::rows == Layout::rows && L::columns == Layout::columns;

constexpr int dynamic_k = static_cast<int>(metal4::dynamic_extent);

// The same product with another inner dimension.
constexpr Matmul with_k(Matmul product, int k) {
  product.k = k;
  product.matmul_mode = Matmul::mode::multiply_accumulate;
  return product;
}

template <Matmul Product, MatmulOperand Operand, class A, class B, class D, class Index = int>
using CooperativeOf =
    metal4::cooperative_tensor<typename MatmulLayout<Product, Operand, A, B, D>::element_type,
                               metal4::dextents<Index, 2>,
                               MatmulLayout<Product, Operand, A, B, D>>;

// The operand of a product as a cooperative tensor, loaded if it is in memory.
template <Matmul Product, MatmulOperand Operand, class A, class B, class D, class Tensor>
MSLC_INLINE decltype(auto) in_registers(Tensor& tensor, const Site* site) {
  if constexpr (is_cooperative_tensor<Tensor>) {
    return (tensor);
  } else {
    CooperativeOf<Product, Operand, A, B, D> registers;
    registers.load(tensor, site);
    return registers;
  }
}

template <Matmul Product, class A, class B, class D, class Left, class Right, class Destination>
MSLC_INLINE void multiply(Left& left, Right& right, Destination& destination, const Site* site) {
  constexpr bool accumulates = Product.matmul_mode == Matmul::mode::multiply_accumulate;
  if constexpr (is_tensor<Destination>) {
    CooperativeOf<Product, MatmulOperand::destination, A, B, D> result;
    if (accumulates) result.load(destination, site);
    multiply<Product, A, B, D>(left, right, result, site);
    result.store(destination, site);
  } else if constexpr (Product.k != dynamic_k) {
    decltype(auto) a = in_registers<Product, MatmulOperand::left, A, B, D>(left, site);
    decltype(auto) b = in_registers<Product, MatmulOperand::right, A, B, D>(right, site);
    multiply_cooperative<Product>(a, b, destination, site);
  } else {
    static_assert(is_tensor<Left> && is_tensor<Right>,
                  "inner dimension cannot be dynamic with input cooperative tensors");
    // In steps of one fragment, with sums in float as within a product.
    using Sum = metal::conditional_t<__is_same(D, int), int, float>;
    constexpr Matmul step = with_k(Product, fragment_size);
    CooperativeOf<step, MatmulOperand::destination, A, B, Sum> sum;
    for (uint i = 0; i < sum.get_capacity(); ++i)
      sum[i] = accumulates ? static_cast<Sum>(destination[i]) : Sum(0);
    const int inner = left.extents().extent(Product.transpose_left ? 1 : 0);
    for (int k = 0; k < inner; k += fragment_size) {
      auto a = Product.transpose_left ? left.slice(0, k) : left.slice(k, 0);
      auto b = Product.transpose_right ? right.slice(k, 0) : right.slice(0, k);
      multiply<step, A, B, Sum>(a, b, sum, site);
    }
    for (uint i = 0; i < sum.get_capacity(); ++i) destination[i] = static_cast<D>(sum[i]);
  }
}

}  // namespace mslc

namespace mslc::metal4::tensor_ops {

template <matmul2d_descriptor Product, class Scope>
class matmul2d {
  static_assert(__is_same(Scope, execution_simdgroup),
                "mslc runs matmul2d for one SIMD group: execution_simdgroup");

 public:
  using scope = Scope;

  template <class A, class B, class D, class Index = int>
  using cooperative_tensor_left_input_t =
      CooperativeOf<Product, MatmulOperand::left, A, B, D, Index>;
  template <class A, class B, class D, class Index = int>
  using cooperative_tensor_right_input_t =
      CooperativeOf<Product, MatmulOperand::right, A, B, D, Index>;
  template <class Left, class Right, class D, class Index = int>
  using cooperative_tensor_destination_t = CooperativeOf<Product,
                                                         MatmulOperand::destination,
                                                         typename Left::value_type,
                                                         typename Right::value_type,
                                                         D,
                                                         Index>;

  template <class A, class B, class D, class Index = int>
  cooperative_tensor_left_input_t<A, B, D, Index> get_left_input_cooperative_tensor() const {
    return {};
  }
  template <class A, class B, class D, class Index = int>
  cooperative_tensor_right_input_t<A, B, D, Index> get_right_input_cooperative_tensor() const {
    return {};
  }
  template <class Left, class Right, class D, class Index = int>
  cooperative_tensor_destination_t<Left, Right, D, Index> get_destination_cooperative_tensor()
      const {
    return {};
  }

  // All lanes of the SIMD group call this together.
  template <class Left, class Right, class Destination>
  void run(Left& left, Right& right, Destination& destination, MSLC_SITE) const {
    using A = typename Left::value_type;
    using B = typename Right::value_type;
    using D = typename Destination::value_type;
    static_assert(is_operand<MatmulOperand::left, Left>,
                  "left operand must be a tensor or matmul2d left input cooperative tensor");
    static_assert(is_operand<MatmulOperand::right, Right>,
                  "right operand must be a tensor or matmul2d right input cooperative tensor");
    static_assert(
        is_operand<MatmulOperand::destination, Destination>,
        "destination operand must be a tensor or matmul2d destination cooperative tensor");
    static_assert(__is_same(typename Left::index_type, int) &&
                      __is_same(typename Right::index_type, int) &&
                      __is_same(typename Destination::index_type, int),
                  "index type must be int");
    static_assert(
        has_types<Left, A, B, D> && has_types<Right, A, B, D> && has_types<Destination, A, B, D>,
        "input types must match cooperative tensor types");
    static_assert(
        has_shape<MatmulLayout<Product, MatmulOperand::destination, A, B, D>, Destination>,
        "the destination cooperative tensor is of a product of another shape");
    static_assert(multiplies<A, B, D>, "unsupported type");
    if constexpr (is_cooperative_tensor<Left> && is_cooperative_tensor<Right>) {
      static_assert(Product.m == 32 || Product.n == 32 || Product.k == 32,
                    "at least one of M, N, or K must be 32 if both inputs are cooperative tensors");
      static_assert(Product.m == 16 || Product.m == 32,
                    "M must be 16 or 32 if both inputs are cooperative tensors");
      static_assert(Product.n == 16 || Product.n == 32,
                    "N must be 16 or 32 if both inputs are cooperative tensors");
      static_assert(Product.k == 16 || Product.k == 32,
                    "K must be 16 or 32 if both inputs are cooperative tensors");
    }
    static_assert(Product.m % 16 == 0 || Product.n % 16 == 0,
                  "at least one of M or N must be a multiple of 16");
    static_assert(Product.k == dynamic_k || Product.k % 16 == 0,
                  "K must be dynamic or a multiple of 16");
    if constexpr (is_cooperative_tensor<Left>)
      static_assert(has_shape<MatmulLayout<Product, MatmulOperand::left, A, B, D>, Left>,
                    "the left cooperative tensor is of a product of another shape");
    if constexpr (is_cooperative_tensor<Right>)
      static_assert(has_shape<MatmulLayout<Product, MatmulOperand::right, A, B, D>, Right>,
                    "the right cooperative tensor is of a product of another shape");
    multiply<Product, A, B, D>(left, right, destination, site);
  }
};

}  // namespace mslc::metal4::tensor_ops
