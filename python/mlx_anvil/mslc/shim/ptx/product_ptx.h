// Products of four SIMD groups, the hardware's warpgroup (wgmma, compute capability 9.0a). Metal
// has no equivalent; kernels use them through metal/common/group_product.h. mslc names their target
// in the module (ptx.py).
//
// A SIMD group's 16 rows of the sum and of the left operand are two rows of Metal fragments: a lane
// has the elements that the instruction wants of it (lanes_ptx.h).
#pragma once

namespace mslc {

// An operand in threadgroup memory as the instruction finds it: panels of 64 columns, rows of 128
// bytes, whose units of 16 bytes are permuted by the row's number modulo 8.
constexpr ulong eight_rows = 1024;  // bytes
MSLC_INLINE ulong tile_descriptor(uint address, ulong panel_bytes) {
  constexpr ulong swizzles_128_bytes = 1ul << 62;
  return (address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16 | eight_rows >> 4 << 32 |
         swizzles_128_bytes;
}

#define MSLC_SUMS_16(use, b)                                                                      \
  use(d[b]), use(d[b + 1]), use(d[b + 2]), use(d[b + 3]), use(d[b + 4]), use(d[b + 5]),           \
      use(d[b + 6]), use(d[b + 7]), use(d[b + 8]), use(d[b + 9]), use(d[b + 10]), use(d[b + 11]), \
      use(d[b + 12]), use(d[b + 13]), use(d[b + 14]), use(d[b + 15])
#define MSLC_SUMS_64(use, b)                                                  \
  MSLC_SUMS_16(use, b), MSLC_SUMS_16(use, b + 16), MSLC_SUMS_16(use, b + 32), \
      MSLC_SUMS_16(use, b + 48)
#define MSLC_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MSLC_NAMES_32 \
  MSLC_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MSLC_NAMES_48 \
  MSLC_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MSLC_NAMES_64 \
  MSLC_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MSLC_NAMES_96                                                                       \
  MSLC_NAMES_64                                                                             \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MSLC_NAMES_128                                                                       \
  MSLC_NAMES_96                                                                              \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "     \
  "%125, %126, %127"

// d = a b + (adds ? d : 0), for 64 rows, 16 columns of a, and as many columns of b as d has. `a` is
// in registers or in a tile.
#define MSLC_PRODUCT_OF(type, columns, names, ...)                                                \
  if constexpr (__is_same(Left, ulong))                                                           \
    __asm__ volatile(                                                                             \
        "{.reg .pred p; setp.ne.b32 p, %[adds], 0; wgmma.mma_async.sync.aligned.m64n" #columns    \
        "k16.f32." type "." type " {" names "}, %[a], %[b], p, 1, 1, 0, %[rows];}"                \
        : __VA_ARGS__                                                                             \
        : [a] "l"(a), [b] "l"(b), [adds] "r"(int(adds)), [rows] "n"(int(RowsAreInner)));          \
  else                                                                                            \
    __asm__ volatile(                                                                             \
        "{.reg .pred p; setp.ne.b32 p, %[adds], 0; wgmma.mma_async.sync.aligned.m64n" #columns    \
        "k16.f32." type "." type " {" names                                                       \
        "}, {%[a0], %[a1], %[a2], %[a3]}, %[b], p, 1, 1, %[rows];}"                               \
        : __VA_ARGS__                                                                             \
        : [a0] "r"(a.words[0]), [a1] "r"(a.words[1]), [a2] "r"(a.words[2]), [a3] "r"(a.words[3]), \
          [b] "l"(b), [adds] "r"(int(adds)), [rows] "n"(int(RowsAreInner)))
#define MSLC_PRODUCT(columns, names, ...)                 \
  if constexpr (__is_same(T, half)) {                     \
    MSLC_PRODUCT_OF("f16", columns, names, __VA_ARGS__);  \
  } else {                                                \
    MSLC_PRODUCT_OF("bf16", columns, names, __VA_ARGS__); \
  }

struct LeftWords {
  uint words[4];
};

#define MSLC_PRODUCT_OF_COLUMNS(use)                                                \
  if constexpr (N == 16) {                                                          \
    MSLC_PRODUCT(32, MSLC_NAMES_16, MSLC_SUMS_16(use, 0));                          \
  } else if constexpr (N == 32) {                                                   \
    MSLC_PRODUCT(64, MSLC_NAMES_32, MSLC_SUMS_16(use, 0), MSLC_SUMS_16(use, 16));   \
  } else if constexpr (N == 48) {                                                   \
    MSLC_PRODUCT(96, MSLC_NAMES_48, MSLC_SUMS_16(use, 0), MSLC_SUMS_16(use, 16),    \
                 MSLC_SUMS_16(use, 32));                                            \
  } else if constexpr (N == 64) {                                                   \
    MSLC_PRODUCT(128, MSLC_NAMES_64, MSLC_SUMS_64(use, 0));                         \
  } else if constexpr (N == 96) {                                                   \
    MSLC_PRODUCT(192, MSLC_NAMES_96, MSLC_SUMS_64(use, 0), MSLC_SUMS_16(use, 64),   \
                 MSLC_SUMS_16(use, 80));                                            \
  } else {                                                                          \
    MSLC_PRODUCT(256, MSLC_NAMES_128, MSLC_SUMS_64(use, 0), MSLC_SUMS_64(use, 64)); \
  }

// Without `Adds`, d needs no value. It is written while the operands are read.
template <class T, bool RowsAreInner, bool Adds, uint N, class Left>
MSLC_INLINE void multiply_groups(float (&d)[N], const Left& a, ulong b) {
  static_assert(N == 16 || N == 32 || N == 48 || N == 64 || N == 96 || N == 128,
                "columns of a product");
  constexpr bool adds = Adds;
  if constexpr (Adds) {
    MSLC_PRODUCT_OF_COLUMNS("+f")
  } else {
    MSLC_PRODUCT_OF_COLUMNS("=&f")
  }
}

// The registers of a sum, which is 16 rows of `Columns` fragments.
template <class Fragment, uint Columns>
MSLC_INLINE void take_sum(float (&d)[4 * Columns], const Fragment (&sum)[2][Columns]) {
#pragma clang loop unroll(full)
  for (uint i = 0; i < 4 * Columns; ++i) d[i] = sum[i / 2 % 2][i / 4].elements[i % 2];
}
template <class Fragment, uint Columns>
MSLC_INLINE void give_sum(Fragment (&sum)[2][Columns], const float (&d)[4 * Columns]) {
#pragma clang loop unroll(full)
  for (uint i = 0; i < 4 * Columns; ++i) sum[i / 2 % 2][i / 4].elements[i % 2] = d[i];
}

// Bytes from a tile to the part of it that step k multiplies, 16 of the inner dimension.
template <bool RowsAreInner, uint Rows>
MSLC_INLINE constexpr ulong bytes_of_step(uint k) {
  return RowsAreInner ? 2 * eight_rows * k : k / 4 * 128 * Rows + k % 4 * 32;
}
MSLC_INLINE ulong tile_at(const threadgroup void* tile, ulong panel_bytes) {
  return tile_descriptor(static_cast<uint>(reinterpret_cast<ulong>(tile)), panel_bytes);
}

// Starts sum = left x right + (adds ? sum : 0), as a group of its own. `RowsAreInner`: right is the
// tile; otherwise its transpose. A panel of the tile has Rows rows. left_at(k) is for step k.
template <bool RowsAreInner, uint Rows, uint Steps, class T, class Sum, uint Columns, class LeftAt>
MSLC_INLINE void start_steps(Sum (&sum)[2][Columns],
                             LeftAt left_at,
                             const threadgroup T* tile,
                             bool adds) {
  static_assert(lanes_are_permuted || Rows == 0, "compiled as a file without matrices");
  const ulong first = tile_at(tile, 128 * Rows);
  float d[4 * Columns];
  take_sum(d, sum);
  __asm__ volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma clang loop unroll(full)
  for (uint k = 0; k < Steps; ++k) {
    const ulong bytes = bytes_of_step<RowsAreInner, Rows>(k);
    if (adds || k > 0) {
      multiply_groups<T, RowsAreInner, true>(d, left_at(k), first + bytes / 16);
    } else {
      multiply_groups<T, RowsAreInner, false>(d, left_at(k), first + bytes / 16);
    }
  }
  __asm__ volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  give_sum(sum, d);
}

template <bool RowsAreInner, uint Rows, class T, class Sum, class Left, uint Columns, uint Depth>
MSLC_INLINE void start_product(Sum (&sum)[2][Columns],
                               const Left (&left)[2][Depth],
                               const threadgroup T* tile,
                               bool adds) {
  const auto words = [&](uint k) {
    return LeftWords{{__builtin_bit_cast(uint, left[0][2 * k].elements),
                      __builtin_bit_cast(uint, left[1][2 * k].elements),
                      __builtin_bit_cast(uint, left[0][2 * k + 1].elements),
                      __builtin_bit_cast(uint, left[1][2 * k + 1].elements)}};
  };
  start_steps<RowsAreInner, Rows, Depth / 2>(sum, words, tile, adds);
}

// The same with a left operand of `Depth` fragments a row in a tile whose panels have LeftRows
// rows.
template <bool RowsAreInner, uint Rows, uint LeftRows, uint Depth, class T, class Sum, uint Columns>
MSLC_INLINE void start_product(Sum (&sum)[2][Columns],
                               const threadgroup T* left,
                               const threadgroup T* tile,
                               bool adds) {
  const ulong first = tile_at(left, 128 * LeftRows);
  const auto part = [&](uint k) { return first + bytes_of_step<false, LeftRows>(k) / 16; };
  start_steps<RowsAreInner, Rows, Depth / 2>(sum, part, tile, adds);
}

// Waits until at most the last `pending` groups run; then `sum` may be used. The products keep
// running until `after`, which is not negative, is computed: ptxas would put the wait first, but
// for a store (that never happens) in between.
template <int pending, class Sum, uint Columns>
MSLC_INLINE void wait_for_products(Sum (&sum)[2][Columns]) {
  float d[4 * Columns];
  take_sum(d, sum);
  __asm__ volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(pending) : "memory");
#pragma clang loop unroll(full)
  for (uint b = 0; b < 4 * Columns; b += 16) __asm__ volatile("" : MSLC_SUMS_16("+f", b)::"memory");
  give_sum(sum, d);
}
MSLC_INLINE void finish_before_wait(float after, const threadgroup void* anywhere) {
  __asm__ volatile(
      "{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.volatile.shared.f32 [%1], %0;}"
      :
      : "f"(after), "l"(anywhere)
      : "memory");
}

// Waits likewise, for operands: those of the earlier products may then be changed.
template <int pending>
MSLC_INLINE void wait_for_products() {
  __asm__ volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(pending) : "memory");
}

// Lets products read what this thread has written to threadgroup memory, after a barrier.
MSLC_INLINE void show_to_products() {
  __asm__ volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#undef MSLC_PRODUCT_OF_COLUMNS
#undef MSLC_PRODUCT
#undef MSLC_PRODUCT_OF
#undef MSLC_NAMES_128
#undef MSLC_NAMES_96
#undef MSLC_NAMES_64
#undef MSLC_NAMES_48
#undef MSLC_NAMES_32
#undef MSLC_SUMS_64
#undef MSLC_SUMS_16

}  // namespace mslc
