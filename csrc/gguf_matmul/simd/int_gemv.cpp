// x W^T for up to 8 rows of x, in integers, on machines with VNNI:
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte, one step per group
//   sum of (code - offset) * x ~= step * (sum of (code - offset) * X), which is exact
// Relative to the largest element of its group, an element is off by at most 2^-21 (float32), 2^-15
// (two bytes) or 2^-8 (one byte). x is packed in the order in which codes are unpacked. A lane of a
// sum has columns of one group: four, or with one or two bytes of x and kPairs eight. A permutation
// of the superblock's scales fits them.
//
//   for each kOutputs rows of w, superblock:
//     unpack the codes to bytes and the scales; prefetch
//     for each row of x:
//       factors = scales * [step, -(sum of x)];  total += the products of minima
//       for each sum: total += (start + sum of codes * X) * factors      (vpdpbusd)
//   out = lane sums of the totals
#include "gguf_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "gguf_matmul/simd/int_blocks.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// ---- x ------------------------------------------------------------------------------------------

// Three bytes of x need the bits that adding two products would take, or codes times 16.
template <class Format, int kPieces>
constexpr int kGgufVectorsPerSum = Format::kPairs && kPieces < 3 ? 2 : 1;
template <class Format, int kPieces>
constexpr bool kGgufIsUnshifted = kPieces < 3 && requires { Format::load_unshifted; };

// A packed superblock of a row of x: for each vector of codes, the bytes of each piece; with an
// offset, the initial value of each sum; then the factors of the scales.
template <class Format, int kPieces>
struct PackedX {
  static constexpr int kSums = kGgufVectors / kGgufVectorsPerSum<Format, kPieces>;
  static constexpr int64_t kStart = kGgufSuperblock * kPieces;
  static constexpr int64_t kFactors = kStart + (Format::kOffset ? 64 * kSums : 0);
  static constexpr int64_t kBytes = kFactors + 64;

  static int64_t row_bytes(int64_t columns) {
    return (columns + kGgufSuperblock - 1) / kGgufSuperblock * kBytes;
  }
};

// Sums of codes times X fit in 32 bits if X of three bytes has two bits less in formats of 8 bits.
template <class Format, int kPieces>
constexpr float kGgufShrink = kPieces == 3 && Format::kMost > 32 ? 0.25f : 1.0f;

// Packs a superblock; the numbers are in `x`. Returns false if one is not finite.
template <class Format, int kPieces>
bool pack_superblock(const f32v (&x)[kLanes], char* to) {
  using Layout = PackedX<Format, kPieces>;
  constexpr int kRuns = Format::kGroup / kLanes;  // vectors per group
  f32v largest = {};
  Largest of_all;
  for (int i = 0; i < kLanes; i += kRuns) {
    f32v of_group = {};
    for (int run = 0; run < kRuns; ++run) {
      of_all.add(x[i + run]);
      const f32v size = absolute(x[i + run]);
      of_group = size > of_group ? size : of_group;
    }
    largest[i / kRuns] = _mm512_reduce_max_ps(bits_as<__m512>(of_group));
  }
  if (!of_all.finite()) {
    return false;
  }
  constexpr float kShrink = kGgufShrink<Format, kPieces>;
  const IntSteps<kPieces> steps(largest);
  const f32v factor = steps.factor * kShrink, step = steps.step * (1.0f / kShrink);
  f32v factors = {};
  alignas(64) char natural[kPieces][kGgufSuperblock];  // in the order of columns
  for (int i = 0; i < kLanes; i += kRuns) {
    const int group = i / kRuns;
    i32v sums = {};
    for (int run = 0; run < kRuns; ++run) {
      const i32v integers = rounded(x[i + run] * splat(factor[group]));
      sums += integers;
      // A byte with its top bit set is 256 less as a signed byte, so the byte above it must be one
      // more.
      constexpr uint32_t kCarry = kPieces == 1 ? 0u : kPieces == 2 ? 0x80u : 0x8080u;
      const u32v bytes = (bits_as<u32v>(integers) + kCarry) ^ kCarry;
      for (int piece = 0; piece < kPieces; ++piece) {
        const __m128i own = _mm512_cvtepi32_epi8(bits_as<__m512i>(bytes >> (8 * piece)));
        _mm_store_si128(reinterpret_cast<__m128i*>(natural[piece] + (i + run) * kLanes), own);
      }
    }
    if constexpr (Format::kMins) {
      const int sum = _mm512_reduce_add_epi32(bits_as<__m512i>(sums));
      const bool is_times_16 = kGgufIsUnshifted<Format, kPieces> && group % 2 != 0;
      factors[2 * group] = step[group] * (is_times_16 ? 1.0f / 16.0f : 1.0f);
      factors[2 * group + 1] = -step[group] * static_cast<float>(sum);
    } else {
      factors[group] = step[group];
    }
  }
  unroll<kGgufVectors>([&](auto v) {
    const __m512i order = bits_as<__m512i>(gguf_lanes(
        [=](int lane) { return Format::word(v.value, lane) - v.value / 2 * 2 * kLanes; }));
    for (int piece = 0; piece < kPieces; ++piece) {
      const char* const both = natural[piece] + v.value / 2 * 128;
      const __m512i own =
          _mm512_permutex2var_epi32(_mm512_load_si512(both), order, _mm512_load_si512(both + 64));
      _mm512_storeu_si512(to + (v.value * kPieces + piece) * 64, own);
    }
  });
  if constexpr (Format::kOffset != 0) {
    constexpr int kEach = kGgufVectors / Layout::kSums * kPieces;  // vectors of bytes per sum
    for (int s = 0; s < Layout::kSums; ++s) {
      u32v sums[kPieces] = {};
      for (int i = 0; i < kEach; ++i) {
        const __m512i bytes = _mm512_loadu_si512(to + (s * kEach + i) * 64);
        u32v& sum = sums[i % kPieces];
        sum = bits_as<u32v>(_mm512_dpbusd_epi32(bits_as<__m512i>(sum), _mm512_set1_epi8(1), bytes));
      }
      u32v sum = sums[kPieces - 1];
      for (int piece = kPieces - 2; piece >= 0; --piece) {
        sum = (sum << 8) + sums[piece];
      }
      const u32v start = sum * static_cast<uint32_t>(-Format::kOffset);
      std::memcpy(to + Layout::kStart + s * 64, &start, sizeof(start));
    }
  }
  std::memcpy(to + Layout::kFactors, &factors, sizeof(factors));
  return true;
}

template <class Format, int kPieces, class T>
bool pack_row(const T* x, int64_t columns, char* to) {
  for (int64_t first = 0; first < columns; first += kGgufSuperblock) {
    f32v numbers[kLanes] = {};
    for (int i = 0; i < kLanes && first + i * kLanes < columns; ++i) {
      numbers[i] = load_lanes(x + first + i * kLanes);
    }
    if (!pack_superblock<Format, kPieces>(numbers, to)) {
      return false;
    }
    to += PackedX<Format, kPieces>::kBytes;
  }
  return true;
}

// ---- the product --------------------------------------------------------------------------------

constexpr int kOutputs = 2;

template <class Format>
inline u32v factors_of(int vector) {
  return gguf_lanes(
      [=](int lane) { return gguf_group<Format>(vector, lane) * (Format::kMins ? 2 : 1); });
}

// Rows of x: 1, or kRows = 0 for more, whose number is known at run time. Each row takes the same
// steps.
template <class Format, int kPieces, int kRows>
class GgufGemv {
 public:
  explicit GgufGemv(const GgufGemvArgs& args)
      : args_(args),
        row_bytes_(args.matrix.row_bytes()),
        x_bytes_(Layout::row_bytes(args.matrix.columns)),
        x_rows_(kRows > 0 ? kRows : static_cast<int>(args.x_rows)) {}

  void run() {
    for (int64_t n = 0; n < args_.count; n += kOutputs) {
      f32v totals[kMostRows][kOutputs];
      for (int m = 0; m < x_rows_; ++m) {
        totals[m][0] = totals[m][1] = f32v{};
      }
      multiply(args_.first + n, totals);
      for (int m = 0; m < x_rows_; ++m) {
        const f32v sums = sums_of_lanes<kOutputs>(totals[m]);
        for (int o = 0; o < kOutputs && n + o < args_.count; ++o) {
          args_.out[m * args_.count + n + o] = sums[o];
        }
      }
    }
  }

 private:
  using Layout = PackedX<Format, kPieces>;
  static constexpr int kMostRows = kRows > 0 ? kRows : kQuantizedGemvRows;
  static constexpr int64_t kBytes = gguf_superblock_bytes(Format::kKind);
  static constexpr int64_t kAhead = 8192;  // bytes: beyond the rows that are multiplied together

  void multiply(int64_t row, f32v (&totals)[kMostRows][kOutputs]) {
    const uint8_t* w[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      // Past the last row, repeat it.
      const int64_t own = row + o < args_.first + args_.count ? row + o : row;
      w[o] = args_.matrix.w + own * row_bytes_;
    }
    const char* x = static_cast<const char*>(args_.x);
    const int64_t whole = row_bytes_ / kBytes;
    for (int64_t block = 0; block < whole; ++block, x += Layout::kBytes) {
      add_superblock(w, x, totals);
      for (const uint8_t*& own : w) {
        own += kBytes;
      }
    }
    const int64_t left = row_bytes_ - whole * kBytes;
    if (left > 0) {
      uint8_t padded[kOutputs][kBytes + 64] = {};
      for (int o = 0; o < kOutputs; ++o) {
        std::memcpy(padded[o], w[o], left);
        w[o] = padded[o];
      }
      add_superblock(w, x, totals);
    }
  }

  MLX_ANVIL_UNROLLED void add_superblock(const uint8_t* const (&w)[kOutputs],
                                         const char* x,
                                         f32v (&totals)[kMostRows][kOutputs]) {
    GgufCodes codes[kOutputs];
    f32v scales[kOutputs];
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
      if constexpr (kGgufIsUnshifted<Format, kPieces>) {
        scales[o.value] = Format::load_unshifted(w[o.value], codes[o.value]);
      } else {
        scales[o.value] = Format::load(w[o.value], codes[o.value]);
      }
      for (int64_t byte = 0; byte < kBytes; byte += 64) {
        __builtin_prefetch(w[o.value] + kAhead + byte, 0, 2);
      }
    });
    f32v(*total)[kOutputs] = totals;
    int rows = x_rows_;
    if constexpr (kRows == 0) {
      asm("" : "+r"(rows), "+r"(total));  // hides the trip count, or compilers unroll the loop
    }
    for (; rows > 0; --rows, ++total, x += x_bytes_) {
      add_row(codes, scales, x, *total);
    }
  }

  MLX_ANVIL_UNROLLED static void add_row(const GgufCodes (&codes)[kOutputs],
                                         const f32v (&scales)[kOutputs],
                                         const char* x,
                                         f32v (&total)[kOutputs]) {
    const f32v of_x = load_lanes(reinterpret_cast<const float*>(x + Layout::kFactors));
    f32v factors[kOutputs], sums[kOutputs];
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
      factors[o.value] = scales[o.value] * of_x;
      sums[o.value] = total[o.value];
      if constexpr (Format::kMins) {
        sums[o.value] = bits_as<f32v>(_mm512_mask_add_ps(bits_as<__m512>(sums[o.value]), 0xaaaa,
                                                         bits_as<__m512>(sums[o.value]),
                                                         bits_as<__m512>(factors[o.value])));
      }
    });
    unroll<Layout::kSums>([&](auto s) __attribute__((always_inline)) {
      constexpr int kEach = kGgufVectors / Layout::kSums, kFirst = s.value * kEach;
      __m512i start = _mm512_setzero_si512();
      if constexpr (Format::kOffset != 0) {
        start = _mm512_loadu_si512(x + Layout::kStart + s.value * 64);
      }
      u32v products[kOutputs][kPieces];
      unroll<kPieces>([&](auto piece) __attribute__((always_inline)) {
        __m512i own[kOutputs];
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          own[o.value] = piece.value == 0 ? start : _mm512_setzero_si512();
        });
        unroll<kEach>([&](auto i) __attribute__((always_inline)) {
          constexpr int kVector = kFirst + i.value;
          const __m512i bytes = _mm512_loadu_si512(x + (kVector * kPieces + piece.value) * 64);
          unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
            own[o.value] = _mm512_dpbusd_epi32(own[o.value], codes[o.value][kVector], bytes);
          });
        });
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          products[o.value][piece.value] = bits_as<u32v>(own[o.value]);
        });
      });
      unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
        u32v product = products[o.value][kPieces - 1];
        for (int piece = kPieces - 2; piece >= 0; --piece) {
          product = (product << 8) + products[o.value][piece];
        }
        const __m512i order = bits_as<__m512i>(factors_of<Format>(kFirst));
        sums[o.value] = bits_as<f32v>(
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(bits_as<__m512i>(product)),
                            _mm512_permutexvar_ps(order, bits_as<__m512>(factors[o.value])),
                            bits_as<__m512>(sums[o.value])));
      });
    });
    unroll<kOutputs>([&](auto o)
                         __attribute__((always_inline)) { total[o.value] = sums[o.value]; });
  }

  const GgufGemvArgs& args_;
  const int64_t row_bytes_, x_bytes_;
  const int x_rows_;
};

template <class Action>
void with_format_and_pieces(const GgufView& matrix, Action action) {
  with_gguf_format(matrix.kind, [&](auto format) {
    with_gguf_pieces(matrix, [&](auto pieces) { action(format, pieces); });
  });
}

}  // namespace

int64_t gguf_int_row_bytes(const GgufView& matrix) {
  int64_t bytes = 0;
  with_format_and_pieces(matrix, [&](auto format, auto pieces) {
    bytes = PackedX<decltype(format), pieces.value>::row_bytes(matrix.columns);
  });
  return bytes;
}

bool gguf_int_pack(const GgufView& matrix, const void* x, void* to) {
  bool finite = false;
  with_format_and_pieces(matrix, [&](auto format, auto pieces) {
    with_elements(matrix.dtype, [&](auto element) {
      finite = pack_row<decltype(format), pieces.value>(static_cast<const decltype(element)*>(x),
                                                        matrix.columns, static_cast<char*>(to));
    });
  });
  return finite;
}

void gguf_int_gemv(const GgufGemvArgs& args) {
  with_format_and_pieces(args.matrix, [&](auto format, auto pieces) {
    using Format = decltype(format);
    args.x_rows == 1 ? GgufGemv<Format, pieces.value, 1>(args).run()
                     : GgufGemv<Format, pieces.value, 0>(args).run();
  });
}

#else

int64_t gguf_int_row_bytes(const GgufView&) {
  return 0;
}
bool gguf_int_pack(const GgufView&, const void*, void*) {
  return false;
}
void gguf_int_gemv(const GgufGemvArgs&) {}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
