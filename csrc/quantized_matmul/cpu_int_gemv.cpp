// The products of cpu_gemv.cpp in integers, where the machine has byte products (VNNI):
//
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte, one step for each block
//   sum of code * x ~= step * (sum of code * X), which is exact
//
// Two bytes for bfloat16, else three: against the largest number of a block an element is off by at
// most 2^-15 or 2^-23, a hundredth of what rounding the result to bfloat16 or float16 is. Sums over
// 4 codes take one instruction, so that unpacking and multiplying keep up with memory. As in
// cpu_gemv.cpp every number of rows takes the same steps.
#include "quantized_matmul/cpu_entries.h"
#include "quantized_matmul/cpu_unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

constexpr int pieces_of(QuantizedDtype dtype) {
  return dtype == QuantizedDtype::kBfloat16 ? 2 : 3;
}

constexpr int64_t padded(int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

inline float sum_of_lanes(f32v x) {
  return _mm512_reduce_add_ps(bits_as<__m512>(x));
}

// The codes of a block in bytes: vector v has four codes of each unit, in the unit's lane.
template <class Format>
struct Bytes {
  static constexpr int kBits = Format::kBits;
  static constexpr int kValues = Units<kBits>::kValues;
  static constexpr int kVectors = kValues / 4;

  // The code of byte b of vector v. Codes of 2 and 4 bits stay where shifting whole words puts
  // them.
  static constexpr int code(int v, int b) {
    return kBits == 4 ? 2 * b + v : kBits == 2 ? 4 * b + v : 4 * v + b;
  }

  template <int kVector>
  static u32v vector(const Units<kBits>& units) {
    if constexpr (kBits == 8) {
      return units.words[kVector];
    } else if constexpr (kBits == 2 || kBits == 4) {
      constexpr uint32_t kMask = kBits == 4 ? 0x0f0f0f0fu : 0x03030303u;
      return Format::bytes((units.words[0] >> (kBits * kVector)) & kMask);
    } else {
      constexpr uint32_t kMask = (1u << kBits) - 1;
      return (units.template shifted<4 * kVector>() & kMask) |
             ((units.template shifted<4 * kVector + 1>() & kMask) << 8) |
             ((units.template shifted<4 * kVector + 2>() & kMask) << 16) |
             ((units.template shifted<4 * kVector + 3>() & kMask) << 24);
    }
  }
};

// How bytes stand for values: value = (byte - kOffset) * kFactor.
template <int kBits_>
struct IntAffine {
  static constexpr int kBits = kBits_;
  static constexpr int kLargest = (1 << kBits) - 1;
  static constexpr float kFactor = 1.0f;
  static constexpr int32_t kOffset = 0;
  static u32v bytes(u32v codes) { return codes; }
};

struct IntE2m1 {
  static constexpr int kBits = 4;
  static constexpr int kLargest = 24;
  static constexpr float kFactor = 0.5f;
  static constexpr int32_t kOffset = 12;
  static u32v bytes(u32v codes) {
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return bits_as<u32v>(_mm512_shuffle_epi8(table, bits_as<__m512i>(codes)));
  }
};

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

// ---- x ------------------------------------------------------------------------------------------

// A row of x: for each block and vector the bytes of each piece, lowest first; then one step for
// each block; then the sum of every group of x (affine), or of the X of every lane of a block (the
// others).
struct IntRowLayout {
  int64_t columns, blocks, block_columns, groups, group;
  int pieces;

  explicit IntRowLayout(const QuantizedMatrixView& matrix)
      : columns(matrix.columns),
        block_columns(int64_t{unit_values(matrix.format.bits)} * kLanes),
        group(matrix.format.group),
        pieces(pieces_of(matrix.dtype)) {
    blocks = (columns + block_columns - 1) / block_columns;
    groups = columns / group;
  }

  int64_t steps_at() const { return blocks * block_columns * pieces; }
  int64_t sums_at() const { return steps_at() + padded(blocks) * 4; }
  int64_t bytes() const { return sums_at() + (padded(groups) + blocks * kLanes) * 4; }
};

// 2^e for e that a float32's exponent has.
inline float power_of_two(int e) {
  return bits_as<float>(static_cast<uint32_t>(e + 127) << 23);
}

// The power of two that takes `largest` to pieces * 8 - 1 bits, the sign included.
inline int exponent_for(float largest, int pieces) {
  constexpr int kLeast = -90;  // so that the power and its inverse are ordinary numbers
  const uint32_t bits = bits_as<uint32_t>(largest);
  // Rounded up a little: the highest byte has 127 where the lower ones would carry into it.
  const int exponent = static_cast<int>((bits + (1u << 17)) >> 23) - 127;
  return 8 * pieces - 2 - (exponent < kLeast ? kLeast : exponent);
}

template <class Format>
bool pack_row(const QuantizedMatrixView& matrix, const float* x, char* to) {
  using Codes = Bytes<Format>;
  const IntRowLayout layout(matrix);
  float* const steps = reinterpret_cast<float*>(to + layout.steps_at());
  float* const sums = reinterpret_cast<float*>(to + layout.sums_at());
  for (int64_t group = 0; Format::kOffset == 0 && group < padded(layout.groups); ++group) {
    f32v sum{};  // of x itself: a bias multiplies it, without rounding to X
    for (int64_t i = 0; group < layout.groups && i < layout.group; i += kLanes) {
      sum += load_lanes(x + group * layout.group + i);
    }
    sums[group] = sum_of_lanes(sum);
  }
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const int64_t first = block * layout.block_columns;
    const float* const from = x + first;
    f32v largest{};
    i32v finite = i32v{} - 1;
    for (int64_t i = 0; i < layout.block_columns; i += kLanes) {
      const f32v size = absolute(load_lanes(from + i));
      largest = size > largest ? size : largest;
      finite &= size < splat(__builtin_inff());
    }
    if (_mm512_reduce_and_epi32(bits_as<__m512i>(finite)) == 0) {
      return false;
    }
    const float most = _mm512_reduce_max_ps(bits_as<__m512>(largest));
    const int exponent = exponent_for(most, layout.pieces);
    const float factor = power_of_two(exponent);
    steps[block] = power_of_two(-exponent);
    int32_t numbers[32 * kLanes];
    for (int64_t i = 0; i < layout.block_columns; i += kLanes) {
      const __m512 scaled = bits_as<__m512>(load_lanes(from + i) * factor);
      const i32v rounded = bits_as<i32v>(_mm512_cvtps_epi32(scaled));
      std::memcpy(numbers + i, &rounded, sizeof(rounded));
    }
    if constexpr (Format::kOffset != 0) {
      int32_t* const lane_sums = reinterpret_cast<int32_t*>(sums) + block * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) {
        lane_sums[lane] = 0;
        for (int i = 0; i < Codes::kValues; ++i) {
          lane_sums[lane] += numbers[lane * Codes::kValues + i];
        }
      }
    }
    int8_t pieces[3][32 * kLanes];
    for (int64_t i = 0; i < layout.block_columns; i += kLanes) {
      i32v left = load_bits<i32v>(numbers + i);
      for (int p = 0; p < layout.pieces; ++p) {
        const i32v low = (left << 24) >> 24;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(pieces[p] + i),
                         _mm512_cvtepi32_epi8(bits_as<__m512i>(low)));
        left = (left - low) >> 8;
      }
    }
    int8_t* const out = reinterpret_cast<int8_t*>(to + first * layout.pieces);
    for (int p = 0; p < layout.pieces; ++p) {
      unroll<Codes::kVectors>([&](auto v) {
        int8_t* const vector = out + (v.value * layout.pieces + p) * 64;
        for (int lane = 0; lane < kLanes; ++lane) {
          const int8_t* const unit = pieces[p] + lane * Codes::kValues;
          unroll<4>(
              [&](auto b) { vector[lane * 4 + b.value] = unit[Codes::code(v.value, b.value)]; });
        }
      });
    }
  }
  return true;
}

// ---- the product --------------------------------------------------------------------------------

inline i32v multiply_bytes(i32v sum, u32v codes, const int8_t* x) {
  return bits_as<i32v>(
      _mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(codes), _mm512_loadu_si512(x)));
}

// Sums of codes times X of each lane's unit, in float32.
template <class Format, int kPieces>
inline f32v block_product(const u32v (&codes)[Bytes<Format>::kVectors],
                          const int8_t* x,
                          const int32_t* lane_sums) {
  constexpr int kVectors = Bytes<Format>::kVectors;
  // Whether all pieces together stay within 32 bits.
  constexpr bool kFits = 4 * kVectors * int64_t{Format::kLargest} << (8 * kPieces - 1) <= int64_t{1}
                                                                                              << 31;
  i32v sum{};
  for (int p = kPieces - 1; p >= (kFits ? 0 : 1); --p) {
    sum <<= 8;
    for (int v = 0; v < kVectors; ++v) {
      sum = multiply_bytes(sum, codes[v], x + (v * kPieces + p) * 64);
    }
  }
  if constexpr (Format::kOffset != 0) {
    static_assert(kFits);
    sum -= load_bits<i32v>(lane_sums) * Format::kOffset;
  }
  f32v product = __builtin_convertvector(sum, f32v);
  if constexpr (!kFits) {
    i32v low{};
    for (int v = 0; v < kVectors; ++v) {
      low = multiply_bytes(low, codes[v], x + v * kPieces * 64);
    }
    product = product * 256.0f + __builtin_convertvector(low, f32v);
  }
  return product;
}

// Rows of w follow one another in memory: this much is asked for in advance.
constexpr int64_t kAheadWords = 8192 / sizeof(uint32_t);

template <class Format, int kPieces, int kRows, int kOutputs>
void multiply_outputs(const QuantizedGemvArgs& args,
                      const IntRowLayout& layout,
                      RowScales (&scales)[kOutputs],
                      int64_t n) {
  using BlockUnits = Units<Format::kBits>;
  constexpr int kVectors = Bytes<Format>::kVectors, kWords = BlockUnits::kWords;
  const int64_t units = layout.columns / BlockUnits::kValues;
  const char* const x = reinterpret_cast<const char*>(args.x);
  const int64_t row_bytes = layout.bytes();
  const uint32_t* w[kOutputs];
  for (int o = 0; o < kOutputs; ++o) {
    const int64_t row = n + o < args.count ? n + o : args.count - 1;
    w[o] = args.matrix.weights.w + (args.first + row) * units * kWords;
    scales[o].read(args.first + row);
  }
  f32v total[kOutputs][kRows] = {};
  for (int64_t block = 0; block < layout.blocks; ++block) {
    u32v codes[kOutputs][kVectors];
    f32v scale[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      BlockUnits packed;
      const uint32_t* const from = w[o] + block * kLanes * kWords;
      packed.load(from, units - block * kLanes);
      for (int line = 0; line < kWords; ++line) {
        __builtin_prefetch(from + kAheadWords + line * kLanes, 0, 2);
      }
      unroll<kVectors>(
          [&](auto v) { codes[o][v.value] = Bytes<Format>::template vector<v.value>(packed); });
      scale[o] = scales[o].scale(block);
    }
    for (int m = 0; m < kRows; ++m) {
      const char* const row = x + m * row_bytes;
      const int8_t* const numbers =
          reinterpret_cast<const int8_t*>(row) + block * layout.block_columns * kPieces;
      const int32_t* const lane_sums =
          reinterpret_cast<const int32_t*>(row + layout.sums_at()) + block * kLanes;
      const f32v step = splat(reinterpret_cast<const float*>(row + layout.steps_at())[block]);
      for (int o = 0; o < kOutputs; ++o) {
        // In this order: a scale may be so small that its product with the step is not a number
        // of full precision.
        total[o][m] +=
            block_product<Format, kPieces>(codes[o], numbers, lane_sums) * step * scale[o];
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    const float* const sums = reinterpret_cast<const float*>(x + m * row_bytes + layout.sums_at());
    for (int o = 0; o < kOutputs && n + o < args.count; ++o) {
      float result = sum_of_lanes(total[o][m]) * Format::kFactor;
      if constexpr (Format::kOffset == 0) {
        f32v shift{};
        for (int64_t g = 0; g < layout.groups; g += kLanes) {
          shift += scales[o].biases_from(g) * load_lanes(sums + g);
        }
        result += sum_of_lanes(shift);
      }
      args.out[m * args.count + n + o] = result;
    }
  }
}

template <class Format, int kPieces, int kRows>
void multiply_all(const QuantizedGemvArgs& args) {
  // Rows of w side by side use each load of x again.
  constexpr int kOutputs = kRows == 1 ? 1 : 2;
  const IntRowLayout layout(args.matrix);
  const int64_t scratch = RowScales::scratch(args.matrix);
  constexpr int kValues = Units<Format::kBits>::kValues;
  if constexpr (kOutputs == 1) {
    RowScales scales[1] = {{args.matrix, kValues, args.scratch}};
    for (int64_t n = 0; n < args.count; ++n) {
      multiply_outputs<Format, kPieces, kRows, 1>(args, layout, scales, n);
    }
  } else {
    RowScales scales[2] = {{args.matrix, kValues, args.scratch},
                           {args.matrix, kValues, args.scratch + scratch}};
    for (int64_t n = 0; n < args.count; n += 2) {
      multiply_outputs<Format, kPieces, kRows, 2>(args, layout, scales, n);
    }
  }
}

}  // namespace

int64_t quantized_int_row_bytes(const QuantizedMatrixView& matrix) {
  return matrix.format.kind == QuantizedKind::kMxfp8 ? 0 : IntRowLayout(matrix).bytes();
}

bool quantized_int_pack(const QuantizedMatrixView& matrix, const float* x, void* to) {
  bool finite = false;
  with_int_format(matrix.format, [&](auto format) {
    finite = pack_row<decltype(format)>(matrix, x, static_cast<char*>(to));
  });
  return finite;
}

void quantized_int_gemv(const QuantizedGemvArgs& args) {
  with_int_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    const bool wide = pieces_of(args.matrix.dtype) == 3;
    switch (args.x_rows) {
      case 1:
        return wide ? multiply_all<Format, 3, 1>(args) : multiply_all<Format, 2, 1>(args);
      case 2:
        return wide ? multiply_all<Format, 3, 2>(args) : multiply_all<Format, 2, 2>(args);
      case 4:
        return wide ? multiply_all<Format, 3, 4>(args) : multiply_all<Format, 2, 4>(args);
      default:
        return wide ? multiply_all<Format, 3, 8>(args) : multiply_all<Format, 2, 8>(args);
    }
  });
}

#else

int64_t quantized_int_row_bytes(const QuantizedMatrixView&) {
  return 0;
}
bool quantized_int_pack(const QuantizedMatrixView&, const float*, void*) {
  return false;
}
void quantized_int_gemv(const QuantizedGemvArgs&) {}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
