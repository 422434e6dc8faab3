// Matrix tiles in threadgroup memory, 8x8 fragments in the registers of a simdgroup, and the
// transfers between them.
//
// A fragment distributes an 8x8 matrix over the 32 lanes of a simdgroup: each lane holds two
// adjacent elements of one row. Loads and stores take a pointer to the lane's first element
// (FragmentPlace), unless they say otherwise.
//
// Arrays of fragments stay in registers only if every index is a compile-time constant. So all
// functions here are METAL_FUNC (always inlined), and loops over fragments are MLX_ANVIL_UNROLL.
#pragma once

#include <metal_stdlib>

#include "metal/common/async_copy.h"
#include "metal/common/unroll.h"

template <typename T>
using Fragment = metal::simdgroup_matrix<T, 8, 8>;

template <typename T>
using Pair = metal::vec<T, 2>;

// Position of a lane's two elements in its fragment: (row, column) and (row, column + 1).
struct FragmentPlace {
  short row;
  short column;
};

METAL_FUNC FragmentPlace fragment_place(uint lane) {
  const short quad = lane / 4;
  return {short((quad & 4) + (lane / 2) % 4), short((quad & 2) * 2 + (lane % 2) * 2)};
}

template <typename T>
METAL_FUNC Pair<T> elements_of(Fragment<T> frag) {
  return Pair<T>(frag.thread_elements()[0], frag.thread_elements()[1]);
}

template <typename T>
METAL_FUNC Fragment<T> fragment_of(T first, T second) {
  Fragment<T> frag;
  frag.thread_elements()[0] = first;
  frag.thread_elements()[1] = second;
  return frag;
}

template <typename T>
METAL_FUNC Fragment<T> fragment_of(float2 elements) {
  return fragment_of<T>(static_cast<T>(elements.x), static_cast<T>(elements.y));
}

// Of the bits of a Pair<T>.
template <typename T>
METAL_FUNC Fragment<T> fragment_of_pair(uint bits) {
  const Pair<T> pair = as_type<Pair<T> >(bits);
  return fragment_of<T>(pair.x, pair.y);
}

// Returns the lane that holds (row, column). This is the inverse of fragment_place.
METAL_FUNC ushort lane_of(short row, short column) {
  return ushort(column / 2 % 2 | row % 4 << 1 | column / 4 << 3 | row / 4 << 4);
}

// Transposes a fragment of 16-bit elements by exchanging them between lanes. In PTX this costs no
// instruction for the second operand of a product, which the matrix unit expects transposed.
template <typename T>
METAL_FUNC Fragment<T> transposed(Fragment<T> frag, FragmentPlace place) {
  static_assert(sizeof(T) == 2, "a pair is a word");
#ifdef __MSLC_PTX__
  frag.thread_elements() = mslc::transposed(elements_of(frag));
  return frag;
#else
  const uint pair = as_type<uint>(elements_of(frag));
  const Pair<T> first =
      as_type<Pair<T> >(metal::simd_shuffle(pair, lane_of(place.column, place.row)));
  const Pair<T> second =
      as_type<Pair<T> >(metal::simd_shuffle(pair, lane_of(place.column + 1, place.row)));
  return fragment_of<T>(first[place.row % 2], second[place.row % 2]);
#endif
}

// The lanes of one fragment row differ in bits 0 and 3 of the lane index.
METAL_FUNC float row_max(float x) {
  x = metal::fmax(x, metal::simd_shuffle_xor(x, ushort(1)));
  return metal::fmax(x, metal::simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float row_sum(float x) {
  x += metal::simd_shuffle_xor(x, ushort(1));
  return x + metal::simd_shuffle_xor(x, ushort(8));
}

// The lanes of one fragment column differ in bits 1, 2 and 4.
METAL_FUNC float column_max(float x) {
  x = metal::fmax(x, metal::simd_shuffle_xor(x, ushort(2)));
  x = metal::fmax(x, metal::simd_shuffle_xor(x, ushort(4)));
  return metal::fmax(x, metal::simd_shuffle_xor(x, ushort(16)));
}

METAL_FUNC float column_sum(float x) {
  x += metal::simd_shuffle_xor(x, ushort(2));
  x += metal::simd_shuffle_xor(x, ushort(4));
  return x + metal::simd_shuffle_xor(x, ushort(16));
}

// ---- threadgroup memory

// Row stride of a tile in threadgroup memory, in elements. A row is an odd number of 16-byte units,
// so that neither a fragment load nor a transposed one has bank conflicts. Declare tiles
// alignas(16): their element type promises less.
template <typename T, int kColumns>
struct TileRow {
  enum {
    kUnit = 16 / sizeof(T),
    kUnits = (kColumns + kUnit - 1) / kUnit,
    kStride = (kUnits + 1 - kUnits % 2) * kUnit,
  };
};

// `from` points to the lane's element (row, column). Even columns of a tile are aligned for a pair.
template <typename T>
METAL_FUNC Fragment<T> load_fragment(const threadgroup T* from) {
  const Pair<T> pair = *reinterpret_cast<const threadgroup Pair<T>*>(from);
  return fragment_of<T>(pair.x, pair.y);
}

// PTX has an instruction that loads a matrix of 16-bit elements. On other targets each lane loads
// its own elements, whose addresses are one for the lane and constants.
#ifdef __MSLC_PTX__
#define MLX_ANVIL_LOADS_MATRICES true
#else
#define MLX_ANVIL_LOADS_MATRICES false
#endif

// Loads the transpose of the 8x8 block at element `at` of `tile`. One by one costs 32-bit types
// nothing extra. It costs 16-bit types more instructions in PTX, but fewer registers.
template <typename T, bool kOneByOne = sizeof(T) == 4>
METAL_FUNC Fragment<T> load_transposed(const threadgroup T* tile,
                                       int at,
                                       int stride,
                                       FragmentPlace place) {
  if (kOneByOne || !MLX_ANVIL_LOADS_MATRICES) {
    const threadgroup T* own = tile + (place.column * stride + place.row);
    return fragment_of<T>(own[at], own[at + stride]);
  }
  Fragment<T> frag;
  metal::simdgroup_load(frag, tile + at, stride, ulong2(0), /*transpose=*/true);
  return frag;
}

// Loads the 8x8 block at element `at` of `tile`.
template <typename T>
METAL_FUNC Fragment<T> load_block(const threadgroup T* tile,
                                  int at,
                                  int stride,
                                  FragmentPlace place) {
  if (sizeof(T) == 4 || !MLX_ANVIL_LOADS_MATRICES) {
    const threadgroup T* own = tile + (place.row * stride + place.column);
    return load_fragment(own + at);
  }
  Fragment<T> frag;
  metal::simdgroup_load(frag, tile + at, stride);
  return frag;
}

template <typename T>
METAL_FUNC void store_fragment(threadgroup T* to, Fragment<T> frag) {
  *reinterpret_cast<threadgroup Pair<T>*>(to) = elements_of(frag);
}

// ---- device memory

// Rows of an operand in device memory. Strides are in elements.
template <typename T>
struct Rows {
  const device T* data;
  long row_stride;
  long column_stride;
  int rows;     // rows past this count read as zero
  int columns;  // likewise for columns
};

// Returns the rows from `first` on.
template <typename T>
METAL_FUNC Rows<T> rows_from(Rows<T> all, int first) {
  all.data += first * all.row_stride;
  all.rows -= first;
  return all;
}

// What transfers below may be promised of rows:
//   vectors   rows start at multiples of 16 bytes and are whole numbers of them, column_stride
//             is 1, and offsets within a tile are less than 2^31 elements
//   full      rows have as many columns as the tile
//
// Apple's GPUs add a 32-bit offset to an address for free, but take several instructions for a
// 64-bit sum. So start from the tile's first row (rows_from) if there are vectors.

// Goes on to the next kRows rows, in a loop over tiles. A product with the tile's number would be
// of 64 bits, and so would the number be.
template <int kRows, typename T>
METAL_FUNC void advance(thread Rows<T>& rows, bool vectors) {
  rows.data += vectors ? kRows * int(rows.row_stride) : kRows * rows.row_stride;
  rows.rows -= kRows;
}

// Returns the vector at (row, column), zero outside the rows, of which there is at least one. The
// address is clamped and the value selected, since a branch for each load costs more.
template <typename Vector, typename T>
METAL_FUNC Vector load_vector(Rows<T> from, int row, int column, bool full) {
  // Indices count vectors, since a load scales its offset by what it loads.
  enum { kSize = sizeof(Vector) / sizeof(T), kShift = kSize == 8 ? 3 : kSize / 2 };
  const int nearest = metal::min(row, from.rows - 1);
  const int leftmost = full ? column : metal::min(column, from.columns - int(kSize));
  const bool exists = row == nearest && column == leftmost;
  const int at = nearest * (int(from.row_stride) >> kShift) + (leftmost >> kShift);
  const Vector found = reinterpret_cast<const device Vector*>(from.data)[at];
  return exists ? found : Vector(0);
}

// One thread's share of a tile, in registers between device and threadgroup memory. All loads are
// issued before the first is used. Rows in threadgroup memory are TileRow::kStride apart.
template <typename T, int kRows, int kColumns, int kThreads>
struct TileShare {
  enum { kStride = TileRow<T, kColumns>::kStride, kUnit = 16 / sizeof(T) };
  enum { kUnits = kColumns / kUnit, kAll = kRows * kUnits };
  enum { kCount = (kAll + kThreads - 1) / kThreads };
  static_assert(kColumns % kUnit == 0, "whole vectors");
  uint4 vectors[kCount];

  METAL_FUNC void load(Rows<T> from, bool full, uint thread_index) thread {
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const Place place = place_of(j, thread_index);
      vectors[j] = load_vector<uint4>(from, place.row, place.column, full);
    }
  }

  METAL_FUNC void store(threadgroup T* to, uint thread_index) const thread {
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      if (is_of_tile(j, thread_index)) {
        *target(j, to, thread_index) = vectors[j];
      }
    }
  }

  // Loads and stores in one step, with asynchronous copies (async_copy.h).
  METAL_FUNC static void start_copies(threadgroup T* to, Rows<T> from, uint thread_index) {
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      if (is_of_tile(j, thread_index)) {
        const Place place = place_of(j, thread_index);
        start_copy(target(j, to, thread_index), source(j, from, thread_index),
                   place.row < from.rows && place.column < from.columns);
      }
    }
  }

 private:
  // If the units of a row divide kThreads, all of a thread's units share a column, and its rows are
  // kStep apart.
  enum { kStep = kThreads % kUnits == 0 ? kThreads / kUnits : 0 };

  struct Place {
    int row;
    int column;
  };

  METAL_FUNC static bool is_of_tile(int j, uint thread_index) {
    return kAll % kThreads == 0 || int(thread_index) + j * kThreads < kAll;
  }

  METAL_FUNC static Place place_of(int j, uint thread_index) {
    if (kStep > 0) {
      return {int(thread_index / kUnits) + j * kStep, int(thread_index % kUnits * kUnit)};
    }
    const uint i = thread_index + j * kThreads;
    return {int(i / kUnits), int(i % kUnits * kUnit)};
  }

  METAL_FUNC static threadgroup uint4* target(int j, threadgroup T* to, uint thread_index) {
    const Place place = place_of(j, thread_index);
    return reinterpret_cast<threadgroup uint4*>(to + (place.row * kStride + place.column));
  }

  // One base address and a step replace kCount 64-bit addresses, of two registers each.
  METAL_FUNC static const device uint4* source(int j, Rows<T> from, uint thread_index) {
    const Place place = place_of(kStep > 0 ? 0 : j, thread_index);
    const device T* at = from.data + place.row * from.row_stride + place.column;
    return reinterpret_cast<const device uint4*>(at +
                                                 (kStep > 0 ? j * kStep * from.row_stride : 0));
  }
};

// Copies rows [0, kRows) to threadgroup memory with kThreads threads.
template <typename T, int kRows, int kColumns, int kThreads>
METAL_FUNC void copy_tile(
    threadgroup T* to, Rows<T> from, bool vectors, uint thread_index, bool full = false) {
  enum { kStride = TileRow<T, kColumns>::kStride, kUnit = 16 / sizeof(T) };
  if (vectors) {
    enum { kUnits = kColumns / kUnit };
    static_assert(kColumns % kUnit == 0, "whole vectors");
    for (uint i = thread_index; i < kRows * kUnits; i += kThreads) {
      const int row = i / kUnits, column = i % kUnits * kUnit;
      *reinterpret_cast<threadgroup uint4*>(to + (row * kStride + column)) =
          load_vector<uint4>(from, row, column, full);
    }
  } else {
    for (int i = thread_index; i < kRows * kColumns; i += kThreads) {
      const int row = i / kColumns, column = i % kColumns;
      const bool exists = row < from.rows && column < from.columns;
      to[row * kStride + column] =
          exists ? from.data[row * from.row_stride + column * from.column_stride] : T(0);
    }
  }
}

// What a pair is moved as: one selection instead of two.
template <int kSize>
struct PairBits {
  using Type = uint;
};
template <>
struct PairBits<4> {
  using Type = uint2;
};

// Returns the pair at (row, column) of `from`, zero outside it.
template <typename T>
METAL_FUNC Pair<T> load_pair(Rows<T> from, int row, int column, bool vectors, bool full) {
  if (vectors) {
    return as_type<Pair<T> >(
        load_vector<typename PairBits<sizeof(T)>::Type>(from, row, column, full));
  }
  Pair<T> pair = Pair<T>(T(0));
  if (row < from.rows) {
    const device T* at = from.data + row * from.row_stride;
    if (column < from.columns) {
      pair.x = at[column * from.column_stride];
    }
    if (column + 1 < from.columns) {
      pair.y = at[(column + 1) * from.column_stride];
    }
  }
  return pair;
}

// Stores a lane's pair into a row of `columns` columns.
template <typename T>
METAL_FUNC void store_pair(
    device T* row, int column, int columns, float2 pair, bool vectors, bool full) {
  if (vectors) {
    if (full || column < columns) {
      *reinterpret_cast<device Pair<T>*>(row + column) =
          Pair<T>(static_cast<T>(pair.x), static_cast<T>(pair.y));
    }
  } else {
    if (column < columns) {
      row[column] = static_cast<T>(pair.x);
    }
    if (column + 1 < columns) {
      row[column + 1] = static_cast<T>(pair.y);
    }
  }
}
