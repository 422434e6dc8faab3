// Integer GEMM for the product kPlain with many rows of x, on machines with VNNI:
//   sum over n of x[n] scale[n, g] code[n, k] ~= step[g] * (sum over n of X[n, g] code[n, k])
// for a chunk of rows n at a time. X is as in int_gemm.cpp, with one step per chunk, group and row
// of x. A lane is a column and has the codes of four rows, as in int_plain_gemv.cpp. X depends on
// the group, so it is computed for one tile of rows of x, used for the panels of that group, and
// never leaves L1.
//
//   for each strip of columns: for each chunk of rows of w:
//     read and normalise the scales and biases of the strip's groups
//     for each unit of columns:
//       unpack its codes to interleaved bytes
//       for each group of the unit: for each tile of rows of x:
//         X = x * scale as bytes; prefetch part of the next unit
//         for each panel of the group: totals += (codes * X) * 2^exponent + shift
//   store totals in the order of columns
#include "quantized_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/simd/int_plain_panels.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// Columns per pass over a chunk of x, so that x seldom comes from memory. Spans at most one vector
// of groups.
constexpr int64_t kStripColumns = 512;

// Columns unpacked at once: whole blocks and whole groups.
template <class Format>
int64_t unit_columns(const QuantizedMatrixView& matrix) {
  constexpr int64_t kBlock = RowBytes<Format>::kColumns;
  return matrix.format.group > kBlock ? matrix.format.group : kBlock;
}

struct PlainGemmScratch {
  int64_t groups, codes, x, totals, bytes;  // byte offset of each part, and total bytes

  template <class Format, class Tiles>
  static PlainGemmScratch of(const QuantizedMatrixView& matrix, int64_t x_rows) {
    PlainGemmScratch at;
    at.groups = 0;
    at.codes = at.groups + kStripColumns / matrix.format.group * sizeof(GroupNumbers);
    at.x = at.codes + unit_columns<Format>(matrix) * kChunk;
    at.totals = at.x + Tiles::kRows * kChunk * Tiles::kPieces;
    at.bytes = at.totals + kStripColumns * x_rows * sizeof(float);
    return at;
  }
};

template <class Format, class Tiles>
class PlainGemm {
 public:
  explicit PlainGemm(const QuantizedIntGemmArgs& args)
      : args_(args),
        matrix_(args.matrix),
        rows_(args.matrix, args.x_rows),
        unit_(unit_columns<Format>(args.matrix)),
        at_(PlainGemmScratch::of<Format, Tiles>(args.matrix, args.x_rows)),
        codes_(args.matrix, static_cast<uint8_t*>(scratch(at_.codes))),
        groups_(static_cast<GroupNumbers*>(scratch(at_.groups))),
        packed_(static_cast<char*>(scratch(at_.x))),
        totals_(static_cast<float*>(scratch(at_.totals))) {}

  // Returns false if a scale or bias of w is not finite.
  bool run() {
    const int64_t end = args_.first + args_.count;
    for (int64_t first = args_.first; first < end; first += kStripColumns) {
      if (!multiply_strip(first, end - first < kStripColumns ? end - first : kStripColumns)) {
        return false;
      }
    }
    return true;
  }

 private:
  using Codes = RowBytes<Format>;
  static constexpr int kPieces = Tiles::kPieces;
  // Bounds X, so that its highest byte does not overflow by the carry from negative lower bytes.
  static constexpr float kScale = kPieces == 2 ? 127 << 8 : 127 << 16;

  void* scratch(int64_t bytes) const { return static_cast<char*>(args_.scratch) + bytes; }

  float* totals(int64_t panel, int64_t row) const {
    return totals_ + (panel * args_.x_rows + row) * kPlainPanel;
  }

  bool multiply_strip(int64_t first, int64_t columns) {
    const int64_t group = matrix_.format.group;
    std::memset(totals_, 0, columns * args_.x_rows * sizeof(float));
    for (chunk_ = 0; chunk_ < rows_.chunks; ++chunk_) {
      const int64_t row = chunk_ * kChunk, rows = rows_of_chunk(row);
      if (!read_groups(matrix_, Format::kOffset, row, rows, first / group, columns / group,
                       groups_)) {
        return false;
      }
      for (int64_t column = 0; column < columns; column += unit_) {
        const int64_t left = columns - column, count = left < unit_ ? left : unit_;
        codes_.unpack(row, rows, first + column, count);
        const bool last = column + unit_ >= columns;
        ahead_row_ = last ? row + kChunk : row;
        ahead_column_ = last ? first : first + column + unit_;
        for (int64_t in_unit = 0; in_unit < count; in_unit += group) {
          multiply_group(column, in_unit, round_up(rows, Tiles::kMostBlock) / kRun);
        }
      }
    }
    store(first, columns);
    return true;
  }

  int64_t rows_of_chunk(int64_t row) const {
    const int64_t left = matrix_.outputs - row;
    return left < 0 ? 0 : left < kChunk ? left : kChunk;
  }

  // Multiplies one group, at column `in_unit` of the unit at `column` of the strip.
  void multiply_group(int64_t column, int64_t in_unit, int64_t runs) {
    const int64_t group = matrix_.format.group;
    for (int64_t row = 0; row < args_.x_rows; row += Tiles::kRows) {
      if (in_unit == 0 && ahead_column_ + unit_ <= matrix_.columns) {
        codes_.prefetch(ahead_row_, rows_of_chunk(ahead_row_), ahead_column_, unit_,
                        row / Tiles::kRows, (args_.x_rows + Tiles::kRows - 1) / Tiles::kRows);
      }
      const int64_t left = args_.x_rows - row, rows = left < Tiles::kRows ? left : Tiles::kRows;
      Factors factors;
      pack_tile(row, rows, groups_[(column + in_unit) / group], runs, factors);
      for (int64_t panel = 0; panel < group / kPlainPanel; ++panel) {
        const int64_t first = in_unit / kPlainPanel + panel;
        multiply_tile(Tiles(), factors, codes_.panel(first), rows, runs,
                      totals(column / kPlainPanel + first, row));
      }
    }
  }

  struct Factors : Tiles::Start {
    float exponent[Tiles::kRows];  // x times scale ~= X * 2^exponent / kScale
    float shift[Tiles::kRows];     // sum of x times (bias + offset * scale)
  };

  // Two rows at a time share the loads of the group's numbers.
  void pack_tile(
      int64_t row, int64_t rows, const GroupNumbers& group, int64_t runs, Factors& factors) {
    for (int64_t m = 0; m < rows; m += 2) {
      rows - m >= 2 ? pack<2>(row, m, group, runs, factors) : pack<1>(row, m, group, runs, factors);
    }
  }

  // Packs rows [first, first + kRows) of the tile at `row`.
  template <int kRows>
  __attribute__((noinline)) void pack(
      int64_t row, int64_t first, const GroupNumbers& group, int64_t runs, Factors& factors) {
    const ChunkNumbers* const x =
        rows_.at(static_cast<const ChunkNumbers*>(args_.x), chunk_, row + first);
    char* const packed = packed_;
    i32v sums[kRows] = {};
    f32v shifts[kRows] = {};
    for (int64_t run = 0; run < runs; ++run) {
      const f32v scales = group.scales.runs[run] * kScale, shift = group.shifts.runs[run];
      unroll<kRows>([&](auto m) __attribute__((always_inline)) {
        const f32v numbers = x[m.value].runs[run];
        const i32v integers = rounded(numbers * scales);
        sums[m.value] += integers;
        shifts[m.value] += numbers * shift;
        packer_.pack(integers, packed, run, first + m.value);
      });
    }
    unroll<kRows>([&](auto m) __attribute__((always_inline)) {
      const float exponent = x[m.value].exponent;
      const f32v shift = splat(_mm512_reduce_add_ps(bits_as<__m512>(shifts[m.value])));
      const int64_t to = first + m.value;
      factors.shift[to] = times_power(shift, splat(exponent + group.shifts.exponent))[0];
      factors.exponent[to] = exponent + group.scales.exponent;
      factors.set(to, Format::kOffset, _mm512_reduce_add_epi32(bits_as<__m512i>(sums[m.value])));
    });
  }

  void multiply_tile(VnniTiles<kPieces>,
                     const Factors& factors,
                     const uint8_t* codes,
                     int64_t rows,
                     int64_t runs,
                     float* totals) const {
    Tiles::with_rows(rows,
                     [&](auto these) { multiply_rows<these.value>(factors, codes, runs, totals); });
  }

  template <int kRows>
  __attribute__((noinline)) void multiply_rows(const Factors& factors,
                                               const uint8_t* codes,
                                               int64_t runs,
                                               float* totals) const {
    const char* x = packed_;
    TileSums<kPieces, kRows, kPlainVectors> sums;
    start_sums<kPieces, kRows, kPlainVectors>(factors.start, sums);
    add_runs<kPieces, kRows, kPlainVectors>(x, codes, runs, sums);
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kPlainVectors; ++v) {
        add(in_floats(sums[m], v), factors, m, totals + m * kPlainPanel + v * kLanes);
      }
    }
  }

  __attribute__((noinline)) void multiply_tile(AmxTiles<kPieces>,
                                               const Factors& factors,
                                               const uint8_t* codes,
                                               int64_t rows,
                                               int64_t runs,
                                               float* totals) const {
    const auto multiply_vector = [&](int v) __attribute__((always_inline)) {
      Tiles::template multiply<0, kPlainVectors>(
          packed_, codes + v * 64, runs * kRun / Tiles::kMostBlock, Tiles::kMostBlock);
    };
    multiply_vector(0);
    for (int v = 0; v < kPlainVectors; ++v) {
      typename Tiles::Sums sums;
      Tiles::template store<0>(sums);
      if (v + 1 < kPlainVectors) {
        multiply_vector(v + 1);
      }
      for (int64_t m = 0; m < rows; ++m) {
        add(Tiles::in_floats(sums, m), factors, m, totals + m * kPlainPanel + v * kLanes);
      }
    }
  }

  // Adds the products of row m of a tile and a vector of columns.
  MLX_ANVIL_UNROLLED static void add(f32v sums, const Factors& factors, int64_t m, float* total) {
    const f32v product = times_power(sums * (Format::kFactor / kScale), splat(factors.exponent[m]));
    store_lanes(total, load_lanes(total) + (product + factors.shift[m]));
  }

  void store(int64_t first, int64_t columns) const {
    with_elements(matrix_.dtype, [&](auto element) {
      for (int64_t panel = 0; panel < columns / kPlainPanel; ++panel) {
        auto* out = static_cast<decltype(element)*>(args_.out) + first + panel * kPlainPanel;
        for (int64_t m = 0; m < args_.x_rows; ++m, out += matrix_.columns) {
          float in_order[kPlainPanel];
          Codes::template store_in_order<false>(totals(panel, m), in_order);
          for (int c = 0; c < kPlainPanel; c += kLanes) {
            store_lanes(out + c, load_lanes(in_order + c));
          }
        }
      }
    });
  }

  const QuantizedIntGemmArgs& args_;
  const QuantizedMatrixView& matrix_;
  const PlainGemmRows rows_;
  const int64_t unit_;
  const PlainGemmScratch at_;
  CodeColumns<Format, Tiles> codes_;
  GroupNumbers* const groups_;
  char* const packed_;   // one tile of X
  float* const totals_;  // [panel][row][kPlainPanel]
  const typename Tiles::Packer packer_{kChunk, [](int word, int b) { return 4 * word + b; }};
  int64_t chunk_ = 0;
  int64_t ahead_row_ = 0, ahead_column_ = 0;  // start of the next unit
};

}  // namespace

int64_t quantized_int_plain_gemm_columns(const QuantizedMatrixView& matrix) {
  int64_t columns = 0;
  // A panel's columns must share a group. Only affine formats have such groups.
  if (matrix.format.has_biases() && matrix.format.group >= kPlainPanel) {
    with_int_format(matrix.format,
                    [&](auto format) { columns = unit_columns<decltype(format)>(matrix); });
  }
  return columns;
}

int64_t quantized_int_plain_gemm_bytes(const QuantizedMatrixView& matrix, int64_t x_rows) {
  return PlainGemmRows(matrix, x_rows).bytes();
}

void quantized_int_plain_gemm_pack(const QuantizedIntGemmPackArgs& args) {
  normalize_rows(args);
}

bool quantized_int_plain_gemm(const QuantizedIntGemmArgs& args) {
  bool finite = false;
  with_int_format(args.matrix.format, [&](auto format) {
    with_tiles(args.matrix.dtype, [&](auto tiles) {
      using Tiles = decltype(tiles);
      if constexpr (decltype(format)::kHasBiases) {
        const typename Tiles::Registers registers(kChunk);
        finite = PlainGemm<decltype(format), Tiles>(args).run();
      }
    });
  });
  return finite;
}

int64_t quantized_int_plain_gemm_scratch(const QuantizedMatrixView& matrix, int64_t x_rows) {
  int64_t bytes = 0;
  with_int_format(matrix.format, [&](auto format) {
    with_tiles(matrix.dtype, [&](auto tiles) {
      bytes = PlainGemmScratch::of<decltype(format), decltype(tiles)>(matrix, x_rows).bytes;
    });
  });
  return bytes;
}

#else

int64_t quantized_int_plain_gemm_columns(const QuantizedMatrixView&) {
  return 0;
}
int64_t quantized_int_plain_gemm_bytes(const QuantizedMatrixView&, int64_t) {
  return 0;
}
void quantized_int_plain_gemm_pack(const QuantizedIntGemmPackArgs&) {}
bool quantized_int_plain_gemm(const QuantizedIntGemmArgs&) {
  return false;
}
int64_t quantized_int_plain_gemm_scratch(const QuantizedMatrixView&, int64_t) {
  return 0;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
