// Codes as signed bytes, for the integer products of 64-bit Arm (arm_gemv.cpp). For kernel files
// only, and only on machines with sdot.
//
// A row of w is unpacked run by run: kColumns columns, kVectors vectors of 16 codes. load() reads a
// run into kRaw vectors. codes() turns them into the vectors of codes byte by byte, so that the
// halves of two rows' raw vectors may be exchanged in between. Vector i of a run has column
// column(i, b) in byte b.
//
//   value of a code = (signed byte + kOffset) * kFactor
#pragma once

#include <arm_neon.h>

#include "quantized_matmul/simd/int_parts.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Two copies of 8 bytes, the second one shifted right.
template <int kShift>
MLX_ANVIL_UNROLLED uint8x16_t twice_shifted(const uint8_t* from) {
  const uint8x8_t bytes = vld1_u8(from);
  return vcombine_u8(bytes, vshr_n_u8(bytes, kShift));
}

template <int kBits_>
struct ArmAffine;

template <>
struct ArmAffine<8> {
  static constexpr int kBits = 8, kColumns = 32, kVectors = 2, kRaw = 2;
  static constexpr bool kHasBiases = true;
  static constexpr int32_t kOffset = 128;
  static constexpr float kFactor = 1.0f;

  static constexpr int column(int vector, int byte) { return 16 * vector + byte; }

  MLX_ANVIL_UNROLLED static void load(const uint8_t* from, uint8x16_t (&raw)[kRaw]) {
    raw[0] = vld1q_u8(from);
    raw[1] = vld1q_u8(from + 16);
  }
  MLX_ANVIL_UNROLLED static void codes(const uint8x16_t (&raw)[kRaw], int8x16_t (&to)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) {
      to[i] = vreinterpretq_s8_u8(veorq_u8(raw[i], vdupq_n_u8(0x80)));
    }
  }
};

// Two codes in a byte, in the order that masking leaves them in. Format::values(codes) turns them
// into signed bytes.
template <class Format>
struct ArmNibbles {
  static constexpr int kBits = 4, kColumns = 32, kVectors = 2, kRaw = 1;
  static constexpr int32_t kOffset = 0;

  static constexpr int column(int vector, int byte) { return 2 * byte + vector; }

  MLX_ANVIL_UNROLLED static void load(const uint8_t* from, uint8x16_t (&raw)[kRaw]) {
    raw[0] = vld1q_u8(from);
  }
  MLX_ANVIL_UNROLLED static void codes(const uint8x16_t (&raw)[kRaw], int8x16_t (&to)[kVectors]) {
    to[0] = Format::values(vandq_u8(raw[0], vdupq_n_u8(15)));
    to[1] = Format::values(vshrq_n_u8(raw[0], 4));
  }
};

template <>
struct ArmAffine<4> : ArmNibbles<ArmAffine<4>> {
  static constexpr bool kHasBiases = true;
  static constexpr float kFactor = 1.0f;
  static int8x16_t values(uint8x16_t codes) { return vreinterpretq_s8_u8(codes); }
};

template <>
struct ArmAffine<2> {
  static constexpr int kBits = 2, kColumns = 32, kVectors = 2, kRaw = 1;
  static constexpr bool kHasBiases = true;
  static constexpr int32_t kOffset = 0;
  static constexpr float kFactor = 1.0f;

  static constexpr int column(int vector, int byte) {
    return 4 * (byte % 8) + 2 * (byte / 8) + vector;
  }

  MLX_ANVIL_UNROLLED static void load(const uint8_t* from, uint8x16_t (&raw)[kRaw]) {
    raw[0] = twice_shifted<4>(from);
  }
  MLX_ANVIL_UNROLLED static void codes(const uint8x16_t (&raw)[kRaw], int8x16_t (&to)[kVectors]) {
    const uint8x16_t mask = vdupq_n_u8(3);
    to[0] = vreinterpretq_s8_u8(vandq_u8(raw[0], mask));
    to[1] = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(raw[0], 2), mask));
  }
};

// 3, 5 and 6 bits: a table lookup moves the two bytes that have a code into a lane of 16 bits.
template <int kBits_>
struct ArmAffine {
  static constexpr int kBits = kBits_, kColumns = 32, kVectors = 2, kRaw = 2;
  static constexpr bool kHasBiases = true;
  static constexpr int32_t kOffset = 0;
  static constexpr float kFactor = 1.0f;

  static constexpr int column(int vector, int byte) { return 16 * vector + byte; }

  MLX_ANVIL_UNROLLED static void load(const uint8_t* from, uint8x16_t (&raw)[kRaw]) {
    if constexpr (kBits == 3) {
      const uint8x16_t bytes = vcombine_u8(vld1_u8(from), last_word(from + 8));
      raw[0] = sixteen(bytes, 0);
      raw[1] = sixteen(bytes, 6);
    } else {  // the second load ends where the run does
      constexpr int kSecond = 4 * kBits - 16;
      raw[0] = sixteen(vld1q_u8(from), 0);
      raw[1] = sixteen(vld1q_u8(from + kSecond), 2 * kBits - kSecond);
    }
  }
  MLX_ANVIL_UNROLLED static void codes(const uint8x16_t (&raw)[kRaw], int8x16_t (&to)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) {
      to[i] = vreinterpretq_s8_u8(vandq_u8(raw[i], vdupq_n_u8((1 << kBits) - 1)));
    }
  }

 private:
  static uint8x8_t last_word(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    return vreinterpret_u8_u64(vdup_n_u64(word));
  }

  // The 16 codes that start at byte `first`, with other bits above them.
  MLX_ANVIL_UNROLLED static uint8x16_t sixteen(uint8x16_t bytes, int first) {
    return vuzp1q_u8(eight<0>(bytes, first), eight<8>(bytes, first));
  }
  template <int kFirst>
  MLX_ANVIL_UNROLLED static uint8x16_t eight(uint8x16_t bytes, int first) {
    uint8_t places[16];
    int16_t shifts[8];
    for (int i = 0; i < 8; ++i) {
      const int bit = kBits * (kFirst + i);
      places[2 * i] = static_cast<uint8_t>(first + bit / 8);
      places[2 * i + 1] = static_cast<uint8_t>(first + bit / 8 + 1);
      shifts[i] = static_cast<int16_t>(-(bit % 8));
    }
    const uint8x16_t pairs = vqtbl1q_u8(bytes, vld1q_u8(places));
    return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(pairs), vld1q_s16(shifts)));
  }
};

// Twice the value of an e2m1 is an integer.
inline int8x16_t e2m1_codes(uint8x16_t codes) {
  static constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return vqtbl1q_s8(vld1q_s8(kTable), codes);
}

struct ArmMxfp4 : ArmNibbles<ArmMxfp4> {
  static constexpr bool kHasBiases = false;
  static constexpr float kFactor = 0.5f;
  static int8x16_t values(uint8x16_t codes) { return e2m1_codes(codes); }
};

// Groups of 16.
struct ArmNvfp4 {
  static constexpr int kBits = 4, kColumns = 16, kVectors = 1, kRaw = 1;
  static constexpr bool kHasBiases = false;
  static constexpr int32_t kOffset = 0;
  static constexpr float kFactor = 0.5f;

  static constexpr int column(int, int byte) { return 2 * (byte % 8) + byte / 8; }

  MLX_ANVIL_UNROLLED static void load(const uint8_t* from, uint8x16_t (&raw)[kRaw]) {
    raw[0] = twice_shifted<4>(from);
  }
  MLX_ANVIL_UNROLLED static void codes(const uint8x16_t (&raw)[kRaw], int8x16_t (&to)[kVectors]) {
    to[0] = e2m1_codes(vandq_u8(raw[0], vdupq_n_u8(15)));
  }
};

template <class Action>
inline void with_arm_format(const QuantizedFormat& format, Action action) {
  if (!format.has_biases()) {
    return format.kind == QuantizedKind::kNvfp4 ? action(ArmNvfp4()) : action(ArmMxfp4());
  }
  switch (format.bits) {
    case 2:
      return action(ArmAffine<2>());
    case 3:
      return action(ArmAffine<3>());
    case 4:
      return action(ArmAffine<4>());
    case 5:
      return action(ArmAffine<5>());
    case 6:
      return action(ArmAffine<6>());
    default:
      return action(ArmAffine<8>());
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
