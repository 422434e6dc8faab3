// Unpacks codes of every format to float32 vectors in lane order (kernels.h). For kernel files
// only.
#pragma once

#include <utility>

#include "common/simd/simd.h"
#include "common/simd/unroll.h"
#include "quantized_matmul/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Calls action(element) with a value of the type that `dtype` names.
template <class Action>
inline void with_elements(KernelDtype dtype, Action action) {
  dtype == KernelDtype::kFloat32   ? action(float())
  : dtype == KernelDtype::kFloat16 ? action(f16())
                                   : action(bf16());
}

// Returns table[index], with indices modulo 16 on AVX-512, else modulo kLanes.
inline f32v lookup(f32v table, u32v index) {
#if defined(__AVX512F__)
  return bits_as<f32v>(_mm512_permutexvar_ps(bits_as<__m512i>(index), bits_as<__m512>(table)));
#elif defined(__AVX2__)
  return bits_as<f32v>(_mm256_permutevar8x32_ps(bits_as<__m256>(table), bits_as<__m256i>(index)));
#else
  f32v values;
  for (int i = 0; i < kLanes; ++i) {
    values[i] = table[index[i] % kLanes];
  }
  return values;
#endif
}

// ---- the units of a block -----------------------------------------------------------------------

template <int kBits, int kValues_ = unit_values(kBits)>
struct Units {
  static constexpr int kValues = kValues_;
  static constexpr int kWords = kValues * kBits / 32;

  u32v words[kWords];  // word q of every unit

  // Loads `count` units, with zeros in lanes that have none.
  void load(const uint32_t* from, int64_t count) {
    count < kLanes ? load_some(from, count) : load_whole(from);
  }
  void load_some(const uint32_t* from, int64_t count) {
    uint32_t padded[kWords * kLanes] = {};
    std::memcpy(padded, from, count * kWords * sizeof(uint32_t));
    load_whole(padded);
  }

  void load_whole(const uint32_t* from) {
    if constexpr (kWords == 1) {
      words[0] = load_bits<u32v>(from);
    } else if constexpr (kWords == 2) {
      const u32v low = load_bits<u32v>(from), high = load_bits<u32v>(from + kLanes);
      constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
      words[0] = every_second<0>(low, high, kAll);
      words[1] = every_second<1>(low, high, kAll);
#if defined(__AVX512F__)
    } else if constexpr (kWords == 4) {
      // Transposes 4x4 squares of words. Words stay in their 128-bit lanes, which compilers do not
      // find.
      __m512i rows[4];
      for (int i = 0; i < 4; ++i) {
        rows[i] = _mm512_loadu_si512(from + i * kLanes);
        asm("" : "+v"(rows[i]));  // load once: most such loads straddle two cache lines
      }
      const __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]);
      const __m512i low23 = _mm512_unpacklo_epi32(rows[2], rows[3]);
      const __m512i high01 = _mm512_unpackhi_epi32(rows[0], rows[1]);
      const __m512i high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
      words[0] = bits_as<u32v>(_mm512_unpacklo_epi64(low01, low23));
      words[1] = bits_as<u32v>(_mm512_unpackhi_epi64(low01, low23));
      words[2] = bits_as<u32v>(_mm512_unpacklo_epi64(high01, high23));
      words[3] = bits_as<u32v>(_mm512_unpackhi_epi64(high01, high23));
#endif
    } else {
      unroll<kWords>([&](auto word) {
        u32v all{};
        unroll<kWords>([&](auto source) {
          all = pick<word.value, source.value>(all, load_bits<u32v>(from + source.value * kLanes),
                                               std::make_integer_sequence<int, kLanes>());
        });
        words[word.value] = all;
      });
    }
  }

  // The unit of the block that a lane has.
  static constexpr int unit_of_lane(int lane) {
    return kWords == 4 ? lane % 4 * (kLanes / 4) + lane / 4 : lane;
  }

  // Returns codes kIndex to kIndex + kCount of every unit in the lowest bits, with other bits
  // above.
  template <int kIndex, int kCount = 1>
  u32v shifted() const {
    constexpr int kBit = kIndex * kBits, kWord = kBit / 32, kShift = kBit % 32;
    const u32v low = kShift == 0 ? words[kWord] : words[kWord] >> kShift;
    if constexpr (kShift + kCount * kBits > 32) {
      return low | (words[kWord + 1] << (32 - kShift));
    } else {
      return low;
    }
  }

 private:
  // Every second word of two vectors.
  template <int kFirst, int... kLane>
  static u32v every_second(u32v a, u32v b, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(a, b, 2 * kLane + kFirst...);
  }

  template <int kWord, int kSource, int... kLane>
  static u32v pick(u32v to, u32v from, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(
        to, from,
        ((kLane * kWords + kWord) / kLanes == kSource ? kLanes + (kLane * kWords + kWord) % kLanes
                                                      : kLane)...);
  }
};

// ---- formats ------------------------------------------------------------------------------------

// Decodes e4m3, except NaN. Placed in a float32, the exponent is 120 too small, also for
// subnormals.
inline f32v finite_e4m3_value(u32v code) {
  const u32v in_place = bits_as<u32v>(bits_as<i32v>(code << 24) >> 4);
  return bits_as<f32v>(in_place & 0x87f00000u) * 0x1p120f;
}

inline f32v e4m3_value(u32v code) {
  const u32v nan = u32v{} + 0x7fc00000u;
  return (code & 0x7fu) == 0x7fu ? bits_as<f32v>(nan) : finite_e4m3_value(code);
}

inline f32v e8m0_value(u32v code) {
  const u32v smallest = u32v{} + 0x00400000u;  // 2^-127 is subnormal
  return bits_as<f32v>((code & 0xffu) == 0u ? smallest : (code & 0xffu) << 23);
}

// A format has kHasBiases, and `value` of a code that may have other bits above it.
template <int kBits_>
struct Affine {
  static constexpr int kBits = kBits_;
  static constexpr bool kHasBiases = true;

  static f32v value(u32v code) {
#if defined(__AVX512F__)
    if constexpr (kBits <= 4) {  // one permutation replaces a mask and a conversion
      f32v table;
      for (int i = 0; i < kLanes; ++i) {
        table[i] = static_cast<float>(i % (1 << kBits));
      }
      return lookup(table, code);
    }
#endif
    return __builtin_convertvector(bits_as<i32v>(code & ((1u << kBits) - 1u)), f32v);
  }
};

struct E2m1 {
  static constexpr int kBits = 4;
  static constexpr bool kHasBiases = false;

  static f32v value(u32v code) {
#if defined(__AVX512F__)
    const f32v table = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return lookup(table, code);
#else
    const f32v magnitude = bits_as<f32v>((code & 7u) << 22) * 0x1p126f;
    return bits_as<f32v>(bits_as<u32v>(magnitude) | ((code & 8u) << 28));
#endif
  }
};

struct E4m3 {
  static constexpr int kBits = 8;
  static constexpr bool kHasBiases = false;

  static f32v value(u32v code) { return e4m3_value(code); }
};

// E4m3 without NaN, in half the instructions. nan_bytes() detects NaN codes.
struct FiniteE4m3 {
  static constexpr int kBits = 8;
  static constexpr bool kHasBiases = false;

  static f32v value(u32v code) { return finite_e4m3_value(code); }

  // Sets the top bit of every NaN byte. The other bits are undefined.
  static u32v nan_bytes(u32v word) { return (word & 0x7f7f7f7fu) + 0x01010101u; }
};

inline bool any_top_bit_of_bytes(u32v words) {
  uint32_t all = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    all |= words[lane];
  }
  return (all & 0x80808080u) != 0;
}

// Calls action(format) with the format's type.
template <class Action>
inline void with_format(const QuantizedFormat& format, Action action) {
  if (!format.has_biases()) {
    return format.bits == 8 ? action(E4m3()) : action(E2m1());
  }
  switch (format.bits) {
    case 2:
      return action(Affine<2>());
    case 3:
      return action(Affine<3>());
    case 4:
      return action(Affine<4>());
    case 5:
      return action(Affine<5>());
    case 6:
      return action(Affine<6>());
    default:
      return action(Affine<8>());
  }
}

// ---- scales -------------------------------------------------------------------------------------

// Loads `count` numbers, with zeros in the remaining lanes.
template <class T, class Widen>
inline f32v widen_some(const T* from, int64_t count, Widen widen) {
  if (count >= kLanes) {
    return widen(from);
  }
  T some[kLanes] = {};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  // One load and one store of a vector: the bytes that memcpy() stores are not ready for a vector
  // load, which then waits.
  const auto given = static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
  if constexpr (sizeof(T) == 4) {
    _mm512_storeu_si512(some, _mm512_maskz_loadu_epi32(given, from));
  } else if constexpr (sizeof(T) == 2) {
    const __m256i numbers = _mm256_maskz_loadu_epi16(given, from);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(some), numbers);
  } else {
    const __m128i numbers = _mm_maskz_loadu_epi8(given, from);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(some), numbers);
  }
#else
  std::memcpy(some, from, (count > 0 ? count : 0) * sizeof(T));
#endif
  return widen(some);
}

// Calls action(numbers, widen): the scales or biases with their type, and the function that
// converts a vector of them to float32.
template <class Action>
inline auto with_scales(const QuantizedMatrixView& matrix, const void* numbers, Action action) {
  const auto widen_floats = [](const auto* x) { return load_lanes(x); };
  switch (matrix.format.kind) {
    case QuantizedKind::kAffine:
      return matrix.weights.scale_dtype == KernelDtype::kFloat32
                 ? action(static_cast<const float*>(numbers), widen_floats)
             : matrix.weights.scale_dtype == KernelDtype::kFloat16
                 ? action(static_cast<const f16*>(numbers), widen_floats)
                 : action(static_cast<const bf16*>(numbers), widen_floats);
    case QuantizedKind::kNvfp4:
      return action(static_cast<const uint8_t*>(numbers),
                    [](const uint8_t* x) { return e4m3_value(zero_extend(load_bits<u8v>(x))); });
    default:
      return action(static_cast<const uint8_t*>(numbers),
                    [](const uint8_t* x) { return e8m0_value(zero_extend(load_bits<u8v>(x))); });
  }
}

// Loads one vector of the scales (or biases) of all rows, from number `first` of `total` on.
inline f32v load_scales(const QuantizedMatrixView& matrix,
                        const void* numbers,
                        int64_t first,
                        int64_t total) {
  return with_scales(matrix, numbers, [&](const auto* from, auto widen) {
    return widen_some(from + first, total - first, widen);
  });
}

// Scales and biases of rows of the matrix, in float32, expanded to vectors per block. Holds one
// row, or several in separate slots of scratch() floats each.
class RowScales {
 public:
  static int64_t scratch(const QuantizedMatrixView& matrix) {
    return 2 * stride(matrix.columns / matrix.format.group);
  }

  static constexpr int in_order(int lane) { return lane; }

  // Units have `values` codes. unit_of_lane maps a lane to its unit of the block.
  RowScales(const QuantizedMatrixView& matrix,
            int values,
            float* scratch,
            int (*unit_of_lane)(int) = in_order)
      : matrix_(matrix),
        groups_(matrix.columns / matrix.format.group),
        units_per_group_(matrix.format.group / values),
        group_shift_(__builtin_ctz(static_cast<unsigned>(units_per_group_))),
        scratch_(scratch) {
    for (int i = 0; i < kLanes; ++i) {
      group_of_lane_[i] = static_cast<uint32_t>(unit_of_lane(i) / units_per_group_);
    }
  }

  void read(int64_t row, int64_t slot = 0) { read_groups(row, slot, 0, groups_); }

  // Reads only what blocks [first, first + count) need.
  void read_blocks(int64_t row, int64_t first, int64_t count) {
    const int64_t end = group_of_block(first + count - 1) + kLanes;
    read_groups(row, 0, group_of_block(first), end < groups_ ? end : groups_);
  }

  // Loads the groups from `group` on, with zeros past the last.
  f32v scales_from(int64_t group, int64_t slot = 0) const {
    return load_lanes(scales(slot) + group);
  }
  f32v biases_from(int64_t group, int64_t slot = 0) const {
    return load_lanes(biases(slot) + group);
  }

  f32v scale(int64_t block, int64_t slot = 0) const { return of_block(scales(slot), block); }
  f32v bias(int64_t block, int64_t slot = 0) const { return of_block(biases(slot), block); }

 private:
  // A block loads a whole vector from its first group on.
  static int64_t stride(int64_t groups) { return groups + 2 * kLanes; }

  int64_t group_of_block(int64_t block) const { return block * kLanes >> group_shift_; }

  // Scales of later rows are contiguous: prefetch this far ahead, into L2, since L1 holds x.
  static constexpr int64_t kAheadBytes = 8192;

  void read_groups(int64_t row, int64_t slot, int64_t first, int64_t end) {
    read_numbers(matrix_.weights.scales, row, first, end, scales(slot));
    if (matrix_.weights.biases) {
      read_numbers(matrix_.weights.biases, row, first, end, biases(slot));
    }
  }

  // Writes at least one zero past the last number of a row.
  void read_numbers(const void* numbers, int64_t row, int64_t first, int64_t end, float* to) {
    with_scales(matrix_, numbers, [&](const auto* all, auto widen) {
      const auto* const from = all + row * groups_;
      for (int64_t group = first; group < end; group += kLanes) {
        __builtin_prefetch(reinterpret_cast<const char*>(from + group) + kAheadBytes, 0, 2);
        store_lanes(to + group, widen_some(from + group, groups_ - group, widen));
      }
    });
    if (end == groups_ && (end - first) % kLanes == 0) {
      store_lanes(to + groups_, f32v{});
    }
  }

  float* scales(int64_t slot) const { return scratch_ + slot * 2 * stride(groups_); }
  float* biases(int64_t slot) const { return scales(slot) + stride(groups_); }

  f32v of_block(const float* numbers, int64_t block) const {
    return lookup(load_lanes(numbers + group_of_block(block)), group_of_lane_);
  }

  const QuantizedMatrixView& matrix_;
  const int64_t groups_;
  const int64_t units_per_group_;  // a power of two
  const int group_shift_;
  float* const scratch_;
  u32v group_of_lane_;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
