// <metal_tensor>: views of matrices in memory, as matmul2d takes them: rank 2, tensor_inline.
//
// The names are in mslc::metal4. The stub headers bring them into Metal's namespaces in Metal 4.
#pragma once

#include "traits.h"
#include "utility.h"

namespace mslc::metal4 {

constexpr ulong dynamic_extent = ~0ul;

// The sizes of a tensor, the innermost dimension first.
template <class Index, ulong... Sizes>
struct extents {
  using index_type = Index;
  static constexpr ulong rank() { return sizeof...(Sizes); }
  static constexpr ulong static_extent(ulong i) {
    constexpr ulong sizes[] = {Sizes...};
    return sizes[i];
  }

  constexpr extents() {
    static_assert(((Sizes != dynamic_extent) && ...), "dynamic extents need values");
  }
  template <class... I>
    requires(sizeof...(I) == sizeof...(Sizes))
  constexpr extents(I... values) : sizes{static_cast<Index>(values)...} {}
  constexpr Index extent(ulong i) const { return sizes[i]; }

  Index sizes[sizeof...(Sizes)] = {static_cast<Index>(Sizes)...};
};

}  // namespace mslc::metal4

namespace mslc {

template <class Index, ulong Rank>
struct DynamicExtents;
template <class Index>
struct DynamicExtents<Index, 1> {
  using type = metal4::extents<Index, metal4::dynamic_extent>;
};
template <class Index>
struct DynamicExtents<Index, 2> {
  using type = metal4::extents<Index, metal4::dynamic_extent, metal4::dynamic_extent>;
};

template <class T>
constexpr bool is_tensor = false;

// What the shim, and no kernel, uses of tensors.
struct TensorAccess {
  template <class Tensor>
  static auto data(const Tensor& tensor) {
    return tensor.data;
  }
  template <class Tensor>
  static auto strides(const Tensor& tensor) {
    return tensor.strides;
  }
  template <class Tensor>
  static auto bounds(const Tensor& tensor) {
    return tensor.bounds;
  }
  template <class Tensor>
  static auto& element(Tensor& cooperative, uint i) {
    return cooperative.elements[i];
  }
};

}  // namespace mslc

namespace mslc::metal4 {

template <class Index, ulong Rank>
using dextents = typename DynamicExtents<Index, Rank>::type;

struct tensor_inline {};  // made in a kernel from a pointer

template <class Element, class Extents, class Descriptor>
class tensor {
  static_assert(Extents::rank() == 2, "mslc has tensors of rank 2 only");
  static_assert(__is_same(Descriptor, tensor_inline), "mslc has tensors made of pointers only");

 public:
  using element_type = Element;
  using value_type = metal::remove_cv_t<metal::remove_addrspace_t<Element>>;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;
  using data_handle_type = Element*;

  tensor(Element* data, Extents sizes)
      : data(data), sizes(sizes), strides{1, sizes.extent(0)}, bounds(limit(sizes)) {}
  tensor(Element* data, Extents sizes, metal::array<index_type, 2> strides)
      : data(data), sizes(sizes), strides(strides), bounds(limit(sizes)) {}
  constexpr Extents extents() const { return sizes; }

  // A dynamic extent reaches to the end of the tensor.
  template <ulong X, ulong Y>
  auto slice(index_type x, index_type y) const {
    using Slice = metal4::extents<index_type, X, Y>;
    const Slice size(X == dynamic_extent ? sizes.extent(0) - x : static_cast<index_type>(X),
                     Y == dynamic_extent ? sizes.extent(1) - y : static_cast<index_type>(Y));
    const long offset = static_cast<long>(x) * strides[0] + static_cast<long>(y) * strides[1];
    return tensor<Element, Slice, Descriptor>(data + offset, size, strides,
                                              {bounds[0] - x, bounds[1] - y});
  }
  auto slice(index_type x, index_type y) const {
    return slice<dynamic_extent, dynamic_extent>(x, y);
  }

 private:
  template <class, class, class>
  friend class tensor;
  friend struct ::mslc::TensorAccess;

  // A slice remembers how far the tensor reaches, so that accesses beyond it are found.
  tensor(Element* data,
         Extents sizes,
         metal::array<index_type, 2> strides,
         metal::array<index_type, 2> bounds)
      : data(data), sizes(sizes), strides(strides), bounds(bounds) {}
  static metal::array<index_type, 2> limit(Extents sizes) {
    return {sizes.extent(0), sizes.extent(1)};
  }

  Element* data;
  Extents sizes;
  metal::array<index_type, 2> strides;
  metal::array<index_type, 2> bounds;
};

}  // namespace mslc::metal4

namespace mslc {

template <class E, class X, class D>
constexpr bool is_tensor<metal4::tensor<E, X, D>> = true;

}  // namespace mslc
