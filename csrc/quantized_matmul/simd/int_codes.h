// Shared parts of the integer products. For kernel files only, and only on machines with VNNI.
#pragma once

#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline i32v rounded(f32v x) {
  return bits_as<i32v>(_mm512_cvtps_epi32(bits_as<__m512>(x)));
}

// Tracks the largest magnitudes per lane by their bits, so that infinity and NaN exceed every
// finite value.
class Largest {
 public:
  void add(f32v x) {
    const u32v size = bits_as<u32v>(absolute(x));
    bits_ = size > bits_ ? size : bits_;
  }
  f32v value() const { return bits_as<f32v>(bits_); }
  bool finite() const { return _mm512_reduce_max_epu32(bits_as<__m512i>(bits_)) < 0x7f800000u; }

 private:
  u32v bits_{};
};

// Returns the e of the smallest 2^e above x.
inline f32v exponent_above(f32v x) {
  const f32v exponent = bits_as<f32v>(_mm512_getexp_ps(bits_as<__m512>(x))) + 1.0f;
  return at_least(exponent, -200.0f);  // 0 has no exponent
}

// Returns x * 2^e, even if 2^e is not a float32.
inline f32v times_power(f32v x, f32v e) {
  return bits_as<f32v>(_mm512_scalef_ps(bits_as<__m512>(x), bits_as<__m512>(e)));
}

// Adds four codes times four signed bytes of x to each lane of `sum`. The asm keeps the broadcast
// inside the instruction. Compilers split it into two, and spill the words of x that they load
// early.
inline i32v with_products(i32v sum, u32v codes, const int32_t& x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(x));
  return sum;
}

inline i32v with_products(i32v sum, u32v codes, u32v x) {
  return bits_as<i32v>(
      _mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(codes), bits_as<__m512i>(x)));
}

// ---- codes --------------------------------------------------------------------------------------

// Maps codes to bytes of at most kLargest: value = (byte - kOffset) * kFactor, plus kOffset for
// affine.
template <int kBits_>
struct IntAffine {
  static constexpr int kBits = kBits_, kLargest = (1 << kBits) - 1;
  static constexpr bool kHasBiases = true;
  static constexpr int32_t kOffset = 1 << (kBits - 1);
  static constexpr float kFactor = 1.0f;
  static u32v bytes(u32v codes) { return codes; }
};

struct IntE2m1 {
  static constexpr int kBits = 4, kLargest = 24;
  static constexpr bool kHasBiases = false;
  static constexpr int32_t kOffset = 12;
  static constexpr float kFactor = 0.5f;
  static u32v bytes(u32v codes) {
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return bits_as<u32v>(_mm512_shuffle_epi8(table, bits_as<__m512i>(codes)));
  }
};

// Half a quarter of a block (RowBytes) is one group of 16 columns.
struct IntNvfp4 : IntE2m1 {};

template <class Action>
inline void with_int_format(const QuantizedFormat& format, Action action) {
  if (!format.has_biases()) {
    return action(IntE2m1());
  }
  switch (format.bits) {
    case 2:
      return action(IntAffine<2>());
    case 3:
      return action(IntAffine<3>());
    case 4:
      return action(IntAffine<4>());
    case 5:
      return action(IntAffine<5>());
    case 6:
      return action(IntAffine<6>());
    default:
      return action(IntAffine<8>());
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
