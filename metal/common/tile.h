// Tiles of matrices: from device memory into threadgroup memory, and as 8x8 fragments in the
// registers of a SIMD group.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

// Arrays of fragments stay in registers only where every index is known to the compiler.
#define MLX_ANVIL_UNROLL _Pragma("clang loop unroll(full)")

template <typename T>
using Fragment = metal::simdgroup_matrix<T, 8, 8>;

// A lane holds the elements (row, column) and (row, column + 1) of a fragment. The four lanes of a
// row differ in bits 0 and 3 of their index.
struct FragmentPlace {
  int row;
  int column;
};

inline FragmentPlace fragment_place(uint lane) {
  const uint quad = lane / 4;
  return {int((quad & 4) + lane / 2 % 4), int((quad & 2) * 2 + lane % 2 * 2)};
}

template <typename T>
thread metal::vec<T, 2>& elements_of(thread Fragment<T>& fragment) {
  return reinterpret_cast<thread metal::vec<T, 2>&>(fragment.thread_elements());
}

inline float row_sum(float x) {
  x += metal::simd_shuffle_xor(x, 1);
  return x + metal::simd_shuffle_xor(x, 8);
}

inline float row_max(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, 1));
  return metal::max(x, metal::simd_shuffle_xor(x, 8));
}

// The same elements in another format.
template <typename To, typename From>
Fragment<To> converted(thread Fragment<From>& from) {
  Fragment<To> to;
  elements_of(to) = metal::vec<To, 2>(elements_of(from));
  return to;
}

// A matrix in device memory. Elements outside of it count as 0.
template <typename T>
struct DeviceMatrix {
  const device T* data;
  long row_stride;
  long column_stride;
  int rows;
  int columns;
};

// The fragment at (row, column).
template <typename T>
Fragment<T> load_fragment(DeviceMatrix<T> from, int row, int column, FragmentPlace place) {
  row += place.row;
  column += place.column;
  const device T* at = from.data + row * from.row_stride + column * from.column_stride;
  metal::vec<T, 2> elements = metal::vec<T, 2>(T(0));
  if (row < from.rows && column < from.columns) {
    elements.x = at[0];
  }
  if (row < from.rows && column + 1 < from.columns) {
    elements.y = at[from.column_stride];
  }
  Fragment<T> fragment;
  elements_of(fragment) = elements;
  return fragment;
}

// Writes this lane's pair of the fragment at (row, column), where the matrix has it. With `pairs`,
// pairs are aligned and whole.
template <typename T>
void store_fragment(device T* to,
                    long row_stride,
                    int rows,
                    int columns,
                    int row,
                    int column,
                    FragmentPlace place,
                    float2 pair,
                    bool pairs) {
  row += place.row;
  column += place.column;
  if (row >= rows) {
    return;
  }
  to += row * row_stride + column;
  if (pairs) {
    if (column < columns) {
      *reinterpret_cast<device metal::vec<T, 2>*>(to) = metal::vec<T, 2>(pair);
    }
    return;
  }
  for (int e = 0; e < 2; ++e) {
    if (column + e < columns) {
      to[e] = static_cast<T>(pair[e]);
    }
  }
}

// Rows of a matrix in threadgroup memory. Sixteen bytes between rows keep the lanes that read one
// column of eight rows in different banks.
template <typename T, int kRows_, int kColumns_>
struct SharedTile {
  enum {
    kRows = kRows_,
    kColumns = kColumns_,
    kPack = 16 / sizeof(T),
    kStride = kColumns_ + kPack,
    kSize = kRows_ * kStride
  };

  // Rows [first, first + kRows), by all threads of the threadgroup together. With kVectors, rows
  // begin at multiples of 16 bytes, are dense, and are a whole number of packs long.
  template <int kThreads>
  static void stage(
      threadgroup T* tile, DeviceMatrix<T> from, int first, uint thread_index, bool vectors) {
    constexpr int kPacks = kColumns / kPack;
    for (int i = thread_index; i < kRows * kPacks; i += kThreads) {
      const int row = i / kPacks;
      const int column = i % kPacks * kPack;
      const bool inside = first + row < from.rows;
      const device T* source =
          from.data + (first + row) * from.row_stride + column * from.column_stride;
      threadgroup T* target = tile + row * kStride + column;
      if (vectors) {
        *reinterpret_cast<threadgroup uint4*>(target) =
            inside && column < from.columns ? *reinterpret_cast<const device uint4*>(source)
                                            : uint4(0);
      } else {
        for (int c = 0; c < kPack; ++c) {
          target[c] = inside && column + c < from.columns ? source[c * from.column_stride] : T(0);
        }
      }
    }
  }

  // The fragment whose first row and column are these, or its transpose.
  static Fragment<T> fragment(const threadgroup T* tile, int row, int column) {
    Fragment<T> result;
    metal::simdgroup_load(result, tile + row * kStride + column, kStride);
    return result;
  }
  static Fragment<T> transposed(const threadgroup T* tile, int row, int column) {
    Fragment<T> result;
    metal::simdgroup_load(result, tile + row * kStride + column, kStride, ulong2(0), true);
    return result;
  }
};
