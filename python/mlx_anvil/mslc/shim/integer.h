// <metal_integer>.
#pragma once

#include "common.h"

namespace mslc {

template <class T>
constexpr int bits_of = sizeof(T) * 8;
template <class T>
using Unsigned = __make_unsigned(T);
// Wide enough for exact sums and products.
template <class T>
using Wide =
    metal::conditional_t<sizeof(T) == 8,
                         metal::conditional_t<__is_unsigned(T), unsigned __int128, __int128>,
                         metal::conditional_t<__is_unsigned(T), ulong, long>>;

template <class T>
MSLC_INLINE constexpr T saturated(Wide<T> value) {
  constexpr Wide<T> high = metal::numeric_limits<T>::max(), low = metal::numeric_limits<T>::min();
  return static_cast<T>(value > high ? high : value < low ? low : value);
}

// Maps componentwise over integers of one type.
template <class Function, class T, class... Rest>
MSLC_INLINE constexpr T map_whole(Function function, T first, Rest... rest) {
  return map<ElementOf<T>>(function, first, rest...);
}

}  // namespace mslc

namespace metal {

template <mslc::Wholes T>
MSLC_INLINE constexpr T clz(T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E v) {
        ulong bits = static_cast<mslc::Unsigned<E>>(v);
        return static_cast<E>(
            bits ? __builtin_clzl(bits) - (64 - mslc::bits_of<E>) : mslc::bits_of<E>);
      },
      x);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T ctz(T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E v) {
        ulong bits = static_cast<mslc::Unsigned<E>>(v);
        return static_cast<E>(bits ? __builtin_ctzl(bits) : mslc::bits_of<E>);
      },
      x);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T popcount(T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E v) { return static_cast<E>(__builtin_popcountl(static_cast<mslc::Unsigned<E>>(v))); },
      x);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T reverse_bits(T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E v) {
        ulong bits = __builtin_bitreverse64(static_cast<mslc::Unsigned<E>>(v));
        return static_cast<E>(bits >> (64 - mslc::bits_of<E>));
      },
      x);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T rotate(T x, T count) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E v, E n) {
        constexpr int width = mslc::bits_of<E>;
        const auto bits = static_cast<mslc::Unsigned<E>>(v);
        const int by = static_cast<int>(n) & (width - 1);
        return static_cast<E>(by ? bits << by | bits >> (width - by) : bits);
      },
      x, count);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T extract_bits(T x, uint offset, uint count) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [=](E v) {
        if (count == 0) return E(0);
        constexpr int width = mslc::bits_of<E>;
        const auto high = static_cast<mslc::Unsigned<E>>(v) << (width - offset - count);
        return static_cast<E>(static_cast<E>(high) >> (width - count));
      },
      x);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T insert_bits(T base, T insert, uint offset, uint count) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [=](E b, E v) {
        if (count == 0) return b;
        const ulong mask = (count >= 64 ? ~0ul : (1ul << count) - 1) << offset;
        return static_cast<E>((static_cast<ulong>(b) & ~mask) |
                              (static_cast<ulong>(v) << offset & mask));
      },
      base, insert);
}

template <mslc::Wholes T>
MSLC_INLINE constexpr auto absdiff(T x, T y) {
  using E = mslc::ElementOf<T>;
  return mslc::map<E>(
      [](E a, E b) {
        using U = mslc::Unsigned<E>;
        return static_cast<U>(a > b ? static_cast<U>(a) - static_cast<U>(b)
                                    : static_cast<U>(b) - static_cast<U>(a));
      },
      x, y);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T addsat(T x, T y) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E a, E b) { return mslc::saturated<E>(mslc::Wide<E>(a) + mslc::Wide<E>(b)); }, x, y);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T subsat(T x, T y) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E a, E b) {
        if (__is_unsigned(E) && a < b) return E(0);
        return mslc::saturated<E>(mslc::Wide<E>(a) - mslc::Wide<E>(b));
      },
      x, y);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T hadd(T x, T y) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E a, E b) { return static_cast<E>((mslc::Wide<E>(a) + mslc::Wide<E>(b)) >> 1); }, x, y);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T rhadd(T x, T y) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E a, E b) { return static_cast<E>((mslc::Wide<E>(a) + mslc::Wide<E>(b) + 1) >> 1); }, x,
      y);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T mulhi(T x, T y) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E a, E b) {
        return static_cast<E>(mslc::Wide<E>(a) * mslc::Wide<E>(b) >> mslc::bits_of<E>);
      },
      x, y);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T madhi(T x, T y, T z) {
  return mulhi(x, y) + z;
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T madsat(T x, T y, T z) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E a, E b, E c) {
        return mslc::saturated<E>(mslc::Wide<E>(a) * mslc::Wide<E>(b) + mslc::Wide<E>(c));
      },
      x, y, z);
}
// Uses the low 24 bits of each factor, sign-extended.
template <mslc::Wholes T>
MSLC_INLINE constexpr T mul24(T x, T y) {
  using E = mslc::ElementOf<T>;
  return mslc::map_whole(
      [](E a, E b) {
        return static_cast<E>(static_cast<E>(a << 8) / 256 * (static_cast<E>(b << 8) / 256));
      },
      x, y);
}
template <mslc::Wholes T>
MSLC_INLINE constexpr T mad24(T x, T y, T z) {
  return mul24(x, y) + z;
}

}  // namespace metal
