// 8x8x8 multiplication on mma.sync.
//
// One 8x8x8 product fills the upper half of an m16n8k8. This file emits pseudo-instructions,
// `mslc.mma.<type> {d}, {a}, {b}, {c};`, which ptx_matrix.py replaces: two of them that share b
// become one m16n8k8, and two of those in sequence one m16n8k16.
//
// The exchanges that rearrange b look like pure functions to the compiler (not volatile, not
// convergent), so a fragment used many times is transposed once. They stay with the product that
// uses them, which is convergent. If the second operand was loaded transposed, ptx_matrix.py
// removes the pair of transposes.
#pragma once

namespace mslc {

// Row and column of a lane's first element.
MSLC_INLINE uint matrix_row(uint lane) {
  const uint quad = lane / 4;
  return (quad & 4) + lane / 2 % 4;
}
MSLC_INLINE uint matrix_column(uint lane) {
  const uint quad = lane / 4;
  return (quad & 2) * 2 + lane % 2 * 2;
}

using MatrixPair = metal::vec<float, 2>;

// ---- 16-bit elements: exact products, accumulated in float

// mma.sync expects columns of the second operand where a Metal fragment has rows.
MSLC_INLINE uint transpose_16bit(uint pair) {
  uint result;
  [[clang::noconvergent]] __asm__(
      "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

template <class T>
constexpr bool transposes_in_registers = sizeof(T) == 2;
template <class T>
MSLC_INLINE metal::vec<T, 2> transposed(metal::vec<T, 2> pair) {
  return __builtin_bit_cast(metal::vec<T, 2>, transpose_16bit(__builtin_bit_cast(uint, pair)));
}

// Loads a matrix of 16-bit elements from threadgroup memory with ldmatrix: eight lanes supply row
// addresses, and the unit distributes the elements. Returns false and emits no code unless the
// compiler can prove that rows are 16-byte aligned. ptx_ldmatrix.py merges four loads.
template <class T>
MSLC_INLINE bool load_rows(metal::vec<T, 2>& elements,
                           const threadgroup T* first,
                           ulong stride,
                           bool transpose) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    // Test the address without the lane's row offset: the compiler looks back only a few steps.
    const bool aligned = reinterpret_cast<ulong>(first) % 16 == 0 && stride * sizeof(T) % 16 == 0;
    if (!__builtin_constant_p(aligned) || !aligned) return false;
    const threadgroup T* row = first + hardware_lane() % 8 * stride;
    uint pair;
    if (transpose)
      __asm__ volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                       : "=r"(pair)
                       : "l"(row)
                       : "memory");
    else
      __asm__ volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                       : "=r"(pair)
                       : "l"(row)
                       : "memory");
    elements = __builtin_bit_cast(metal::vec<T, 2>, pair);
    return true;
  }
}

template <class T>
MSLC_INLINE MatrixPair multiply_16bit(metal::vec<T, 2> a, metal::vec<T, 2> b, MatrixPair c) {
  const uint rows = __builtin_bit_cast(uint, a);
  const uint columns = transpose_16bit(__builtin_bit_cast(uint, b));
  float d0, d1;
  if constexpr (__is_same(T, half))
    __asm__("mslc.mma.f16 {%0, %1}, {%2}, {%3}, {%4, %5};"
            : "=f"(d0), "=f"(d1)
            : "r"(rows), "r"(columns), "f"(c.x), "f"(c.y));
  else
    __asm__("mslc.mma.bf16 {%0, %1}, {%2}, {%3}, {%4, %5};"
            : "=f"(d0), "=f"(d1)
            : "r"(rows), "r"(columns), "f"(c.x), "f"(c.y));
  return {d0, d1};
}

// ---- float elements: split into two tf32 parts; the low parts' product is below rounding
// ---------

MSLC_INLINE float to_tf32(float x) {
  return __builtin_bit_cast(float, __nvvm_f2tf32_rna(x));
}
// Returns the rounding error of to_tf32(x) = high, or 0 for an infinite x.
MSLC_INLINE float tf32_rest(float x, float high) {
  return __builtin_fabsf(high) < __builtin_inff() ? to_tf32(x - high) : 0.0f;
}

// Renumbers k (slot t is 2t, slot t + 4 is 2t + 1), so that a lane's pair matches the first
// operand. The second operand comes from the lanes that hold rows 2t and 2t + 1 of column g.
MSLC_INLINE float exchange_column(float x, float y, uint row) {
  const uint h = hardware_lane(), group = h >> 2;
  const uint source = row << 2 | group >> 1;
  float first, second;
  [[clang::noconvergent]] __asm__(
      "shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(first) : "f"(x), "r"(source));
  [[clang::noconvergent]] __asm__(
      "shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(second) : "f"(y), "r"(source));
  return group & 1 ? second : first;
}

MSLC_INLINE MatrixPair multiply_tf32(MatrixPair a, MatrixPair b, MatrixPair c) {
  using Bits = metal::vec<uint, 2>;
  const Bits rows = __builtin_bit_cast(Bits, a), columns = __builtin_bit_cast(Bits, b);
  float d0, d1;
  __asm__("mslc.mma.tf32 {%0, %1}, {%2, %3}, {%4, %5}, {%6, %7};"
          : "=f"(d0), "=f"(d1)
          : "r"(rows.x), "r"(rows.y), "r"(columns.x), "r"(columns.y), "f"(c.x), "f"(c.y));
  return {d0, d1};
}

// `sum` adds the products with low parts to `before`. For an infinite factor they are infinite or
// NaN (0 * infinity) whatever the product of the factors themselves, so they are dropped.
MSLC_INLINE float unless_spoilt(float sum, float before) {
  return __builtin_fabsf(sum) < __builtin_inff() ? sum : before;
}

template <class A, class B>
MSLC_INLINE MatrixPair multiply_float(metal::vec<A, 2> a, metal::vec<B, 2> b, MatrixPair c) {
  const float x = static_cast<float>(b.x), y = static_cast<float>(b.y);
  const uint row = hardware_lane() % 4 * 2;
  const MatrixPair rows = {static_cast<float>(a.x), static_cast<float>(a.y)};
  const MatrixPair columns = {exchange_column(x, y, row), exchange_column(x, y, row + 1)};
  const MatrixPair rows_high = {to_tf32(rows.x), to_tf32(rows.y)};
  const MatrixPair columns_high = {to_tf32(columns.x), to_tf32(columns.y)};
  // half and bfloat are exact in tf32.
  MatrixPair sum = c;
  if constexpr (sizeof(A) == 4) {
    const MatrixPair rest = {tf32_rest(rows.x, rows_high.x), tf32_rest(rows.y, rows_high.y)};
    sum = multiply_tf32(rest, columns_high, sum);
  }
  if constexpr (sizeof(B) == 4) {
    const MatrixPair rest = {tf32_rest(columns.x, columns_high.x),
                             tf32_rest(columns.y, columns_high.y)};
    sum = multiply_tf32(rows_high, rest, sum);
  }
  if constexpr (sizeof(A) == 4 || sizeof(B) == 4)
    sum = {unless_spoilt(sum.x, c.x), unless_spoilt(sum.y, c.y)};
  return multiply_tf32(rows_high, columns_high, sum);
}

template <class D, class A, class B, class C>
MSLC_INLINE metal::vec<D, 2> matrix_multiply_accumulate(metal::vec<A, 2> a,
                                                        metal::vec<B, 2> b,
                                                        metal::vec<C, 2> c,
                                                        const Site*) {
  static_assert(lanes_are_permuted || sizeof(A) == 0, "compiled as a file without matrices");
  const MatrixPair start = {static_cast<float>(c.x), static_cast<float>(c.y)};
  MatrixPair d;
  if constexpr (__is_same(A, B) && sizeof(A) == 2)
    d = multiply_16bit<A>(a, b, start);
  else
    d = multiply_float<A, B>(a, b, start);
  return {static_cast<D>(d.x), static_cast<D>(d.y)};
}

}  // namespace mslc
