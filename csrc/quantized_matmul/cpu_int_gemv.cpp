// The products of cpu_gemv.cpp in integers, where the machine has byte products (VNNI):
//
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte, one step for each unit
//   sum of code * x ~= step * (sum of code * X), which is exact
//
// Three bytes for float32, else two: against the largest number of a unit an element is off by at
// most 2^-23 or 2^-15. Sums over 4 codes take one instruction, so that unpacking and multiplying
// keep up with memory. As in cpu_gemv.cpp every number of rows takes the same steps.
#include "quantized_matmul/cpu_entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/cpu_int_rows.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// Rows of w side by side, where there are several of x.
constexpr int kIntGemvOutputs = 2;

// Sums of codes times X of each lane's unit, in float32, for rows of w side by side: each uses the
// same load of x.
template <class Format, int kPieces, int kOutputs>
inline void block_products(const u32v (&codes)[kOutputs][Bytes<Format>::kVectors],
                           const int8_t* x,
                           const int32_t* lane_sums,
                           f32v (&products)[kOutputs]) {
  constexpr int kVectors = Bytes<Format>::kVectors;
  constexpr int kOffset = Format::kHasBiases ? 0 : Format::kOffset;
  // Whether the sums of all pieces together fit 32 bits. (On the way, with kOffset still in them,
  // they may wrap around.)
  constexpr int64_t kMost = Format::kHasBiases ? Format::kLargest : Format::kLargest - kOffset;
  constexpr bool kFits = 4 * kVectors * kMost << (8 * kPieces - 1) <= int64_t{1} << 31;
  // The sums of each piece by themselves, so that many are under way at once.
  i32v sums[kPieces][kOutputs] = {};
  for (int v = 0; v < kVectors; ++v) {
    for (int piece = 0; piece < kPieces; ++piece) {
      __m512i bytes = _mm512_loadu_si512(x + (v * kPieces + piece) * 64);
      asm("" : "+v"(bytes));  // in a register: else each use loads it again
      for (int o = 0; o < kOutputs; ++o) {
        sums[piece][o] = bits_as<i32v>(_mm512_dpbusd_epi32(bits_as<__m512i>(sums[piece][o]),
                                                           bits_as<__m512i>(codes[o][v]), bytes));
      }
    }
  }
  constexpr int kLast = kFits ? 0 : 1;
  for (int o = 0; o < kOutputs; ++o) {
    i32v sum = sums[kPieces - 1][o];
    for (int piece = kPieces - 2; piece >= kLast; --piece) {
      sum = (sum << 8) + sums[piece][o];
    }
    if constexpr (kOffset != 0) {
      static_assert(kFits);
      const u32v offset = load_bits<u32v>(lane_sums) * uint32_t{kOffset};
      sum = bits_as<i32v>(bits_as<u32v>(sum) - offset);
    }
    products[o] = __builtin_convertvector(sum, f32v);
    if constexpr (!kFits) {
      products[o] = products[o] * 256.0f + __builtin_convertvector(sums[0][o], f32v);
    }
  }
}

// Rows of w follow one another in memory: this much is asked for in advance.
constexpr int64_t kAheadWords = 8192 / sizeof(uint32_t);

template <class Format, int kPieces, int kRows>
class IntGemv {
 public:
  explicit IntGemv(const QuantizedGemvArgs& args)
      : args_(args),
        layout_(args.matrix),
        scales_(args.matrix, BlockUnits::kValues, args.scratch),
        units_(layout_.columns / BlockUnits::kValues) {}

  void run() {
    for (int64_t n = 0; n < args_.count; n += kOutputs) {
      f32v totals[kOutputs][kRows] = {};
      multiply(n, totals);
      for (int o = 0; o < kOutputs && n + o < args_.count; ++o) {
        finish(n + o, o, totals[o]);
      }
    }
  }

 private:
  using BlockUnits = typename Bytes<Format>::BlockUnits;
  static constexpr int kVectors = Bytes<Format>::kVectors, kWords = BlockUnits::kWords;
  static constexpr int kOutputs = kIntGemvOutputs;  // rows of w side by side

  void multiply(int64_t n, f32v (&totals)[kOutputs][kRows]) {
    const uint32_t* w[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      // Beyond the last row of w, that one again.
      const int64_t row = args_.first + (n + o < args_.count ? n + o : args_.count - 1);
      w[o] = args_.matrix.weights.w + row * units_ * kWords;
      scales_.read(row, o);
    }
    const char* const x = reinterpret_cast<const char*>(args_.x);
    const int64_t row_bytes = layout_.bytes();
    for (int64_t block = 0; block < layout_.blocks; ++block) {
      u32v codes[kOutputs][kVectors];
      f32v scale[kOutputs];
      for (int o = 0; o < kOutputs; ++o) {
        BlockUnits packed;
        const uint32_t* const from = w[o] + block * kLanes * kWords;
        packed.load(from, units_ - block * kLanes);
        for (int line = 0; line < kWords; ++line) {
          __builtin_prefetch(from + kAheadWords + line * kLanes, 0, 2);
        }
        unroll<kVectors>(
            [&](auto v) { codes[o][v.value] = Bytes<Format>::template vector<v.value>(packed); });
        scale[o] = scales_.scale(block, o);
      }
      for (int m = 0; m < kRows; ++m) {
        const char* const row = x + m * row_bytes;
        const f32v step =
            load_lanes(reinterpret_cast<const float*>(row + layout_.steps_at()) + block * kLanes);
        f32v products[kOutputs];
        block_products<Format, kPieces, kOutputs>(
            codes, reinterpret_cast<const int8_t*>(row) + block * layout_.block_columns * kPieces,
            reinterpret_cast<const int32_t*>(row + layout_.sums_at()) + block * kLanes, products);
        for (int o = 0; o < kOutputs; ++o) {
          // In this order: a scale may be so small that its product with the step is not a number
          // of full precision.
          totals[o][m] += products[o] * step * scale[o];
        }
      }
    }
  }

  void finish(int64_t n, int64_t slot, const f32v (&total)[kRows]) {
    const char* const x = reinterpret_cast<const char*>(args_.x);
    for (int m = 0; m < kRows; ++m) {
      const float* const sums =
          reinterpret_cast<const float*>(x + m * layout_.bytes() + layout_.sums_at());
      float result = sum_of_lanes(total[m]) * Format::kFactor;
      if constexpr (Format::kHasBiases) {
        f32v shift{};
        for (int64_t g = 0; g < layout_.groups; g += kLanes) {
          shift += scales_.biases_from(g, slot) * load_lanes(sums + g);
        }
        result += sum_of_lanes(shift);
      }
      args_.out[m * args_.count + n] = result;
    }
  }

  const QuantizedGemvArgs& args_;
  const IntRowLayout layout_;
  RowScales scales_;
  const int64_t units_;
};

template <class Format, int kPieces>
void multiply_rows(const QuantizedGemvArgs& args) {
  switch (args.x_rows) {
    case 1:
      return IntGemv<Format, kPieces, 1>(args).run();
    case 2:
      return IntGemv<Format, kPieces, 2>(args).run();
    case 4:
      return IntGemv<Format, kPieces, 4>(args).run();
    default:
      return IntGemv<Format, kPieces, 8>(args).run();
  }
}

}  // namespace

int64_t quantized_int_row_bytes(const QuantizedMatrixView& matrix) {
  return matrix.format.kind == QuantizedKind::kMxfp8 ? 0 : IntRowLayout(matrix).bytes();
}

bool quantized_int_pack(const QuantizedMatrixView& matrix, const float* x, void* to) {
  bool finite = false;
  with_int_format(matrix.format, [&](auto format) {
    using Format = decltype(format);
    finite = pieces_of(matrix.dtype) == 3 ? pack_row<Format, 3>(matrix, x, static_cast<char*>(to))
                                          : pack_row<Format, 2>(matrix, x, static_cast<char*>(to));
  });
  return finite;
}

void quantized_int_gemv(const QuantizedGemvArgs& args) {
  with_int_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    pieces_of(args.matrix.dtype) == 3 ? multiply_rows<Format, 3>(args)
                                      : multiply_rows<Format, 2>(args);
  });
}

int64_t quantized_int_gemv_scratch(const QuantizedMatrixView& matrix) {
  return kIntGemvOutputs * RowScales::scratch(matrix);
}

#else

int64_t quantized_int_row_bytes(const QuantizedMatrixView&) {
  return 0;
}
bool quantized_int_pack(const QuantizedMatrixView&, const float*, void*) {
  return false;
}
void quantized_int_gemv(const QuantizedGemvArgs&) {}
int64_t quantized_int_gemv_scratch(const QuantizedMatrixView&) {
  return 0;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
