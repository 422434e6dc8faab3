// Parts of the integer products that do not depend on how bytes are multiplied. For kernel files
// only, and only on machines that multiply bytes.
#pragma once

#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Bytes per element of x that the dtype needs.
constexpr int pieces_of(KernelDtype dtype) {
  return dtype == KernelDtype::kFloat32 ? 3 : 2;
}

template <class Action>
inline void with_pieces(KernelDtype dtype, Action action) {
  pieces_of(dtype) == 3 ? action(std::integral_constant<int, 3>())
                        : action(std::integral_constant<int, 2>());
}

// Bytes per element of x in x W^T, where the format may allow fewer.
inline int pieces_of(const QuantizedMatrixView& matrix) {
  const int needed = pieces_of(matrix.dtype), allowed = matrix.format.activation_bits / 8;
  return allowed > 0 && allowed < needed ? allowed : needed;
}

template <class Action>
inline void with_pieces(const QuantizedMatrixView& matrix, Action action) {
  const int pieces = pieces_of(matrix);
  pieces == 1   ? action(std::integral_constant<int, 1>())
  : pieces == 2 ? action(std::integral_constant<int, 2>())
                : action(std::integral_constant<int, 3>());
}

constexpr int64_t padded(int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

// ---- x as integers ------------------------------------------------------------------------------

inline i32v rounded(f32v x) {
#if defined(__aarch64__)
  return bits_as<i32v>(vcvtnq_s32_f32(bits_as<float32x4_t>(x)));
#elif !defined(__AVX512F__)
  return bits_as<i32v>(_mm256_cvtps_epi32(bits_as<__m256>(x)));
#else
  return bits_as<i32v>(_mm512_cvtps_epi32(bits_as<__m512>(x)));
#endif
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
  bool finite() const { return most() < 0x7f800000u; }
  // The largest of all lanes.
  float of_all() const { return bits_as<float>(most()); }

 private:
  uint32_t most() const {
#if defined(__aarch64__)
    return vmaxvq_u32(bits_as<uint32x4_t>(bits_));
#elif !defined(__AVX512F__)
    const __m256i all = bits_as<__m256i>(bits_);
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_max_epu32(most, _mm_unpackhi_epi64(most, most));
    most = _mm_max_epu32(most, _mm_srli_epi64(most, 32));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
#else
    return _mm512_reduce_max_epu32(bits_as<__m512i>(bits_));
#endif
  }

  u32v bits_{};
};

#if defined(__aarch64__) || defined(__AVX512F__)  // where x W takes integers

// Returns the e of the smallest 2^e above x.
inline f32v exponent_above(f32v x) {
#if defined(__aarch64__)
  const f32v normal = x < splat(0x1p-60f) ? x * 0x1p64f : x;
  const f32v biased = __builtin_convertvector(bits_as<u32v>(normal) >> 23, f32v);
  return biased - (x < splat(0x1p-60f) ? splat(126.0f + 64.0f) : splat(126.0f));
#else
  const f32v exponent = bits_as<f32v>(_mm512_getexp_ps(bits_as<__m512>(x))) + 1.0f;
  return at_least(exponent, -200.0f);  // 0 has no exponent
#endif
}

// Returns x * 2^e, even if 2^e is not a float32.
inline f32v times_power(f32v x, f32v e) {
#if defined(__aarch64__)
  // Twice, each time by a normal number. Beyond, every result is infinite or 0.
  const f32v limited = at_most(at_least(e, -252.0f), 254.0f);
  const i32v first = rounded(limited * 0.5f), second = rounded(limited) - first;
  return x * bits_as<f32v>((first + 127) << 23) * bits_as<f32v>((second + 127) << 23);
#else
  return bits_as<f32v>(_mm512_scalef_ps(bits_as<__m512>(x), bits_as<__m512>(e)));
#endif
}

#endif

// Factors that scale `largest` to kPieces bytes, and their inverses. Of several bytes they are
// powers of two, so that what fits is exact. Of one byte the largest becomes 127: a power of two
// would waste up to half of its range.
template <int kPieces>
struct IntSteps {
  f32v factor, step;

  explicit IntSteps(f32v largest) {
    constexpr int32_t kLeast = -90;  // keeps both normal numbers
    if constexpr (kPieces == 1) {
      const f32v most = at_least(largest, bits_as<float>((127 + kLeast) << 23));
      factor = 127.0f / most;
      step = most * (1.0f / 127.0f);
    } else {
      // Rounds up slightly: if the highest byte is 127, a carry from the lower ones would overflow
      // it.
      i32v exponent = ((bits_as<i32v>(largest) + (1 << 17)) >> 23) - 127;
      exponent = 8 * kPieces - 2 - (exponent < kLeast ? i32v{} + kLeast : exponent);
      factor = bits_as<f32v>((127 + exponent) << 23);
      step = bits_as<f32v>((127 - exponent) << 23);
    }
  }
};

// One unit of a row of x, of up to 128 elements, as integers with one step.
template <int kPieces>
class IntUnit {
 public:
  // Returns false if an element is not finite.
  template <class T>
  bool round(const T* x, int64_t count) {
    f32v numbers[kMost / kLanes];
    Largest largest;
    const int64_t vectors = count / kLanes;
    for (int64_t v = 0; v < vectors; ++v) {
      numbers[v] = load_lanes(x + v * kLanes);
      largest.add(numbers[v]);
    }
    if (!largest.finite()) {
      return false;
    }
    const IntSteps<kPieces> steps(splat(largest.of_all()));
    i32v sums{};
    for (int64_t v = 0; v < vectors; ++v) {
      const i32v integers = rounded(numbers[v] * steps.factor);
      sums += integers;
      std::memcpy(integers_ + v * kLanes, &integers, sizeof(integers));
    }
    step_ = steps.step[0];
    sum_ = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      sum_ += sums[lane];
    }
    return true;
  }

  int32_t operator[](int64_t i) const { return integers_[i]; }
  float step() const { return step_; }
  int32_t sum() const { return sum_; }

 private:
  static constexpr int kMost = 128;

  alignas(64) int32_t integers_[kMost];
  float step_;
  int32_t sum_;
};

// ---- scales -------------------------------------------------------------------------------------

// Reads scales or biases of up to kLanes rows from `row` on: one vector of rows per group, from
// `group` on. Missing rows and groups are zero.
inline void read_scales(const QuantizedMatrixView& matrix,
                        const void* numbers,
                        int64_t row,
                        int64_t rows,
                        int64_t group,
                        f32v (&to)[kLanes]) {
  const int64_t groups = matrix.columns / matrix.format.group;
  with_scales(matrix, numbers, [&](const auto* from, auto widen) {
    for (int i = 0; i < kLanes; ++i) {
      to[i] =
          i < rows ? widen_some(from + (row + i) * groups + group, groups - group, widen) : f32v{};
    }
  });
  transpose(to);
}

// Scales of kRows rows of w, and the factors of the sum of x, group by group.
template <int kRows>
class GroupScales {
 public:
  static constexpr int64_t kFloatsOfGroup = 2 * kRows;

  explicit GroupScales(float* to) : to_(to) {}

  const float* of_group(int64_t group) const { return to_ + group * kFloatsOfGroup; }

  // Reads groups [first, first + count) of rows [row, row + rows). May write as many groups as are
  // a multiple of kLanes.
  template <class Format>
  void read(const QuantizedMatrixView& matrix,
            int64_t row,
            int64_t rows,
            int64_t first,
            int64_t count) const {
    for (int block = 0; block < kRows; block += kLanes) {
      for (int64_t group = 0; group < count; group += kLanes) {
        f32v scales[kLanes], shifts[kLanes] = {};
        read_scales(matrix, matrix.weights.scales, row + block, rows - block, first + group,
                    scales);
        if constexpr (Format::kHasBiases) {
          read_scales(matrix, matrix.weights.biases, row + block, rows - block, first + group,
                      shifts);
        }
        for (int i = 0; i < kLanes; ++i) {
          float* const to = to_ + (group + i) * kFloatsOfGroup + block;
          store_lanes(to, scales[i]);
          store_lanes(to + kRows, shifts[i] + scales[i] * float{Format::kOffset});
        }
      }
    }
  }

 private:
  float* const to_;
};

// ---- sums ---------------------------------------------------------------------------------------

// Sums the lanes of kCount vectors into the lowest lanes of the result. The order of additions does
// not depend on kCount.
template <int kCount, int kBit = kLanes / 2>
inline f32v sums_of_lanes(f32v* x) {
  if constexpr (kBit == 0) {
    return x[0];
  } else {
    constexpr bool kAlone = kCount <= kBit;
    for (int i = 0; i < (kAlone ? kCount : kBit); ++i) {
      f32v other = kAlone ? x[i] : x[i + kBit];
      exchange<kBit>(x[i], other, std::make_integer_sequence<int, kLanes>());
      x[i] += other;
    }
    return sums_of_lanes<kAlone ? kCount : kBit, kBit / 2>(x);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
