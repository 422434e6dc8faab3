// Scalar types and the constants of metal_stdlib.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {
using ::uint;  // naga's Metal begins with `using metal::uint;`
}

constexpr half operator""h(long double x) {
  return static_cast<half>(x);
}
constexpr half operator"" H(long double x) {
  return static_cast<half>(x);
}
constexpr bfloat operator"" bf(long double x) {
  return static_cast<bfloat>(static_cast<float>(x));
}
constexpr bfloat operator"" BF(long double x) {
  return static_cast<bfloat>(static_cast<float>(x));
}

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define HUGE_VALH static_cast<half>(__builtin_inff())
#define MAXFLOAT __FLT_MAX__

#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define FLT_DIG __FLT_DIG__
#define FLT_MANT_DIG __FLT_MANT_DIG__
#define FLT_MAX_EXP __FLT_MAX_EXP__
#define FLT_MIN_EXP __FLT_MIN_EXP__
#define HALF_MAX static_cast<half>(65504.0f)
#define HALF_MIN static_cast<half>(6.103515625e-5f)
#define FLT_RADIX 2
#define FLT_MAX_10_EXP __FLT_MAX_10_EXP__
#define FLT_MIN_10_EXP __FLT_MIN_10_EXP__
#define FP_ILOGB0 (-__INT_MAX__ - 1)
#define FP_ILOGBNAN __INT_MAX__
#define MAXHALF HALF_MAX
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_MAX_10_EXP 4
#define HALF_MIN_10_EXP (-4)
#define HALF_EPSILON static_cast<half>(9.765625e-4f)
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX 0xffffffffu
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define LONG_MAX __LONG_MAX__
#define LONG_MIN (-__LONG_MAX__ - 1)
#define ULONG_MAX 0xfffffffffffffffful

#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_PI_H static_cast<half>(M_PI_F)
#define M_E_H static_cast<half>(M_E_F)
#define M_LOG10E_H static_cast<half>(M_LOG10E_F)
#define M_LN10_H static_cast<half>(M_LN10_F)
#define M_PI_2_H static_cast<half>(M_PI_2_F)
#define M_PI_4_H static_cast<half>(M_PI_4_F)
#define M_1_PI_H static_cast<half>(M_1_PI_F)
#define M_2_PI_H static_cast<half>(M_2_PI_F)
#define M_2_SQRTPI_H static_cast<half>(M_2_SQRTPI_F)
#define M_LOG2E_H static_cast<half>(M_LOG2E_F)
#define M_LN2_H static_cast<half>(M_LN2_F)
#define M_SQRT2_H static_cast<half>(M_SQRT2_F)
#define M_SQRT1_2_H static_cast<half>(M_SQRT1_2_F)

#define MAXBFLOAT static_cast<bfloat>(0x1.fep127f)
#define HUGE_VALBF static_cast<bfloat>(__builtin_inff())
#define M_E_BF static_cast<bfloat>(M_E_F)
#define M_LOG2E_BF static_cast<bfloat>(M_LOG2E_F)
#define M_LOG10E_BF static_cast<bfloat>(M_LOG10E_F)
#define M_LN2_BF static_cast<bfloat>(M_LN2_F)
#define M_LN10_BF static_cast<bfloat>(M_LN10_F)
#define M_PI_BF static_cast<bfloat>(M_PI_F)
#define M_PI_2_BF static_cast<bfloat>(M_PI_2_F)
#define M_PI_4_BF static_cast<bfloat>(M_PI_4_F)
#define M_1_PI_BF static_cast<bfloat>(M_1_PI_F)
#define M_2_PI_BF static_cast<bfloat>(M_2_PI_F)
#define M_2_SQRTPI_BF static_cast<bfloat>(M_2_SQRTPI_F)
#define M_SQRT2_BF static_cast<bfloat>(M_SQRT2_F)
#define M_SQRT1_2_BF static_cast<bfloat>(M_SQRT1_2_F)
