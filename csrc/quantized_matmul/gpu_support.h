// Shared parts of the dispatch to Metal kernels of quantized matrices.
#pragma once

#include <algorithm>
#include <bit>

#include "common/choices.h"
#include "common/integers.h"
#include "common/kernel_name.h"
#include "common/launch_arrays.h"
#include "metal/quantized_matmul/params.h"
#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Function constants, as numbered in the kernels.
enum QuantizedConstant : uint32_t {
  kRowsAreVectors,    // dequant.h
  kColumnsAreShared,  // gemv.h
  kPartsAreStored,    // plain.metal
  kTilesAreVectors,   // vectors.h
  kXIsStaged,         // gemv_stage.h
  kStepsAreWhole,     // lane_weights.h
};

// Kernel names append the bits to affine modes only: "affine4", but "mxfp8".
inline KernelName::Piece bits_in_name(const QuantizedFormat& format) {
  return format.has_biases() ? KernelName::Piece(format.bits) : KernelName::Piece("");
}

// True if rows of w can be loaded with dequant.h's vectors.
inline bool words_are_vectors(const QuantizedFormat& format, const mx::array& w) {
  return rows_are_vectors({&w}, format.bits % 4 == 0 ? 16 : format.bits % 2 == 0 ? 8 : 4);
}

// Rows of x that a kernel is instantiated for.
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

// Rows of w per simdgroup, as in GemvStreams.
constexpr int64_t gemv_streams(int64_t rows) {
  return rows > 4 ? 2 : 4;
}

// Rows of w that occupy the GPU do so with four per simdgroup. With fewer, simdgroups split the
// columns. This must not depend on the rows of x, which would change the order of a sum.
inline bool gemv_shares_columns(int64_t outputs, const mx::Stream& stream) {
  return outputs < choices(stream.device).gemv_shared_outputs;
}

}  // namespace mlx_anvil
