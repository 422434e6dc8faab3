// Loops over rows in blocks, whose last one may be partial, and arithmetic on blocks. For kernel
// files only (see simd.h).
#pragma once

#include <type_traits>

#include "common/simd/math.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Calls body(first column, partial) for every block of [begin, end). `partial` marks a last,
// partial block.
template <class Body>
inline void for_each_block(int64_t begin, int64_t end, Body body) {
  int64_t column = begin;
  for (; column + kBlock <= end; column += kBlock) {
    body(column, std::false_type{});
  }
  if (column < end) {
    body(column, std::true_type{});
  }
}

// Calls body with `value` as a compile-time constant. With a runtime test per block, the compiler
// would keep the blocks that depend on it in memory instead of registers.
template <class Body>
inline void with_constant(bool value, Body body) {
  if (value) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// Loads the last columns of a row, padded with zeros.
template <class T>
inline Block load_rest(const T* from, int64_t count) {
  T padded[kBlock] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_block(padded);
}

template <bool kRest, class T>
inline Block load_columns(const T* from, int64_t count) {
  if constexpr (kRest) {
    return load_rest(from, count);
  } else {
    return load_block(from);
  }
}

template <class T>
inline void store_rest(T* to, int64_t count, Block x) {
  T padded[kBlock];
  store_block<false>(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

template <bool kRest, class T>
inline void store_columns(T* to, int64_t count, Block x) {
  if constexpr (kRest) {
    store_rest(to, count, x);
  } else {
    store_block<false>(to, x);
  }
}

// ---- arithmetic on blocks -----------------------------------------------------------------------

inline Block operator+(Block a, Block b) {
  return {a.first + b.first, a.second + b.second};
}
inline Block operator-(Block a, Block b) {
  return {a.first - b.first, a.second - b.second};
}
inline Block operator*(Block a, Block b) {
  return {a.first * b.first, a.second * b.second};
}
inline Block operator*(Block a, float b) {
  return {a.first * b, a.second * b};
}
inline Block operator-(Block a, float b) {
  return {a.first - b, a.second - b};
}

template <class T>
inline Block silu(Block x) {
  return {silu<kAccuracyOf<T>>(x.first), silu<kAccuracyOf<T>>(x.second)};
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
