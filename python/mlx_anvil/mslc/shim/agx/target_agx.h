// The AGX target: functions of Mesa's intermediate language (NIR), which its compiler for Apple
// GPUs turns into instructions. Nothing of it is run: `mslc agx` counts the instructions.
#pragma once

enum { MSLC_SCOPE_SIMDGROUP, MSLC_SCOPE_THREADGROUP };

// A NIR operation is a function of that name; what follows two underscores tells overloads apart.
#define MSLC_NIR extern "C" [[clang::sycl_external]] __attribute__((convergent))
#define MSLC_NIR_PURE extern "C" [[clang::sycl_external]] __attribute__((const))

typedef float mslc_float2 __attribute__((ext_vector_type(2)));
typedef half mslc_half2 __attribute__((ext_vector_type(2)));

MSLC_NIR_PURE uint nir_load_subgroup_invocation();
MSLC_NIR_PURE uint nir_load_subgroup_id();
MSLC_NIR_PURE uint nir_load_local_invocation_index();
MSLC_NIR_PURE float nir_fexp2(float);
MSLC_NIR_PURE float nir_flog2(float);
MSLC_NIR_PURE float nir_frsq(float);
MSLC_NIR_PURE float nir_frcp(float);
MSLC_NIR_PURE float nir_fsin(float);
MSLC_NIR_PURE float nir_fcos(float);
MSLC_NIR uint nir_ballot(bool);
MSLC_NIR uint nir_shuffle(uint, uint);
MSLC_NIR uint nir_shuffle_xor(uint, uint);
MSLC_NIR uint nir_shuffle_up(uint, uint);
MSLC_NIR uint nir_shuffle_down(uint, uint);
MSLC_NIR uint nir_read_invocation(uint, uint);
MSLC_NIR float nir_reduce__f(float, uint operation, uint lanes);
MSLC_NIR half nir_reduce__h(half, uint operation, uint lanes);
MSLC_NIR uint nir_reduce__u(uint, uint operation, uint lanes);
MSLC_NIR float nir_inclusive_scan__f(float, uint operation);
MSLC_NIR float nir_exclusive_scan__f(float, uint operation);
MSLC_NIR uint nir_inclusive_scan__u(uint, uint operation);
MSLC_NIR uint nir_exclusive_scan__u(uint, uint operation);
MSLC_NIR void nir_barrier(uint whole, uint, uint, uint);
// Not Mesa's: tools/agx/mesa.patch adds it.
MSLC_NIR mslc_float2 nir_matrix_fma_agx__f(mslc_float2, mslc_float2, mslc_float2);
MSLC_NIR mslc_half2 nir_matrix_fma_agx__h(mslc_half2, mslc_half2, mslc_half2);
MSLC_NIR mslc_float2 nir_matrix_fma_agx__hf(mslc_half2, mslc_half2, mslc_float2);

namespace mslc {

MSLC_INLINE uint lane_id() {
  return nir_load_subgroup_invocation();
}

namespace approx {
MSLC_INLINE float exp2(float x) {
  return nir_fexp2(x);
}
MSLC_INLINE float rsqrt(float x) {
  return nir_frsq(x);
}
}  // namespace approx

// For Metal's fast:: functions: the hardware's.
namespace fast {
MSLC_INLINE float exp2(float x) {
  return nir_fexp2(x);
}
MSLC_INLINE float exp(float x) {
  return nir_fexp2(x * 0x1.715476p+0f);
}
MSLC_INLINE float log2(float x) {
  return nir_flog2(x);
}
MSLC_INLINE float log(float x) {
  return nir_flog2(x) * 0x1.62e43p-1f;
}
MSLC_INLINE float rsqrt(float x) {
  return nir_frsq(x);
}
MSLC_INLINE float sqrt(float x) {
  return x * nir_frsq(x);
}
MSLC_INLINE float divide(float x, float y) {
  return x * nir_frcp(y);
}
MSLC_INLINE float sin(float x) {
  return nir_fsin(x);
}
MSLC_INLINE float cos(float x) {
  return nir_fcos(x);
}
}  // namespace fast
}  // namespace mslc

#include "../gpu/atomic_gpu.h"
#include "../gpu/exchange_gpu.h"
#include "../gpu/trigonometry_gpu.h"
#include "matrix_agx.h"

namespace mslc {

// Only the simulator stops endless kernels.
MSLC_INLINE void step() {}

MSLC_INLINE void barrier(int scope, metal::mem_flags, const Site*) {
  if (scope == MSLC_SCOPE_THREADGROUP)
    nir_barrier(1, 0, 0, 0);
  else
    nir_barrier(0, 0, 0, 0);
}

// ---- shuffles

#define MSLC_OWN_SHUFFLES

// From any lane to any lane. The instruction moves whole quads, so this takes four of them.
template <class T>
MSLC_INLINE T shuffle(T value, uint source, const Site*) {
  return exchange_words(value, [=](uint word) { return nir_shuffle(word, source % simd_width); });
}
template <class T>
MSLC_INLINE T broadcast(T value, uint source, const Site*) {
  return exchange_words(value, [=](uint word) { return nir_read_invocation(word, source); });
}
template <class T>
MSLC_INLINE T shuffle_xor(T value, uint mask, const Site*) {
  return exchange_words(value, [=](uint word) { return nir_shuffle_xor(word, mask); });
}
template <uint Width, class T>
MSLC_INLINE T shuffle_down(T value, uint delta, const Site* site) {
  if constexpr (Width == simd_width)
    return exchange_words(value, [=](uint word) { return nir_shuffle_down(word, delta); });
  const uint lane = lane_id(), position = lane & (Width - 1);
  return shuffle(value, position + delta < Width ? lane + delta : lane, site);
}
template <uint Width, class T>
MSLC_INLINE T shuffle_up(T value, uint delta, const Site* site) {
  if constexpr (Width == simd_width)
    return exchange_words(value, [=](uint word) { return nir_shuffle_up(word, delta); });
  const uint lane = lane_id(), position = lane & (Width - 1);
  return shuffle(value, position >= delta ? lane - delta : lane, site);
}

// ---- votes

MSLC_INLINE uint ballot(bool value, const Site* = nullptr) {
  return nir_ballot(value);
}
MSLC_INLINE bool any(bool value, const Site* = nullptr) {
  return nir_ballot(value) != 0;
}

// ---- reductions

// Numbers of `reductions` in tools/agx/agx_stats.c.
enum ReductionNumber : uint {
  FAdd,
  IAdd,
  FMul,
  IMul,
  FMax,
  IMax,
  UMax,
  FMin,
  IMin,
  UMin,
  IAnd,
  IOr,
  IXor
};

// `is_max` is a member of VectorMax and VectorMin (group.h), which are declared later.
template <class Op, class T>
constexpr uint reduction_of() {
  constexpr bool real = !__is_integral(T), has_sign = T(-1) < T(0);
  if constexpr (__is_same(Op, Add))
    return real ? FAdd : IAdd;
  else if constexpr (__is_same(Op, Multiply))
    return real ? FMul : IMul;
  else if constexpr (__is_same(Op, And))
    return IAnd;
  else if constexpr (__is_same(Op, Or))
    return IOr;
  else if constexpr (__is_same(Op, Xor))
    return IXor;
  else if constexpr (Op::is_max)
    return real ? FMax : has_sign ? IMax : UMax;
  else
    return real ? FMin : has_sign ? IMin : UMin;
}

template <class Op, uint Width, class T>
MSLC_INLINE T reduce(T value, const Site* site) {
  constexpr uint lanes = Width == simd_width ? 0 : Width;
  if constexpr (is_vector<T>) {
    T result = value;
    for (int i = 0; i < length_of<T>; ++i) result[i] = reduce<Op, Width>(value[i], site);
    return result;
  } else if constexpr (__is_same(T, half)) {
    return nir_reduce__h(value, reduction_of<Op, T>(), lanes);
  } else if constexpr (!__is_integral(T)) {
    return static_cast<T>(nir_reduce__f(static_cast<float>(value), reduction_of<Op, T>(), lanes));
  } else if constexpr (sizeof(T) <= 4) {
    return static_cast<T>(nir_reduce__u(static_cast<uint>(value), reduction_of<Op, T>(), lanes));
  } else {
    for (uint mask = 1; mask < Width; mask *= 2)
      value = T(Op::apply(value, shuffle_xor(value, mask, site)));
    return value;
  }
}

template <class Op, uint Width, bool Inclusive, class T>
MSLC_INLINE T scan(T value, const Site* site) {
  if constexpr (Width == simd_width && __is_same(T, float)) {
    constexpr uint operation = reduction_of<Op, T>();
    return Inclusive ? nir_inclusive_scan__f(value, operation)
                     : nir_exclusive_scan__f(value, operation);
  } else if constexpr (Width == simd_width && __is_same(T, uint)) {
    constexpr uint operation = reduction_of<Op, T>();
    return Inclusive ? nir_inclusive_scan__u(value, operation)
                     : nir_exclusive_scan__u(value, operation);
  } else {
    const uint lane = lane_id(), position = lane & (Width - 1);
    for (uint delta = 1; delta < Width; delta *= 2) {
      const T other = shuffle_up<Width>(value, delta, site);
      if (position >= delta) value = T(Op::apply(other, value));
    }
    if constexpr (Inclusive) return value;
    const T other = shuffle_up<Width>(value, 1, site);
    return position == 0 ? Op::template identity<T>() : other;
  }
}

}  // namespace mslc
