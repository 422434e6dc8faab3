// <metal_simdgroup_matrix>: 8x8 matrices distributed over the lanes of a SIMD group.
//
// A lane holds two neighbouring elements of one row:
//   quad = lane / 4, row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2.
#pragma once

#include "simdgroup.h"

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix;

template <class T>
struct simdgroup_matrix<T, 8, 8> {
  using storage_type = vec<T, 2>;

  simdgroup_matrix() = default;
  // Makes a diagonal matrix.
  explicit simdgroup_matrix(T diagonal) {
    const uint row = mslc::matrix_row(mslc::lane_id());
    const uint column = mslc::matrix_column(mslc::lane_id());
    elements = storage_type{row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0)};
  }

  thread storage_type& thread_elements() { return elements; }
  const thread storage_type& thread_elements() const { return elements; }

  storage_type elements;
};

using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

template <class T, int Rows, int Columns = Rows>
MSLC_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> matrix;
  matrix.elements = value;
  return matrix;
}

}  // namespace metal

namespace mslc {

// Offsets of a lane's elements in memory, from the first element of the matrix.
struct MatrixOffsets {
  long first;
  long step;  // from the first element to the second
};

MSLC_INLINE MatrixOffsets matrix_offsets(ulong stride, metal::ulong2 origin, bool transpose) {
  const long row = matrix_row(lane_id()), column = matrix_column(lane_id());
  const long x = static_cast<long>(origin.x) + (transpose ? row : column);
  const long y = static_cast<long>(origin.y) + (transpose ? column : row);
  const long across = static_cast<long>(stride);
  return {y * across + x, transpose ? across : 1};
}

template <class T, class P>
MSLC_INLINE void load_matrix(metal::simdgroup_matrix<T, 8, 8>& matrix,
                             P source,
                             ulong stride,
                             metal::ulong2 origin,
                             bool transpose) {
  // Neighbours in memory can be one load, so transpose in registers if that is cheap.
  constexpr bool in_registers = transposes_in_registers<T>;
  const MatrixOffsets at = matrix_offsets(stride, origin, transpose && !in_registers);
  for (uint i = 0; i < 2; ++i) matrix.elements[i] = source[at.first + i * at.step];
  if constexpr (in_registers) {
    if (transpose) matrix.elements = transposed(matrix.elements);
  }
}
template <class T, class P>
MSLC_INLINE void store_matrix(const metal::simdgroup_matrix<T, 8, 8>& matrix,
                              P destination,
                              ulong stride,
                              metal::ulong2 origin,
                              bool transpose) {
  const MatrixOffsets at = matrix_offsets(stride, origin, transpose);
  for (uint i = 0; i < 2; ++i) destination[at.first + i * at.step] = matrix.elements[i];
}

}  // namespace mslc

namespace metal {

template <class T>
MSLC_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix,
                                const device T* source,
                                ulong elements_per_row = 8,
                                ulong2 origin = 0,
                                bool transpose = false) {
  mslc::load_matrix(matrix, source, elements_per_row, origin, transpose);
}
template <class T>
MSLC_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix,
                                const threadgroup T* source,
                                ulong elements_per_row = 8,
                                ulong2 origin = 0,
                                bool transpose = false) {
  const threadgroup T* first = source + origin.y * elements_per_row + origin.x;
  if (mslc::load_rows(matrix.elements, first, elements_per_row, transpose)) return;
  mslc::load_matrix(matrix, source, elements_per_row, origin, transpose);
}
template <class T>
MSLC_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix,
                                 device T* destination,
                                 ulong elements_per_row = 8,
                                 ulong2 origin = 0,
                                 bool transpose = false) {
  mslc::store_matrix(matrix, destination, elements_per_row, origin, transpose);
}
template <class T>
MSLC_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix,
                                 threadgroup T* destination,
                                 ulong elements_per_row = 8,
                                 ulong2 origin = 0,
                                 bool transpose = false) {
  mslc::store_matrix(matrix, destination, elements_per_row, origin, transpose);
}

template <class D, class A, class B, class C>
MSLC_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                               const simdgroup_matrix<A, 8, 8>& a,
                                               const simdgroup_matrix<B, 8, 8>& b,
                                               const simdgroup_matrix<C, 8, 8>& c,
                                               MSLC_SITE) {
  d.elements = mslc::matrix_multiply_accumulate<D>(a.elements, b.elements, c.elements, site);
}
template <class D, class A, class B>
MSLC_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                                    const simdgroup_matrix<A, 8, 8>& a,
                                    const simdgroup_matrix<B, 8, 8>& b,
                                    MSLC_SITE) {
  d.elements = mslc::matrix_multiply_accumulate<D>(a.elements, b.elements, vec<D, 2>(D(0)), site);
}

template <class T>
MSLC_INLINE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                                const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> product;
  simdgroup_multiply(product, a, b);
  return product;
}

}  // namespace metal
