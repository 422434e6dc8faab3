// Operands of int_gemm.cpp: panels of w as bytes with their scales, and rows of x as bytes. For
// kernel files only, and only on machines with VNNI.
//
// A word of a run (int_products.h) holds the columns that are cheap to unpack from w
// (Bytes::code()).
#pragma once

#include "quantized_matmul/simd/entries.h"
#include "quantized_matmul/simd/int_products.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int kPanelVectors = 2, kPanelRows = kPanelVectors * kLanes;  // rows of w per panel

// ---- w ------------------------------------------------------------------------------------------

// Scales of a panel's rows as vectors, group by group: first the scales of codes relative to
// Format::kOffset, then the factors of the sum of x.
class PanelScales {
 public:
  static int64_t count(const QuantizedMatrixView& matrix) {
    return padded(matrix.columns / matrix.format.group) * 2 * kPanelRows;
  }

  PanelScales(const QuantizedMatrixView& matrix, float* scales)
      : matrix_(matrix), groups_(matrix.columns / matrix.format.group), scales_(scales) {}

  const float* from(int64_t group) const { return scales_ + group * 2 * kPanelRows; }

  template <class Format>
  void read(int64_t first, int64_t count) const {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t row = first + v * kLanes, rows = count - v * kLanes;
      for (int64_t group = 0; group < groups_; group += kLanes) {
        f32v scales[kLanes], shifts[kLanes] = {};
        read_scales(matrix_, matrix_.weights.scales, row, rows, group, scales);
        if constexpr (Format::kHasBiases) {
          read_scales(matrix_, matrix_.weights.biases, row, rows, group, shifts);
        }
        for (int i = 0; i < kLanes; ++i) {
          float* const to = scales_ + (group + i) * 2 * kPanelRows + v * kLanes;
          if constexpr (Format::kHasBiases) {
            shifts[i] += scales[i] * float{Format::kOffset};
          }
          store_lanes(to, scales[i] * Format::kFactor);
          store_lanes(to + kPanelRows, shifts[i]);
        }
      }
    }
  }

 private:
  const QuantizedMatrixView& matrix_;
  const int64_t groups_;
  float* const scales_;
};

// Codes of kPanelRows rows of w as bytes: kPanelVectors vectors for each word of columns.
template <class Format, class Tiles>
class CodePanel {
 public:
  CodePanel(const QuantizedMatrixView& matrix,
            int64_t first,
            int64_t count,
            uint8_t* codes,
            uint32_t* words)
      : row_words_(matrix.columns * Format::kBits / 32),
        w_(matrix.weights.w + first * row_words_),
        count_(count),
        rows_left_(matrix.outputs - first),
        codes_(codes),
        words_(words) {}

  const uint8_t* codes() const { return codes_; }

  void unpack(int64_t column, int64_t columns) {
    using Codes = Bytes<Format>;
    constexpr int kWords = Codes::BlockUnits::kWords;
    const int64_t word = column * Format::kBits / 32, words = columns * Format::kBits / 32;
    for (int v = 0; v < kPanelVectors; ++v) {
      transpose_words(v * kLanes, word, words);
      for (int64_t unit = 0; unit < columns / Codes::kValues; ++unit) {
        typename Codes::BlockUnits units;
        for (int i = 0; i < kWords; ++i) {
          units.words[i] = load_bits<u32v>(words_ + (unit * kWords + i) * kLanes);
        }
        uint8_t* const to = codes_ + (unit * Codes::kVectors * kPanelVectors + v) * 64;
        unroll<Codes::kVectors>([&](auto i) {
          store_codes<Format, Tiles>(Codes::template vector<i.value>(units),
                                     to + i.value * kPanelVectors * 64);
        });
      }
    }
  }

  // Prefetches part `part` of `parts` of the words that unpack() reads next: columns from `column`
  // on, or with 0 the start of the next panel. Rows are too far apart for the hardware prefetcher.
  // Inlined: GCC treats a call without visible effects as pure and drops it.
  [[gnu::always_inline]] void prefetch(int64_t column, int64_t part, int64_t parts) const {
    constexpr int64_t kLineWords = 16, kChunkWords = kChunk * Format::kBits / 32;
    const int64_t row = column > 0 ? 0 : kPanelRows, first = column * Format::kBits / 32;
    const int64_t left = row_words_ - first, words = left < kChunkWords ? left : kChunkWords;
    for (int64_t r = part; r < kPanelRows && row + r < rows_left_; r += parts) {
      const uint32_t* const from = w_ + (row + r) * row_words_ + first;
      for (int64_t word = 0; word < words; word += kLineWords) {
        __builtin_prefetch(from + word, 0, 2);
      }
      __builtin_prefetch(from + words - 1, 0, 2);  // rows need not start at a cache line
    }
  }

 private:
  // Transposes words of rows [row, row + kLanes) of the panel: one vector per word.
  void transpose_words(int64_t row, int64_t first, int64_t count) {
    for (int64_t word = 0; word < count; word += kLanes) {
      const int64_t left = count - word;
      const __mmask16 mask = left < kLanes ? (1u << left) - 1 : 0xffffu;
      u32v square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const uint32_t* const from = w_ + (row + i) * row_words_ + first + word;
        square[i] = row + i < count_ ? bits_as<u32v>(_mm512_maskz_loadu_epi32(mask, from)) : u32v{};
      }
      transpose(square);
      std::memcpy(words_ + word * kLanes, square, sizeof(square));
    }
  }

  const int64_t row_words_;
  const uint32_t* const w_;
  const int64_t count_, rows_left_;
  uint8_t* const codes_;
  uint32_t* const words_;
};

// ---- x ------------------------------------------------------------------------------------------

// Columns of x with one step: a group, or for one byte at most 32.
template <int kPieces>
constexpr int64_t step_columns(int64_t group) {
  return kPieces == 1 && group > 32 ? 32 : group;
}

// Data of a tile's rows for the columns of a step, besides the bytes.
template <class Tiles>
struct StepFactors : Tiles::Start {
  float step[Tiles::kRows];
  float sum[Tiles::kRows];  // sum of X times step, of this and the previous steps of the group
};

// Layout of packed rows of x: tiles of Tiles::kRows rows, with the tiles of a chunk of columns
// contiguous. A tile has the bytes of all pieces, then the StepFactors of all steps.
template <class Tiles>
struct GemmRows {
  int64_t chunks, tiles, steps_of_chunk;

  GemmRows(const QuantizedMatrixView& matrix, int64_t rows)
      : chunks((matrix.columns + kChunk - 1) / kChunk),
        tiles((rows + Tiles::kRows - 1) / Tiles::kRows),
        steps_of_chunk(kChunk / step_columns<Tiles::kPieces>(matrix.format.group)) {}

  int64_t tile_bytes() const {
    return round_up(kFactorsAt + steps_of_chunk * sizeof(StepFactors<Tiles>), 64);
  }
  static const StepFactors<Tiles>* factors(const char* tile) {
    return reinterpret_cast<const StepFactors<Tiles>*>(tile + kFactorsAt);
  }
  static StepFactors<Tiles>* factors(char* tile) {
    return reinterpret_cast<StepFactors<Tiles>*>(tile + kFactorsAt);
  }
  int64_t at(int64_t chunk, int64_t tile) const { return (chunk * tiles + tile) * tile_bytes(); }
  int64_t bytes() const { return at(chunks, 0); }

  // Rows of the last tile that x does not have contribute 0.
  void clear_factors_past_last(char* rows, int64_t count) const {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      StepFactors<Tiles>* const of_chunk = factors(rows + at(chunk, tiles - 1));
      for (int64_t step = 0; step < steps_of_chunk; ++step) {
        for (int64_t m = count - (tiles - 1) * Tiles::kRows; m < Tiles::kRows; ++m) {
          of_chunk[step].step[m] = of_chunk[step].sum[m] = 0.0f;
        }
      }
    }
  }

 private:
  static constexpr int64_t kFactorsAt = kChunk * Tiles::kRows * Tiles::kPieces;
};

template <class Format, class Tiles>
class RowPacker {
  static constexpr int kPieces = Tiles::kPieces;

 public:
  explicit RowPacker(int64_t step)
      // The column order of CodePanel's words.
      : packer_(step, [](int word, int b) {
          return word / Codes::kVectors * Codes::kValues + Codes::code(word % Codes::kVectors, b);
        }) {}

  // Packs the columns of a step of row m of a tile, starting at run `bytes`. If a value is not
  // finite, returns false and packs zeros.
  template <class T>
  bool pack(
      const T* x, int64_t columns, char* bytes, StepFactors<Tiles>& factors, int64_t m) const {
    f32v numbers[kMostRuns];
    Largest largest_of_lane;
    const int64_t runs = columns / kRun;
    for (int64_t run = 0; run < runs; ++run) {
      numbers[run] = load_lanes(x + run * kRun);
      largest_of_lane.add(numbers[run]);
    }
    const bool finite = largest_of_lane.finite();
    f32v largest = splat(largest_of_lane.of_all());
    if (!finite) {
      largest = f32v{};
      std::memset(numbers, 0, sizeof(numbers));
    }
    const IntSteps<kPieces> steps(largest);
    i32v sums{};
    for (int64_t run = 0; run < runs; ++run) {
      const i32v integers = rounded(numbers[run] * steps.factor);
      sums += integers;
      packer_.pack(integers, bytes, run, m);
    }
    const int32_t sum = _mm512_reduce_add_epi32(bits_as<__m512i>(sums));
    factors.set(m, Format::kOffset, sum);
    factors.step[m] = steps.step[0];
    factors.sum[m] = static_cast<float>(sum) * steps.step[0];
    return finite;
  }

 private:
  using Codes = Bytes<Format>;
  static constexpr int kMostRuns = 128 / kRun;

  const typename Tiles::Packer packer_;
};

template <class Format, class Tiles>
void pack_tiles(const QuantizedIntGemmPackArgs& args) {
  const QuantizedMatrixView& matrix = args.matrix;
  const GemmRows<Tiles> to(matrix, args.x_rows);
  const int64_t step = step_columns<Tiles::kPieces>(matrix.format.group);
  const RowPacker<Format, Tiles> packer(step);
  with_elements(matrix.dtype, [&](auto element) {
    const auto* const x = static_cast<const decltype(element)*>(args.x);
    for (int64_t m = args.first; m < args.first + args.count; ++m) {
      const int64_t tile = m / Tiles::kRows, row = m % Tiles::kRows;
      bool finite = true;
      for (int64_t column = 0; column < matrix.columns; column += step) {
        char* const chunk = static_cast<char*>(args.to) + to.at(column / kChunk, tile);
        const int64_t in_chunk = column % kChunk;
        StepFactors<Tiles>* const factors = to.factors(chunk) + in_chunk / step;
        finite &= packer.pack(x + m * matrix.columns + column, step,
                              chunk + in_chunk * Tiles::kRows * Tiles::kPieces, *factors, row);
        if (column % matrix.format.group != 0) {
          factors->sum[row] += factors[-1].sum[row];
        }
      }
      args.finite[m] = finite;
    }
  });
  if (args.first + args.count == args.x_rows) {
    to.clear_factors_past_last(static_cast<char*>(args.to), args.x_rows);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
