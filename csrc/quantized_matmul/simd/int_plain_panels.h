// Operands of int_plain_gemm.cpp. For kernel files only, and only on machines with VNNI.
//
// The sums run over rows of w. The four rows in a word of a run (int_products.h) are adjacent.
#pragma once

#include "quantized_matmul/simd/amx_tiles.h"
#include "quantized_matmul/simd/entries.h"
#include "quantized_matmul/simd/int_interleave.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int64_t kChunkRuns = kChunk / kRun;

// Values of a chunk, normalised below 1 by a power of two. Products of two such values then keep
// their precision, whatever the magnitudes of x and of the scales.
struct ChunkNumbers {
  f32v runs[kChunkRuns];
  float exponent;  // the power of two to multiply them by

  // If a value is not finite, returns false and sets all to zero.
  bool normalize() {
    Largest largest;
    for (const f32v& run : runs) {
      largest.add(run);
    }
    if (!largest.finite()) {
      std::memset(this, 0, sizeof(*this));
      return false;
    }
    const f32v most = splat(_mm512_reduce_max_ps(bits_as<__m512>(largest.value())));
    const f32v power = exponent_above(most);
    exponent = power[0];
    for (f32v& run : runs) {
      run = times_power(run, -power);
    }
    return true;
  }
};

// ---- x ------------------------------------------------------------------------------------------

// Layout of rows of x: the rows of a chunk are contiguous.
struct PlainGemmRows {
  int64_t chunks, rows;

  PlainGemmRows(const QuantizedMatrixView& matrix, int64_t x_rows)
      : chunks((matrix.outputs + kChunk - 1) / kChunk), rows(x_rows) {}

  int64_t bytes() const { return chunks * rows * sizeof(ChunkNumbers); }
  template <class Numbers>
  Numbers* at(Numbers* first, int64_t chunk, int64_t row) const {
    return first + chunk * rows + row;
  }
};

inline void normalize_rows(const QuantizedIntGemmPackArgs& args) {
  const PlainGemmRows to(args.matrix, args.x_rows);
  const int64_t columns = args.matrix.outputs;
  with_elements(args.matrix.dtype, [&](auto element) {
    const auto* const x = static_cast<const decltype(element)*>(args.x);
    for (int64_t m = args.first; m < args.first + args.count; ++m) {
      bool finite = true;
      for (int64_t chunk = 0; chunk < to.chunks; ++chunk) {
        ChunkNumbers& numbers = *to.at(static_cast<ChunkNumbers*>(args.to), chunk, m);
        for (int64_t run = 0; run < kChunkRuns; ++run) {
          const int64_t column = chunk * kChunk + run * kRun;
          numbers.runs[run] =
              column < columns ? load_columns(x + m * columns, 1, column, columns) : f32v{};
        }
        finite &= numbers.normalize();
      }
      args.finite[m] = finite;
    }
  });
}

// ---- w ------------------------------------------------------------------------------------------

// Factors of x for a group of columns: scales for the integer products, and shifts for the offset
// of codes and the bias.
struct GroupNumbers {
  ChunkNumbers scales, shifts;
};

// Reads `rows` rows from `row` on, for the groups [first, first + count), at most one vector of
// groups. Returns false if a value is not finite.
inline bool read_groups(const QuantizedMatrixView& matrix,
                        float offset,
                        int64_t row,
                        int64_t rows,
                        int64_t first,
                        int64_t count,
                        GroupNumbers* to) {
  for (int64_t run = 0; run < kChunkRuns; ++run) {
    f32v scales[kLanes], biases[kLanes];
    const int64_t from = row + run * kRun, left = rows - run * kRun;
    read_scales(matrix, matrix.weights.scales, from, left, first, scales);
    read_scales(matrix, matrix.weights.biases, from, left, first, biases);
    for (int64_t group = 0; group < count; ++group) {
      to[group].scales.runs[run] = scales[group];
      to[group].shifts.runs[run] = biases[group] + scales[group] * offset;
    }
  }
  bool finite = true;
  for (int64_t group = 0; group < count; ++group) {
    finite = to[group].scales.normalize() && to[group].shifts.normalize() && finite;
  }
  return finite;
}

// Codes of w as bytes, for a chunk of rows: panels of columns, one after another.
template <class Format, class Tiles>
class CodeColumns {
 public:
  using Codes = RowBytes<Format>;
  static constexpr int64_t kPanelBytes = kChunk * kPlainPanel;

  CodeColumns(const QuantizedMatrixView& matrix, uint8_t* codes)
      : row_bytes_(matrix.columns * Format::kBits / 8),
        w_(reinterpret_cast<const char*>(matrix.weights.w)),
        codes_(codes) {}

  const uint8_t* panel(int64_t panel) const { return codes_ + panel * kPanelBytes; }

  // Unpacks whole runs of rows and whole blocks of columns. `column` starts a block.
  void unpack(int64_t row, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t first = 0; first < columns; first += Codes::kColumns) {
      const int64_t block = (column + first) / Codes::kColumns;
      const __mmask64 in_row = Codes::in_row(0, row_bytes_ - block * Codes::kBlockBytes);
      const char* const w = at(row, block);
      uint8_t* const to = codes_ + first / kPlainPanel * kPanelBytes;
      const int64_t quads = (rows + kRun - 1) / kRun * kRunWords;
      for (int64_t quad = 0; quad < quads; ++quad) {
        u32v words[4];
        // Rows past the last are arbitrary: their X is zero.
        const int64_t r = 4 * quad < rows ? 4 * quad : rows - 1;
        interleave_quad<Codes, false>(w + r * row_bytes_, row_bytes_, rows - r, in_row, words);
        unroll<Codes::kVectors>([&](auto v) __attribute__((always_inline)) {
          const u32v bytes =
              Codes::template bytes<v.value % Codes::kPerWord>(words[v.value / Codes::kPerWord]);
          store_codes<Format, Tiles>(bytes,
                                     to + v.value / kPlainVectors * kPanelBytes +
                                         (quad * kPlainVectors + v.value % kPlainVectors) * 64);
        });
      }
    }
  }

  // Prefetches part `part` of `parts` of what unpack() reads next. That is only a cache line or two
  // per row, which the hardware prefetcher does not predict.
  [[gnu::always_inline]] void prefetch(
      int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t part, int64_t parts) {
    const int64_t bytes = columns * Format::kBits / 8;
    for (int64_t r = part; r < rows; r += parts) {
      const char* const from = at(row + r, column / Codes::kColumns);
      for (int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(from + byte, 0, 2);
      }
      __builtin_prefetch(from + bytes - 1, 0, 2);
    }
  }

 private:
  const char* at(int64_t row, int64_t block) const {
    return w_ + row * row_bytes_ + block * Codes::kBlockBytes;
  }

  const int64_t row_bytes_;
  const char* const w_;
  uint8_t* const codes_;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
