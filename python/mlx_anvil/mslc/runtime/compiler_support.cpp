// Conversions that clang calls by name if the processor lacks an instruction for them. They
// normally come from the compiler's own library, which libraries of kernels are not linked with.
#include <stdint.h>
#include <string.h>

#define MSLC_SUPPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Rounds a double to nearest even in a 16-bit format with the given number of stored mantissa bits.
// The format has 15 - mantissa_bits exponent bits.
template <int mantissa_bits>
uint16_t round_to_16_bits(double value) {
  constexpr int exponent_max = (1 << (15 - mantissa_bits)) - 1;
  constexpr int bias = exponent_max / 2;
  const uint64_t bits = bit_cast<uint64_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 63 << 15);
  const auto infinity = static_cast<uint16_t>(exponent_max << mantissa_bits);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  const uint64_t fraction = bits & 0xfffffffffffff;
  if (exponent == 0x7ff) {
    const auto quiet = static_cast<uint16_t>(1 << (mantissa_bits - 1));
    return static_cast<uint16_t>(sign | infinity | (fraction ? quiet : 0));
  }
  int scaled = exponent - 1023 + bias;
  if (scaled >= exponent_max) return static_cast<uint16_t>(sign | infinity);
  uint64_t mantissa = fraction | (exponent ? uint64_t{1} << 52 : 0);
  int shift = 52 - mantissa_bits;
  if (scaled <= 0) {  // subnormal in the small format
    shift += 1 - scaled;
    scaled = 0;
    if (shift > 54) return sign;
  } else {
    mantissa &= ~(uint64_t{1} << 52);
  }
  uint64_t result = mantissa >> shift;
  const uint64_t rest = mantissa & ((uint64_t{1} << shift) - 1), half = uint64_t{1} << (shift - 1);
  result += static_cast<uint64_t>(scaled) << mantissa_bits;
  if (rest > half || (rest == half && (result & 1))) ++result;  // may carry into the exponent
  return static_cast<uint16_t>(sign | result);
}

}  // namespace

MSLC_SUPPORT _Float16 __truncdfhf2(double value) {
  return bit_cast<_Float16>(round_to_16_bits<10>(value));
}
MSLC_SUPPORT _Float16 __truncsfhf2(float value) {
  return bit_cast<_Float16>(round_to_16_bits<10>(value));
}
MSLC_SUPPORT __bf16 __truncdfbf2(double value) {
  return bit_cast<__bf16>(round_to_16_bits<7>(value));
}
MSLC_SUPPORT __bf16 __truncsfbf2(float value) {
  return bit_cast<__bf16>(round_to_16_bits<7>(value));
}
MSLC_SUPPORT float __extendhfsf2(_Float16 value) {
  const auto bits = bit_cast<uint16_t>(value);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  uint32_t exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}
