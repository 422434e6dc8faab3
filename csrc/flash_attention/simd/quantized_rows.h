// Quantized keys or values: unpacks codes in the order of their columns. For kernel files only (see
// common/simd/simd.h).
#pragma once

#include <type_traits>

#include "common/simd/panels.h"
#include "flash_attention/simd/quantized_integers.h"
#include "flash_attention/simd/stream.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// ---- codes --------------------------------------------------------------------------------------

inline u32v lane_bits(int bits) {
  u32v first;
  for (int lane = 0; lane < kLanes; ++lane) {
    first[lane] = static_cast<uint32_t>(lane * bits);
  }
  return first;
}

#if defined(__AVX2__)
// For a shuffle of bytes within 128 bits: the two bytes that hold the code of each lane.
template <int kBits>
struct CodeBytes {
  alignas(64) uint8_t index[4 * kLanes];

  constexpr CodeBytes() : index() {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int byte = lane * kBits / 8;
      index[4 * lane] = static_cast<uint8_t>(byte);
      index[4 * lane + 1] = static_cast<uint8_t>(byte + 1);
      index[4 * lane + 2] = index[4 * lane + 3] = 0x80;  // zero
    }
  }
};

template <int kBits>
inline constexpr CodeBytes<kBits> kCodeBytes;
#endif

// Loads kBytes bytes, at most 8. Pieces are put together in a register: a copy through memory would
// be read before its stores are done.
template <int kBytes>
inline uint64_t load_bytes(const char* from) {
  const auto piece = [from](auto type, int at) {
    std::memcpy(&type, from + at, sizeof(type));
    return static_cast<uint64_t>(type);
  };
  if constexpr (kBytes == 8) {
    return piece(uint64_t(), 0);
  } else if constexpr (kBytes >= 4) {
    return piece(uint32_t(), 0) | load_bytes<kBytes - 4>(from + 4) << 32;
  } else if constexpr (kBytes >= 2) {
    return piece(uint16_t(), 0) | load_bytes<kBytes - 2>(from + 2) << 16;
  } else if constexpr (kBytes == 1) {
    return piece(uint8_t(), 0);
  } else {
    return 0;
  }
}

// Returns the codes of columns [column, column + kLanes) in the lowest bits, with other bits above.
// `column` is a multiple of kLanes. Reads no byte past the last code.
template <int kBits>
inline u32v adjacent_codes(const uint32_t* row, int64_t column) {
  const char* const from = reinterpret_cast<const char*>(row) + column * kBits / 8;
  if constexpr (kBits == 8) {
    return zero_extend(load_bits<u8v>(from));
  }
#if defined(__AVX512F__)
  constexpr int kFirst = kBits > 4 ? 8 : 2 * kBits;
  const __m128i bytes =
      _mm_set_epi64x(static_cast<long long>(load_bytes<2 * kBits - kFirst>(from + kFirst)),
                     static_cast<long long>(load_bytes<kFirst>(from)));
  const __m512i all = _mm512_broadcast_i32x4(bytes);
  const __m512i index = load_bits<__m512i>(kCodeBytes<kBits>.index);
  return bits_as<u32v>(_mm512_shuffle_epi8(all, index)) >> (lane_bits(kBits) & 7u);
#elif defined(__AVX2__)
  const __m256i all = _mm256_set1_epi64x(static_cast<long long>(load_bytes<kBits>(from)));
  const __m256i index = load_bits<__m256i>(kCodeBytes<kBits>.index);
  return bits_as<u32v>(_mm256_shuffle_epi8(all, index)) >> (lane_bits(kBits) & 7u);
#else
  // Four codes of an odd number of bits may start in the middle of a byte.
  const auto bits = static_cast<uint32_t>(load_bytes<(4 * kBits + 7) / 8>(from));
  const auto first = static_cast<uint32_t>(column * kBits % 8);
  return (u32v{} + bits) >> (lane_bits(kBits) + first);
#endif
}

// ---- rows ---------------------------------------------------------------------------------------

// The scales and biases of a tile's rows in float32, [rows][groups].
struct GroupNumbers {
  float* scales;
  float* biases;  // null unless affine
  int64_t groups;
  int group_shift;  // columns per group, a power of two
};

// Rows of codes, as stream.h reads them. Every group is a whole number of vectors.
template <class Format>
struct CodeRows {
  struct Row {
    const uint32_t* const* codes;  // one of a list
    const float* scales;
    const float* biases;
  };

  CodeList codes;
  GroupNumbers numbers;
  int64_t columns;

  Row row(int64_t index) const {
    const int64_t first = index * numbers.groups;
    return {codes.rows + index, numbers.scales + first,
            Format::kHasBiases ? numbers.biases + first : nullptr};
  }

  int64_t whole_columns() const { return columns; }

  f32v load(const Row& row, int64_t column) const {
    const int64_t group = column >> numbers.group_shift;
    f32v x = Format::value(adjacent_codes<Format::kBits>(*row.codes, column)) * row.scales[group];
    if constexpr (Format::kHasBiases) {
      x += row.biases[group];
    }
    return x;
  }
  f32v load_some(const Row& row, int64_t column) const { return load(row, column); }

  // As in Stream.
  int64_t ahead() const { return codes.ahead; }
  void prefetch(const Row& row, int64_t ahead, int64_t column, int count) const {
    const int64_t bit = column * Format::kBits;
    if (bit % 512 < count * Format::kBits) {  // the first of a cache line
      prefetch_bytes(reinterpret_cast<const char*>(row.codes[ahead]) + bit / 8,
                     (count * Format::kBits + 7) / 8);
    }
  }

  // Dequantises row `index` to `to`.
  template <class T>
  void write(int64_t index, T* to) const {
    const Row from = row(index);
    for (int64_t c = 0; c < columns; c += kLanes) {
      store_lanes(to + c, load(from, c));
    }
  }
};

// ---- a tile -------------------------------------------------------------------------------------

// Keys or values of one kv head.
class QuantizedTile {
 public:
  QuantizedTile(Arena& arena,
                const AttentionOperands& args,
                const QuantizedView& view,
                const AttentionRows& rows,
                int64_t columns,
                AttentionTile tile)
      : args_(args), view_(view), rows_(rows), columns_(columns) {
    if (tile.streamed) {
      ahead_ = smaller(rows_ahead(columns * view.format.bits / 8) / 2, tile.keys);
    }
    list_ = arena.take<const uint32_t*>(tile.keys + ahead_);
    const int64_t groups = columns / view.format.group;
    numbers_ = {arena.take<float>(tile.keys * groups),
                view.format.has_biases() ? arena.take<float>(tile.keys * groups) : nullptr, groups,
                __builtin_ctz(static_cast<unsigned>(view.format.group))};
  }

  // Turns to a tile, and converts its scales and biases.
  void read(KeyRange tile) {
    count_ = tile.end - tile.begin;
    list_rows(args_, rows_, view_.data.w, view_.w_strides, tile, ahead_, list_);
    for_each_run(
        args_, rows_.batch, tile, [&](int64_t key, int64_t count, int64_t batch, int64_t row) {
          const int64_t first = (key - tile.begin) * numbers_.groups;
          const auto convert_run = [&](const void* numbers, const int64_t* strides, float* to) {
            convert(numbers, strides, batch, row, count, to + first);
          };
          convert_run(view_.data.scales, view_.scales_strides, numbers_.scales);
          if (numbers_.biases) {
            convert_run(view_.data.biases, view_.biases_strides, numbers_.biases);
          }
        });
  }

  int64_t count() const { return count_; }
  int64_t columns() const { return columns_; }
  const GroupNumbers& numbers() const { return numbers_; }

  const QuantizedFormat& format() const { return view_.format; }

  // Calls action(rows) with the tile's CodeRows.
  template <class Action>
  void with_rows(Action action) const {
    with_format(view_.format, [&](auto format) {
      action(CodeRows<decltype(format)>{codes(), numbers_, columns_});
    });
  }

  CodeList codes() const { return {list_, ahead_}; }

 private:
  // `count` rows from `row` on of a batch, or of a page.
  void convert(const void* numbers,
               const int64_t* strides,
               int64_t batch,
               int64_t row,
               int64_t count,
               float* to) const {
    QuantizedMatrixView matrix = {view_.format, args_.dtype, columns_, count, {}};
    matrix.weights.scale_dtype = args_.dtype;
    with_scales(matrix, numbers, [&](const auto* from, auto widen) {
      from = row_address(from, strides, batch, rows_.kv_head, row);
      const bool dense = strides[2] == numbers_.groups;
      const int64_t runs = dense ? 1 : count;
      const int64_t length = numbers_.groups * (dense ? count : 1);
      for (int64_t run = 0; run < runs; ++run, from += strides[2], to += length) {
        int64_t i = 0;
        for (; i + kLanes <= length; i += kLanes) {
          prefetch_bytes(from + length + i, 1);  // of the next tile
          store_lanes(to + i, widen(from + i));
        }
        if (i < length) {
          store_columns(to, i, length, widen_some(from + i, length - i, widen));
        }
      }
    });
  }

  const AttentionOperands& args_;
  const QuantizedView& view_;
  const AttentionRows& rows_;
  const int64_t columns_;
  GroupNumbers numbers_;
  const uint32_t** list_ = nullptr;
  int64_t ahead_ = 0;
  int64_t count_ = 0;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
