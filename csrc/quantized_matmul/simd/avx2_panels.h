// Integer products of many rows of x with AVX2. For kernel files only, and only where entries.h
// defines MLX_ANVIL_AVX2_PRODUCTS. Panels of w are unpacked to bytes or words, which stay in L1 for
// all rows of x. A lane is a row of w.
//
//   for each panel of kAvx2Panel rows of w: for each chunk of columns:
//     unpack the codes; read the scales
//     for each strip of the panel: for each tile of rows of x: for each unit of columns:
//       sums = correction + sum of codes * X              (vpmaddubsw or vpmaddwd)
//       totals += sums * step * scale
//       at the end of a group: totals += bias * (sum of x)
//
// A step is four bytes or two words of a row. A strip has two vectors for each step, and a tile of
// x the elements of each of its rows.
#pragma once

#include "quantized_matmul/simd/avx2_codes.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int kAvx2Strip = 16, kAvx2Panel = 32;  // rows of w
constexpr int kAvx2TileRows = 4;                 // rows of x
constexpr int64_t kAvx2Chunk = 256;              // columns, a multiple of every group

// Bytes where at least four pairs of products fit 16 bits.
template <class Format, int kPieces>
using Avx2PanelElements = Avx2Elements<Format, kPieces, (Format::kBits < 6)>;

// ---- x ------------------------------------------------------------------------------------------

// Layout of packed tiles of rows of x: X by steps, then the step size of each unit, the corrections
// for the offset of codes, and for affine formats the sum of X times its step size for each group.
template <class Elements>
struct Avx2TileLayout {
  static constexpr bool kHasCorrections = Elements::kOffset != 0;
  static constexpr bool kHasSums = Elements::Format::kHasBiases;
  static constexpr int kStepBytes = 4 * kAvx2TileRows, kStepColumns = Elements::kPerLane;
  // The steps whose products of bytes fit 16 bits, as x is at most 127.
  static constexpr int kByteSteps = Elements::Format::kLargestByte * 2 * 127 * 8 < 32768 ? 8 : 4;

  int64_t columns, group, unit;

  explicit Avx2TileLayout(const QuantizedMatrixView& matrix)
      : columns(matrix.columns), group(matrix.format.group), unit(group) {
    const int64_t most = !Elements::kWords        ? kByteSteps * kStepColumns
                         : Elements::kPieces == 1 ? 32
                                                  : group;
    unit = group < most ? group : most;
  }

  static int64_t elements_at(int64_t column) { return column / kStepColumns * kStepBytes; }
  int64_t steps_at() const { return elements_at(columns); }
  int64_t corrections_at() const { return steps_at() + columns / unit * kRowsBytes; }
  int64_t sums_at() const {
    return corrections_at() + (kHasCorrections ? columns / unit * kRowsBytes : 0);
  }
  int64_t bytes() const {
    const int64_t end = sums_at() + (kHasSums ? columns / group * kRowsBytes : 0);
    return (end + 63) / 64 * 64;
  }

 private:
  static constexpr int64_t kRowsBytes = 4 * kAvx2TileRows;  // a float or integer of each
};

// Packs row m of a tile. Returns false if an element is not finite; the row is then undefined.
template <class Elements, class T>
bool pack_avx2_tile_row(const QuantizedMatrixView& matrix, const T* x, char* tile, int64_t m) {
  using Layout = Avx2TileLayout<Elements>;
  constexpr int kLaneColumns = Elements::Format::kLaneColumns;
  const Layout layout(matrix);
  float* const steps = reinterpret_cast<float*>(tile + layout.steps_at()) + m;
  int32_t* const corrections = reinterpret_cast<int32_t*>(tile + layout.corrections_at()) + m;
  float* const sums = reinterpret_cast<float*>(tile + layout.sums_at()) + m;
  IntUnit<Elements::kPieces> unit;
  for (int64_t column = 0; column < layout.columns; column += layout.unit) {
    if (!unit.round(x + column, layout.unit)) {
      return false;
    }
    char* to = tile + layout.elements_at(column) + 4 * m;
    for (int64_t lane = 0; lane < layout.unit; lane += kLaneColumns) {
      for (int v = 0; v < Elements::kVectors; ++v, to += Layout::kStepBytes) {
        uint32_t elements = 0;
        for (int i = 0; i < Elements::kPerLane; ++i) {
          constexpr int kBits = 32 / Elements::kPerLane;
          const auto integer = static_cast<uint32_t>(unit[lane + Elements::code(v, i)]);
          elements |= (integer & ((1u << kBits) - 1)) << (kBits * i);
        }
        std::memcpy(to, &elements, sizeof(elements));
      }
    }
    steps[column / layout.unit * kAvx2TileRows] = unit.step();
    if constexpr (Layout::kHasCorrections) {
      corrections[column / layout.unit * kAvx2TileRows] = unit.sum() * -Elements::kOffset;
    }
    if constexpr (Layout::kHasSums) {
      // Biases multiply the rounded x, as in int_rows.h.
      float& to_group = sums[column / layout.group * kAvx2TileRows];
      to_group = (column % layout.group == 0 ? 0.0f : to_group) +
                 static_cast<float>(unit.sum()) * unit.step();
    }
  }
  return true;
}

// ---- tiles --------------------------------------------------------------------------------------

// A strip of w, a tile of x, and a chunk of columns.
struct Avx2Tile {
  const char* x;
  const float* steps;
  const int32_t* corrections;
  const float* sums;
  const char* codes;
  const float* scales;  // of the strip, as GroupScales<kAvx2Panel> has them
  float* totals;        // [rows][kAvx2Panel]
  int64_t groups, units_of_group, steps_of_unit;
};

constexpr int kAvx2StripVectors = kAvx2Strip / kLanes;
constexpr int64_t kAvx2StripBytes = kAvx2StripVectors * 32;  // of a step

// Adds the products of a step of a row of x to its sums: of 32 bits for words, of 16 for bytes. The
// asm keeps this order. Compilers load all of x early, and spill it.
template <bool kWords>
MLX_ANVIL_UNROLLED void add_avx2_step(const __m256i (&w)[kAvx2StripVectors],
                                      const int32_t& x,
                                      __m256i (&sums)[kAvx2StripVectors]) {
  static_assert(kAvx2StripVectors == 2);
  __m256i of_x, products;
  if constexpr (kWords) {
    asm volatile(
        "vpbroadcastd %6, %2\n\t"
        "vpmaddwd %2, %4, %3\n\t"
        "vpmaddwd %2, %5, %2\n\t"
        "vpaddd %3, %0, %0\n\t"
        "vpaddd %2, %1, %1"
        : "+x"(sums[0]), "+x"(sums[1]), "=&x"(of_x), "=&x"(products)
        : "x"(w[0]), "x"(w[1]), "m"(x));
  } else {
    asm volatile(
        "vpbroadcastd %6, %2\n\t"
        "vpmaddubsw %2, %4, %3\n\t"
        "vpmaddubsw %2, %5, %2\n\t"
        "vpaddw %3, %0, %0\n\t"
        "vpaddw %2, %1, %1"
        : "+x"(sums[0]), "+x"(sums[1]), "=&x"(of_x), "=&x"(products)
        : "x"(w[0]), "x"(w[1]), "m"(x));
  }
}

// Adds a tile's products to its totals.
template <class Elements, int kRows>
[[gnu::noinline]] void add_avx2_tile(const Avx2Tile& tile) {
  using Layout = Avx2TileLayout<Elements>;
  // Bytes: all steps of a unit.
  constexpr int kSteps = Elements::kWords ? 8 : Layout::kByteSteps;
  const char *x = tile.x, *codes = tile.codes;
  const float *steps = tile.steps, *sums_of_x = tile.sums, *scales = tile.scales;
  const int32_t* corrections = tile.corrections;
  float* const totals = tile.totals;
  const int64_t groups = tile.groups, units = tile.units_of_group, all_steps = tile.steps_of_unit;
  const auto add = [&](int m, int i, f32v product, f32v factor) __attribute__((always_inline)) {
    float* const total = totals + m * kAvx2Panel + i * kLanes;
    store_lanes(total, load_lanes(total) + product * factor);
  };
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t unit = 0; unit < units; ++unit) {
      __m256i sums[kRows][kAvx2StripVectors] = {};
      int64_t left = all_steps;
      do {
        unroll<kSteps>([&](auto step) __attribute__((always_inline)) {
          const auto* const at =
              reinterpret_cast<const __m256i*>(codes + step.value * kAvx2StripBytes);
          const __m256i w[] = {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
          const auto* const of_x =
              reinterpret_cast<const int32_t*>(x + step.value * Layout::kStepBytes);
          unroll<kRows>([&](auto m) __attribute__((always_inline)) {
            add_avx2_step<Elements::kWords>(w, of_x[m.value], sums[m.value]);
          });
        });
        codes += kSteps * kAvx2StripBytes;
        x += kSteps * Layout::kStepBytes;
        left -= kSteps;
      } while (Elements::kWords && left > 0);
      unroll<kRows>([&](auto m) __attribute__((always_inline)) {
        const f32v step = splat(steps[m.value]);
        unroll<kAvx2StripVectors>([&](auto i) __attribute__((always_inline)) {
          __m256i sum = sums[m.value][i.value];
          if constexpr (!Elements::kWords) {
            sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
          }
          if constexpr (Layout::kHasCorrections) {
            sum = _mm256_add_epi32(sum, _mm256_set1_epi32(corrections[m.value]));
          }
          const f32v product = bits_as<f32v>(_mm256_cvtepi32_ps(sum)) * step;
          add(m.value, i.value, product, load_lanes(scales + i.value * kLanes));
        });
      });
      steps += kAvx2TileRows;
      corrections += kAvx2TileRows;
    }
    if constexpr (Layout::kHasSums) {
      unroll<kRows>([&](auto m) __attribute__((always_inline)) {
        const f32v sum = splat(sums_of_x[m.value]);
        unroll<kAvx2StripVectors>([&](auto i) __attribute__((always_inline)) {
          add(m.value, i.value, sum, load_lanes(scales + kAvx2Panel + i.value * kLanes));
        });
      });
      sums_of_x += kAvx2TileRows;
    }
    scales += GroupScales<kAvx2Panel>::kFloatsOfGroup;
  }
}

// ---- panels -------------------------------------------------------------------------------------

// Products of one panel of w, in scratch memory.
template <class Elements>
class Avx2Panel {
 public:
  static constexpr int kRows = kAvx2Panel;  // of w

  // Bytes of scratch memory.
  static int64_t scratch(int64_t x_rows) {
    return kTotalsAt + x_rows * kAvx2Panel * static_cast<int64_t>(sizeof(float));
  }

  Avx2Panel(const QuantizedMatrixView& matrix, char* scratch)
      : matrix_(matrix),
        layout_(matrix),
        codes_(scratch),
        scales_(reinterpret_cast<float*>(scratch + kScalesAt)),
        totals_(reinterpret_cast<float*>(scratch + kTotalsAt)) {}

  // Products of rows [first, first + count) of w, without Format::kFactor.
  void multiply(int64_t first, int64_t count, const char* x, int64_t x_rows) {
    std::memset(totals_, 0, x_rows * kAvx2Panel * sizeof(float));
    const int64_t group = layout_.group, unit = layout_.unit;
    for (int64_t column = 0; column < layout_.columns; column += kAvx2Chunk) {
      const int64_t left = layout_.columns - column;
      const int64_t columns = left < kAvx2Chunk ? left : kAvx2Chunk;
      scales_.template read<Format>(matrix_, first, count, column / group, columns / group);
      for (int64_t row = 0; row < count; row += kLanes) {
        unpack(first, count, row, column, columns);
      }
      const int64_t units_before = column / unit * kAvx2TileRows;
      for (int64_t row = 0; row < count; row += kAvx2Strip) {
        for (int64_t m = 0; m < x_rows; m += kAvx2TileRows) {
          const char* const packed = x + m / kAvx2TileRows * layout_.bytes();
          const Avx2Tile tile = {
              packed + layout_.elements_at(column),
              reinterpret_cast<const float*>(packed + layout_.steps_at()) + units_before,
              reinterpret_cast<const int32_t*>(packed + layout_.corrections_at()) + units_before,
              reinterpret_cast<const float*>(packed + layout_.sums_at()) +
                  column / group * kAvx2TileRows,
              codes_ + row / kAvx2Strip * kStripCodes,
              scales_.of_group(0) + row,
              totals_ + m * kAvx2Panel + row,
              columns / group,
              group / unit,
              unit / Layout::kStepColumns};
          unroll<kAvx2TileRows>([&](auto fewer) {
            constexpr int kRows = fewer.value + 1;
            if (kRows == kAvx2TileRows ? x_rows - m >= kRows : x_rows - m == kRows) {
              add_avx2_tile<Elements, kRows>(tile);
            }
          });
        }
      }
    }
  }

  // [x_rows][kAvx2Panel]
  const float* totals() const { return totals_; }

 private:
  using Format = typename Elements::Format;
  using Layout = Avx2TileLayout<Elements>;
  static constexpr int64_t kStripCodes = kAvx2Chunk / 2 * kAvx2StripBytes;  // of words
  static constexpr int64_t kScalesAt = kAvx2Panel / kAvx2Strip * kStripCodes;
  static constexpr int64_t kTotalsAt =
      kScalesAt + kAvx2Chunk / 16 * GroupScales<kAvx2Panel>::kFloatsOfGroup * sizeof(float);

  // Unpacks kLanes rows of the panel from `row` on.
  void unpack(int64_t first, int64_t count, int64_t row, int64_t column, int64_t columns) {
    const int64_t row_bytes = layout_.columns * Format::kBits / 8;
    const auto* const w = reinterpret_cast<const uint8_t*>(matrix_.weights.w);
    const uint8_t* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      // Past the last row of w, repeat it.
      const int64_t r = row + i < count ? row + i : count - 1;
      rows[i] = w + (first + r) * row_bytes + column * Format::kBits / 8;
    }
    char* to = codes_ + row / kAvx2Strip * kStripCodes + row % kAvx2Strip * 4;
    for (int64_t c = 0; c < columns; c += Elements::kRunColumns) {
      i32v lanes[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        lanes[i] = bits_as<i32v>(columns - c < Elements::kRunColumns
                                     ? Format::load_some(rows[i], columns - c)
                                     : Format::load(rows[i]));
        rows[i] += Elements::kRunBytes;
      }
      transpose(lanes);
      // The steps of missing lanes are within the chunk's memory and not read.
      for (int lane = 0; lane < kLanes; ++lane) {
        unroll<Elements::kVectors>([&](auto v) __attribute__((always_inline)) {
          const __m256i codes = Elements::template vector<v.value>(bits_as<__m256i>(lanes[lane]));
          _mm256_store_si256(reinterpret_cast<__m256i*>(to), codes);
          to += kAvx2StripBytes;
        });
      }
    }
  }

  const QuantizedMatrixView& matrix_;
  const Layout layout_;
  char* const codes_;
  const GroupScales<kAvx2Panel> scales_;
  float* const totals_;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
