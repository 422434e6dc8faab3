// Packs: 16 bytes of elements, widened to float32. Each is one vector load or store.
#pragma once

#include <metal_stdlib>

// MSL vectors have at most four components, so eight 16-bit elements are moved as a uint4.
template <typename T>
struct Pack {
  enum { kSize = 8 };
  using T4 = metal::vec<T, 4>;
  using Raw = uint4;
  static Raw read(const device T* from) { return *reinterpret_cast<const device Raw*>(from); }
  static void widen(Raw raw, thread float* x) {
    const T4 low = as_type<T4>(raw.xy);
    const T4 high = as_type<T4>(raw.zw);
    for (int i = 0; i < 4; ++i) {
      x[i] = static_cast<float>(low[i]);
      x[i + 4] = static_cast<float>(high[i]);
    }
  }
  static void load(const device T* from, thread float* x) { widen(read(from), x); }
  static void store(device T* to, const thread float* x) {
    const T4 low = T4(T(x[0]), T(x[1]), T(x[2]), T(x[3]));
    const T4 high = T4(T(x[4]), T(x[5]), T(x[6]), T(x[7]));
    *reinterpret_cast<device uint4*>(to) = uint4(as_type<uint2>(low), as_type<uint2>(high));
  }
};

template <>
struct Pack<float> {
  enum { kSize = 4 };
  using Raw = float4;
  static Raw read(const device float* from) { return *reinterpret_cast<const device Raw*>(from); }
  static void widen(Raw raw, thread float* x) {
    for (int i = 0; i < 4; ++i) {
      x[i] = raw[i];
    }
  }
  static void load(const device float* from, thread float* x) { widen(read(from), x); }
  static void store(device float* to, const thread float* x) {
    *reinterpret_cast<device float4*>(to) = float4(x[0], x[1], x[2], x[3]);
  }
};

// Four elements: one vector load or store.
template <typename T>
struct Quad {
  using T4 = metal::vec<T, 4>;
  static void load(const device T* from, thread float* x) {
    const T4 raw = as_type<T4>(*reinterpret_cast<const device uint2*>(from));
    for (int i = 0; i < 4; ++i) {
      x[i] = static_cast<float>(raw[i]);
    }
  }
  static void store(device T* to, const thread float* x) {
    const T4 raw = T4(T(x[0]), T(x[1]), T(x[2]), T(x[3]));
    *reinterpret_cast<device uint2*>(to) = as_type<uint2>(raw);
  }
};

template <>
struct Quad<float> : Pack<float> {};
