// Integer GEMV with AVX2: the products of int_gemv.cpp with vpmaddubsw, which multiplies bytes, and
// vpmaddwd, which multiplies words. Rows of w are read one after the other, in the order of memory.
// A row of x takes the same steps for every number of rows.
//
//   for each strip of rows of w: read their scales
//     for each chunk of columns: for each row of the strip: for each run (avx2_codes.h):
//       unpack the codes; look up the scales
//       for each row of x: totals += (sum of codes * X) * step * scale
//   totals += biases * (sum of x); out = lane sums of totals
#include "quantized_matmul/simd/entries.h"
#if defined(MLX_ANVIL_AVX2_PRODUCTS)
#include "quantized_matmul/simd/avx2_rows.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(MLX_ANVIL_AVX2_PRODUCTS)

namespace {

constexpr int kGemvStrip = 8;  // rows of w

MLX_ANVIL_UNROLLED __m256i load_vector(const char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

template <class Elements>
using Vectors = __m256i[Elements::kVectors];

// The sums of a run's lanes.
template <class Elements>
MLX_ANVIL_UNROLLED __m256i sums_of_run(const Vectors<Elements>& codes, const char* x) {
  constexpr int kMostOfPair = 2 * 127 * Elements::Format::kLargestByte;
  static_assert(Elements::kWords || kMostOfPair * Elements::kVectors < 32768);
  __m256i sums;
  unroll<Elements::kVectors>([&](auto v) __attribute__((always_inline)) {
    const __m256i of_x = load_vector(x + v.value * 32);
    const __m256i products = Elements::kWords ? _mm256_madd_epi16(codes[v.value], of_x)
                                              : _mm256_maddubs_epi16(codes[v.value], of_x);
    if constexpr (v.value == 0) {
      sums = products;
    } else {
      sums = Elements::kWords ? _mm256_add_epi32(sums, products) : _mm256_add_epi16(sums, products);
    }
  });
  return Elements::kWords ? sums : _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}

// The same for all parts of X.
template <class Elements>
MLX_ANVIL_UNROLLED __m256 products_of_run(const Vectors<Elements>& codes, const char* x) {
  using Layout = Avx2RowLayout<Elements>;
  __m256i sums = sums_of_run<Elements>(codes, x);
  if constexpr (Layout::kParts == 2) {
    const __m256i high = sums_of_run<Elements>(codes, x + Elements::kVectors * 32);
    if constexpr (Elements::Format::kBits == 8) {  // the sum would not fit
      return _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(65536.0f),
                             _mm256_cvtepi32_ps(sums));
    }
    sums = _mm256_add_epi32(sums, _mm256_slli_epi32(high, 16));
  }
  if constexpr (Elements::kOffset != 0) {
    sums = _mm256_add_epi32(sums, load_vector(x + Layout::kCorrectionsAt));
  }
  return _mm256_cvtepi32_ps(sums);
}

template <class Elements, int kRows>
class Avx2Gemv {
 public:
  explicit Avx2Gemv(const QuantizedGemvArgs& args)
      : args_(args),
        layout_(args.matrix),
        scales_(args.matrix, Format::kLaneColumns, args.scratch),
        row_bytes_(layout_.bytes()),
        w_row_bytes_(args.matrix.columns * Format::kBits / 8),
        runs_at_once_(kRows == 1 || layout_.runs < kRunsOfChunk ? layout_.runs : kRunsOfChunk),
        // With chunks, to the same columns of the next strip.
        ahead_(runs_at_once_ < layout_.runs ? kGemvStrip * w_row_bytes_ : kAheadBytes) {}

  void run() {
    for (int64_t n = 0; n < args_.count; n += kGemvStrip) {
      const int64_t rows = args_.count - n < kGemvStrip ? args_.count - n : kGemvStrip;
      f32v totals[kGemvStrip][kRows] = {};
      for (int64_t r = 0; r < rows; ++r) {
        scales_.read(args_.first + n + r, r);
      }
      for (int64_t run = 0; run < layout_.runs; run += runs_at_once_) {
        const int64_t left = layout_.runs - run;
        const int64_t end = run + (left < runs_at_once_ ? left : runs_at_once_);
        for (int64_t r = 0; r < rows; ++r) {
          multiply(n, r, run, end, totals[r]);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        finish(n, r, totals[r]);
      }
    }
  }

 private:
  using Format = typename Elements::Format;
  using Layout = Avx2RowLayout<Elements>;
  // Rows of x that exceed L1 are read in chunks, which are reused for all rows of the strip.
  static constexpr int64_t kRunsOfChunk = 16384 / (kRows * Layout::kRunBytes);
  static constexpr int64_t kAheadBytes = 4096;

  void multiply(int64_t n, int64_t r, int64_t run, int64_t end, f32v (&of_row)[kRows]) const {
    const uint8_t* w = reinterpret_cast<const uint8_t*>(args_.matrix.weights.w) +
                       (args_.first + n + r) * w_row_bytes_ + run * Elements::kRunBytes;
    const char* x = reinterpret_cast<const char*>(args_.x) + run * Layout::kRunBytes;
    f32v totals[kRows];
    unroll<kRows>([&](auto m)
                      __attribute__((always_inline)) { totals[m.value] = of_row[m.value]; });
    const int64_t whole = layout_.columns / Elements::kRunColumns;
    const int64_t whole_end = whole < end ? whole : end;
    for (; run < whole_end; ++run) {
      __builtin_prefetch(w + ahead_ + Elements::kRunBytes - 1);
      add_run(Format::load(w), scales_.scale(run, r), x, totals);
      w += Elements::kRunBytes;
      x += Layout::kRunBytes;
    }
    if (run < end) {
      const __m256i some = Format::load_some(w, layout_.columns - run * Elements::kRunColumns);
      add_run(some, scales_.scale(run, r), x, totals);
    }
    unroll<kRows>([&](auto m)
                      __attribute__((always_inline)) { of_row[m.value] = totals[m.value]; });
  }

  MLX_ANVIL_UNROLLED void add_run(__m256i run,
                                  f32v scale,
                                  const char* x,
                                  f32v (&totals)[kRows]) const {
    asm("" : "+x"(run));  // loaded once
    Vectors<Elements> codes;
    unroll<Elements::kVectors>([&](auto v) __attribute__((always_inline)) {
      codes[v.value] = Elements::template vector<v.value>(run);
    });
    unroll<kRows>([&](auto m) __attribute__((always_inline)) {
      const char* const of_row = x + m.value * row_bytes_;
      const f32v products = bits_as<f32v>(products_of_run<Elements>(codes, of_row));
      const f32v step = load_lanes(reinterpret_cast<const float*>(of_row + Layout::kStepsAt));
      // Keep this order: a small scale times the step could be subnormal.
      totals[m.value] += products * step * scale;
    });
  }

  void finish(int64_t n, int64_t r, f32v (&totals)[kRows]) const {
    if constexpr (Format::kHasBiases) {
      const char* const sums = reinterpret_cast<const char*>(args_.x) + layout_.sums_at();
      for (int64_t group = 0; group < layout_.groups(); group += kLanes) {
        const f32v biases = scales_.biases_from(group, r);
        unroll<kRows>([&](auto m) __attribute__((always_inline)) {
          const auto* const of_row = reinterpret_cast<const float*>(sums + m.value * row_bytes_);
          totals[m.value] += biases * load_lanes(of_row + group);
        });
      }
    }
    const f32v results = sums_of_lanes<kRows>(totals) * Format::kFactor;
    for (int m = 0; m < kRows; ++m) {
      args_.out[m * args_.count + n + r] = results[m];
    }
  }

  const QuantizedGemvArgs& args_;
  const Layout layout_;
  RowScales scales_;
  const int64_t row_bytes_, w_row_bytes_, runs_at_once_, ahead_;
};

template <class Action>
void with_row_elements(const QuantizedMatrixView& matrix, Action action) {
  with_avx2_format(matrix.format, [&](auto format) {
    with_pieces(matrix,
                [&](auto pieces) { action(Avx2RowElements<decltype(format), pieces.value>()); });
  });
}

}  // namespace

int64_t quantized_int_row_bytes(const QuantizedMatrixView& matrix) {
  int64_t bytes = 0;
  if (matrix.format.kind != QuantizedKind::kMxfp8) {
    with_row_elements(
        matrix, [&](auto elements) { bytes = Avx2RowLayout<decltype(elements)>(matrix).bytes(); });
  }
  return bytes;
}

bool quantized_int_pack(const QuantizedMatrixView& matrix, const float* x, void* to) {
  bool finite = false;
  with_row_elements(matrix, [&](auto elements) {
    finite = pack_avx2_row<decltype(elements)>(matrix, x, static_cast<char*>(to));
  });
  return finite;
}

void quantized_int_gemv(const QuantizedGemvArgs& args) {
  with_row_elements(args.matrix, [&](auto elements) {
    using Elements = decltype(elements);
    switch (args.x_rows) {
      case 1:
        return Avx2Gemv<Elements, 1>(args).run();
      case 2:
        return Avx2Gemv<Elements, 2>(args).run();
      case 4:
        return Avx2Gemv<Elements, 4>(args).run();
      default:
        return Avx2Gemv<Elements, 8>(args).run();
    }
  });
}

int64_t quantized_int_gemv_scratch(const QuantizedMatrixView& matrix) {
  return kGemvStrip * RowScales::scratch(matrix);
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
