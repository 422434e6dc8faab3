// What dispatches to Metal kernels of quantized matrices share.
#pragma once

#include <algorithm>
#include <bit>

#include "common/kernel_name.h"
#include "common/launch_arrays.h"
#include "common/rounding.h"
#include "metal/quantized_matmul/params.h"
#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Function constants, as numbered in dequant.h and gemv.h.
enum QuantizedConstant : uint32_t { kRowsAreVectors, kColumnsAreShared };

// In the names of kernels the mode is followed by these: "affine4", but "mxfp8".
inline KernelName::Piece bits_in_name(const QuantizedFormat& format) {
  return format.has_biases() ? KernelName::Piece(format.bits) : KernelName::Piece("");
}

// Whether rows of w may be loaded as widely as dequant.h does.
inline bool words_are_vectors(const QuantizedFormat& format, const mx::array& w) {
  return rows_are_vectors({&w}, format.bits % 4 == 0 ? 16 : format.bits % 2 == 0 ? 8 : 4);
}

// Rows of x that a kernel is made for.
inline int64_t kernel_rows(int64_t rows) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
}

inline QuantizedParams params_of(const QuantizedFormat& format, const QuantizedSizes& sizes) {
  QuantizedParams params{};
  params.rows = static_cast<int32_t>(sizes.rows);
  params.columns = static_cast<int32_t>(sizes.columns);
  params.outputs = static_cast<int32_t>(sizes.outputs);
  params.group_shift = std::countr_zero(static_cast<uint32_t>(format.group));
  return params;
}

// ---- gemv.h -------------------------------------------------------------------------------------

inline constexpr int kGemvSimdgroups = 4;
inline constexpr int kGemvThreads = 32 * kGemvSimdgroups;

// Rows of w that a SIMD group takes at a time, as GemvStreams.
constexpr int64_t gemv_streams(int64_t rows) {
  return rows > 4 ? 2 : 4;
}

// So many rows of w keep a large GPU busy, four to a SIMD group; with fewer, SIMD groups share
// columns. Not a matter of the rows of x, which must not change the order of a sum.
constexpr bool gemv_shares_columns(int64_t outputs) {
  return outputs < 4096;
}

}  // namespace mlx_anvil
