// Matrix types, float2x2 to float4x4 and half2x2 to half4x4, and <metal_matrix>.
//
// matrix<T, Columns, Rows> is an array of column vectors, with their alignment and padding.
#pragma once

#include "geometric.h"

namespace metal {

template <class T, int Columns, int Rows = Columns>
struct matrix {
  static_assert(is_floating_point_v<T>, "a matrix has elements of a floating-point type");
  using Column = vec<T, Rows>;
  static constexpr bool is_square = Columns == Rows;

  matrix() = default;
  // Makes a diagonal matrix.
  constexpr explicit matrix(T diagonal) : columns{} {
    for (int i = 0; i < Columns && i < Rows; ++i) columns[i][i] = diagonal;
  }
  template <class U>
    requires(!__is_same(U, T))
  constexpr explicit matrix(const matrix<U, Columns, Rows>& other) : columns{} {
    for (int i = 0; i < Columns; ++i) columns[i] = mslc::make<Column>(other[i]);
  }
  // Takes column vectors, or all elements in column-major order.
  template <class... A>
    requires(sizeof...(A) == Columns && ((mslc::length_of<A> == Rows) && ...))
  constexpr matrix(A... column) : columns{mslc::make<Column>(column)...} {}
  template <class... A>
    requires(sizeof...(A) == Columns * Rows && (mslc::is_arithmetic<A> && ...))
  constexpr matrix(A... element) : columns{} {
    int i = 0;
    ((columns[i / Rows][i % Rows] = mslc::convert_scalar<T>(element), ++i), ...);
  }

  constexpr Column& operator[](int i) { return columns[i]; }
  constexpr const Column& operator[](int i) const { return columns[i]; }

  constexpr matrix operator-() const {
    return map([](Column a) { return -a; }, *this);
  }
  friend constexpr matrix operator+(const matrix& a, const matrix& b) {
    return map([](Column x, Column y) { return x + y; }, a, b);
  }
  friend constexpr matrix operator-(const matrix& a, const matrix& b) {
    return map([](Column x, Column y) { return x - y; }, a, b);
  }
  friend constexpr matrix operator*(const matrix& a, T b) {
    return map([=](Column x) { return x * b; }, a);
  }
  friend constexpr matrix operator*(T a, const matrix& b) { return b * a; }
  // Treats the vector as a column.
  friend constexpr Column operator*(const matrix& a, vec<T, Columns> b) {
    Column sum = a[0] * b[0];
    for (int i = 1; i < Columns; ++i) sum += a[i] * b[i];
    return sum;
  }
  // Treats the vector as a row.
  friend constexpr vec<T, Columns> operator*(Column a, const matrix& b) {
    vec<T, Columns> row = {};
    for (int i = 0; i < Columns; ++i) row[i] = dot(a, b[i]);
    return row;
  }
  template <int Others>
  friend constexpr matrix<T, Others, Rows> operator*(const matrix& a,
                                                     const matrix<T, Others, Columns>& b) {
    matrix<T, Others, Rows> product;
    for (int i = 0; i < Others; ++i) product[i] = a * b[i];
    return product;
  }

  constexpr matrix& operator+=(const matrix& b) { return *this = *this + b; }
  constexpr matrix& operator-=(const matrix& b) { return *this = *this - b; }
  constexpr matrix& operator*=(T b) { return *this = *this * b; }
  constexpr matrix& operator*=(const matrix& b)
    requires is_square
  {
    return *this = *this * b;
  }

  Column columns[Columns];

 private:
  template <class Function, class... M>
  static constexpr matrix map(Function function, const M&... matrices) {
    matrix result;
    for (int i = 0; i < Columns; ++i) result[i] = function(matrices[i]...);
    return result;
  }
};

template <class T, int Columns, int Rows>
MSLC_INLINE matrix<T, Rows, Columns> transpose(const matrix<T, Columns, Rows>& m) {
  matrix<T, Rows, Columns> result;
  for (int i = 0; i < Columns; ++i)
    for (int j = 0; j < Rows; ++j) result[j][i] = m[i][j];
  return result;
}

template <class T>
MSLC_INLINE T determinant(const matrix<T, 2, 2>& m) {
  return m[0][0] * m[1][1] - m[1][0] * m[0][1];
}
template <class T>
MSLC_INLINE T determinant(const matrix<T, 3, 3>& m) {
  return dot(m[0], cross(m[1], m[2]));
}
// Laplace expansion along the upper two rows: sums products of the minors of columns i, j above and
// of the other two columns below.
template <class T>
MSLC_INLINE T determinant(const matrix<T, 4, 4>& m) {
  auto upper = [&](int i, int j) { return m[i][0] * m[j][1] - m[j][0] * m[i][1]; };
  auto lower = [&](int i, int j) { return m[i][2] * m[j][3] - m[j][2] * m[i][3]; };
  return upper(0, 1) * lower(2, 3) - upper(0, 2) * lower(1, 3) + upper(0, 3) * lower(1, 2) +
         upper(1, 2) * lower(0, 3) - upper(1, 3) * lower(0, 2) + upper(2, 3) * lower(0, 1);
}

#define MSLC_MATRIX_NAMES(T)      \
  using T##2x2 = matrix<T, 2, 2>; \
  using T##2x3 = matrix<T, 2, 3>; \
  using T##2x4 = matrix<T, 2, 4>; \
  using T##3x2 = matrix<T, 3, 2>; \
  using T##3x3 = matrix<T, 3, 3>; \
  using T##3x4 = matrix<T, 3, 4>; \
  using T##4x2 = matrix<T, 4, 2>; \
  using T##4x3 = matrix<T, 4, 3>; \
  using T##4x4 = matrix<T, 4, 4>;
MSLC_MATRIX_NAMES(float)
MSLC_MATRIX_NAMES(half)
#undef MSLC_MATRIX_NAMES

}  // namespace metal
