// Dequantises rows of a quantized matrix in the order of their columns. The products instead use
// lane order (quantized_matmul/simd/unpack.h), in which codes unpack fastest; a row is written in
// natural order.
//
//   read the row's scales and biases
//   for each group: for each vector of columns:
//     gather kLanes adjacent codes; out = value(code) * scale + bias
#include "common/simd/panels.h"
#include "quantized_embedding/simd/kernels.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

inline u32v lookup_words(u32v words, u32v index) {
  return bits_as<u32v>(lookup(bits_as<f32v>(words), index));
}

// Returns the codes of kLanes adjacent columns in the lowest bits, with other bits above.
template <int kBits>
inline u32v neighbouring_codes(const uint32_t* row, int64_t column, int64_t row_words) {
  // kLanes codes span at most kLanes words: narrow codes fit anyway, and 32-lane multiples start at
  // a word.
  const int64_t bit = column * kBits, word = bit / 32, left = row_words - word;
  u32v words;
  if (left >= kLanes) {
    words = load_bits<u32v>(row + word);
  } else {
    uint32_t padded[kLanes] = {};
    std::memcpy(padded, row + word, left * sizeof(uint32_t));
    words = load_bits<u32v>(padded);
  }
  u32v bits;
  for (int lane = 0; lane < kLanes; ++lane) {
    bits[lane] = static_cast<uint32_t>(lane * kBits);
  }
  // Otherwise vectors start at a word, and `bits` is constant.
  if constexpr (kLanes * kBits % 32 != 0) {
    bits += static_cast<uint32_t>(bit % 32);
  }
  const u32v index = bits >> 5, shift = bits & 31u;
  const u32v low = lookup_words(words, index) >> shift;
  if constexpr (32 % kBits == 0) {
    return low;
  } else {
    // The code may straddle two words. Shifting twice avoids an undefined shift by 32.
    return low | (lookup_words(words, index + 1u) << 1) << (31u - shift);
  }
}

template <class Format, class T>
void write_row(const QuantizedMatrixView& matrix, int64_t row, T* out, float* scratch) {
  RowScales scales(matrix, 1, scratch);
  scales.read(row);
  const int64_t columns = matrix.columns, group = matrix.format.group;
  const int64_t row_words = columns / 16 * Format::kBits / 2;
  const uint32_t* const words = matrix.weights.w + row * row_words;
  for (int64_t first = 0; first < columns; first += group) {
    // A group is a whole number of vectors.
    const f32v scale = scales.scale(first / kLanes);
    f32v bias = {};
    if constexpr (Format::kHasBiases) {
      bias = scales.bias(first / kLanes);
    }
    for (int64_t column = first; column < first + group; column += kLanes) {
      f32v value = Format::value(neighbouring_codes<Format::kBits>(words, column, row_words));
      value *= scale;
      if constexpr (Format::kHasBiases) {
        value += bias;
      }
      store_lanes(out + column, value);
    }
  }
}

void write_row_of(
    const QuantizedMatrixView& matrix, int64_t row, KernelDtype dtype, void* out, float* scratch) {
  with_format(matrix.format, [&](auto format) {
    using Format = decltype(format);
    switch (dtype) {
      case KernelDtype::kFloat32:
        return write_row<Format>(matrix, row, static_cast<float*>(out), scratch);
      case KernelDtype::kFloat16:
        return write_row<Format>(matrix, row, static_cast<f16*>(out), scratch);
      default:
        return write_row<Format>(matrix, row, static_cast<bf16*>(out), scratch);
    }
  });
}

}  // namespace

constinit const QuantizedEmbeddingKernels quantized_embedding_kernels_table = {
    .row = write_row_of,
    .scratch = RowScales::scratch,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
