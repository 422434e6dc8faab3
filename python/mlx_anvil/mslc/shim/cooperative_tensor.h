// <metal_cooperative_tensor>: matrices distributed over the lanes of a SIMD group, as matmul2d uses
// them.
//
// Apple calls the layout opaque. MLX relies on that of the M5 (steel/gemm/nax.h, BaseNAXFrag):
// fragments of 16 x 16, of which a lane has rows r and r + 8 and four neighbouring columns from c:
//   quad = lane / 4, r = (quad & 4) + lane / 2 % 4, c = ((quad & 2) + lane % 2) * 4.
// Two fragments follow each other along the dimension of 32. Matrices with more than one fragment
// in both dimensions are in row order here, which is a choice: kernels must ask for the index.
#pragma once

#include "tensor.h"

#if defined(__NVPTX__) || defined(__SPIRV__)
#include "gpu/matmul2d_gpu.h"
#else
#include "cpu/matmul2d_cpu.h"
#endif

namespace mslc::metal4::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  int m, n, k;
  bool transpose_left, transpose_right;
  bool relaxed_precision;
  mode matmul_mode;

  constexpr matmul2d_descriptor(int m,
                                int n,
                                int k = static_cast<int>(dynamic_extent),
                                bool transpose_left = false,
                                bool transpose_right = false,
                                bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

}  // namespace mslc::metal4::tensor_ops

namespace mslc {

using Matmul = metal4::tensor_ops::matmul2d_descriptor;

enum class MatmulOperand { left, right, destination };

constexpr int fragment_size = 16;
constexpr uint fragment_elements = fragment_size * fragment_size / simd_width;

// An operand of a product: what it holds, and which lane has which element.
template <Matmul Product, MatmulOperand Operand, class Left, class Right, class Destination>
struct MatmulLayout {
  static constexpr bool is_left = Operand == MatmulOperand::left;
  static constexpr bool is_right = Operand == MatmulOperand::right;

  using left_type = Left;
  using right_type = Right;
  using destination_type = Destination;
  using element_type =
      metal::conditional_t<is_left, Left, metal::conditional_t<is_right, Right, Destination>>;
  static constexpr MatmulOperand operand = Operand;

  static_assert(Product.k != static_cast<int>(metal4::dynamic_extent) ||
                    Operand == MatmulOperand::destination,
                "inner dimension cannot be dynamic with input cooperative tensors");
  // As stored: a transposed operand has its rows where the product has columns.
  static constexpr int rows = is_right ? (Product.transpose_right ? Product.n : Product.k)
                              : is_left && Product.transpose_left ? Product.k
                                                                  : Product.m;
  static constexpr int columns = is_left ? (Product.transpose_left ? Product.m : Product.k)
                                 : is_right && Product.transpose_right ? Product.k
                                                                       : Product.n;
  static_assert(rows > 0 && columns > 0 && rows % fragment_size == 0 &&
                    columns % fragment_size == 0,
                "mslc has cooperative tensors whose dimensions are multiples of 16");
  static constexpr int fragments_across = columns / fragment_size;
  static constexpr uint capacity = rows * columns / simd_width;

  static constexpr int row(uint lane, uint i) {
    const int in_fragment = (lane / 4 & 4) + lane / 2 % 4 + i % fragment_elements / 4 * 8;
    return static_cast<int>(i / fragment_elements) / fragments_across * fragment_size + in_fragment;
  }
  static constexpr int column(uint lane, uint i) {
    const int in_fragment = ((lane / 4 & 2) + lane % 2) * 4 + i % 4;
    return static_cast<int>(i / fragment_elements) % fragments_across * fragment_size + in_fragment;
  }
};

template <class T>
constexpr bool is_cooperative_tensor = false;

}  // namespace mslc

namespace mslc::metal4 {

// All lanes of the SIMD group call load and store together. Elements beyond the extents of a tensor
// are read as 0 and not written.
template <class Element, class Extents, class Layout>
class cooperative_tensor {
 public:
  using element_type = Element;
  using value_type = Element;
  using index_type = typename Extents::index_type;
  using layout = Layout;

  cooperative_tensor() { make_implausible(elements); }

  static constexpr ushort get_capacity() { return Layout::capacity; }
  constexpr bool is_valid_element(ushort) const { return true; }
  // Column and row: the innermost dimension comes first.
  metal::array<index_type, 2> get_multidimensional_index(ushort i) const {
    return {Layout::column(lane_id(), i), Layout::row(lane_id(), i)};
  }
  Element& operator[](ushort i) {
    require_element(i, Layout::capacity);
    return elements[i];
  }
  const Element& operator[](ushort i) const {
    require_element(i, Layout::capacity);
    return elements[i];
  }

  template <class E, class X, class D>
  void load(const tensor<E, X, D>& source, MSLC_SITE) {
    static_assert(__is_same(typename tensor<E, X, D>::value_type, Element),
                  "source tensor datatype does not match cooperative tensor");
    tensor_operation(beyond(source), site);
    const auto sizes = source.extents();
    const auto bounds = TensorAccess::bounds(source), strides = TensorAccess::strides(source);
    for (uint i = 0; i < Layout::capacity; ++i) {
      const long x = Layout::column(lane_id(), i), y = Layout::row(lane_id(), i);
      if (x >= sizes.extent(0) || y >= sizes.extent(1)) {
        elements[i] = Element(0);
      } else if (x >= bounds[0] || y >= bounds[1]) {
        elements[i] = implausible<Element>();
      } else {
        elements[i] = TensorAccess::data(source)[x * strides[0] + y * strides[1]];
      }
    }
  }
  template <class E, class X, class D>
  void store(const tensor<E, X, D>& destination, MSLC_SITE) const {
    static_assert(__is_same(typename tensor<E, X, D>::value_type, Element),
                  "tensor datatype does not match cooperative tensor");
    tensor_operation(beyond(destination), site);
    const auto sizes = destination.extents();
    const auto bounds = TensorAccess::bounds(destination);
    const auto strides = TensorAccess::strides(destination);
    for (uint i = 0; i < Layout::capacity; ++i) {
      const long x = Layout::column(lane_id(), i), y = Layout::row(lane_id(), i);
      if (x < sizes.extent(0) && y < sizes.extent(1) && x < bounds[0] && y < bounds[1])
        TensorAccess::data(destination)[x * strides[0] + y * strides[1]] = elements[i];
    }
  }

 private:
  friend struct ::mslc::TensorAccess;

  // Static extents may promise more than the tensor has.
  template <class Tensor>
  static bool beyond(const Tensor& tensor) {
    const auto bounds = TensorAccess::bounds(tensor);
    const auto columns = tensor.extents().extent(0), rows = tensor.extents().extent(1);
    return (columns < Layout::columns ? columns : Layout::columns) > bounds[0] ||
           (rows < Layout::rows ? rows : Layout::rows) > bounds[1];
  }

  Element elements[Layout::capacity];
};

}  // namespace mslc::metal4

namespace mslc {

template <class E, class X, class L>
constexpr bool is_cooperative_tensor<metal4::cooperative_tensor<E, X, L>> = true;

}  // namespace mslc
