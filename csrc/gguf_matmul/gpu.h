// Products with matrices in GGUF's blocks on a GPU, and in the simulator: kernel selection and
// launches.
#pragma once

#include <string>

#include "gguf_matmul/problem.h"
#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Returns true if the kernels support such a product on `stream`. Otherwise sets *why_not.
bool can_launch_gguf(GgufKind kind,
                     const QuantizedSizes& sizes,
                     const mx::Stream& stream,
                     std::string* why_not);

// Gives `out` its memory. Neither it nor the summed dimension may be empty.
void gguf_matmul_gpu(GgufKind kind,
                     const QuantizedSizes& sizes,
                     QuantizedProduct product,
                     const mx::array& x,
                     const mx::array& w,
                     mx::array& out,
                     const mx::Stream& stream);

// x W^T by the kernels for up to kQuantizedGemvRows rows, whose results do not depend on the number
// of rows. Gives `out` its memory. No dimension may be empty.
void gguf_gemv_gpu(GgufKind kind,
                   const QuantizedSizes& sizes,
                   const mx::array& x,
                   const mx::array& w,
                   mx::array& out,
                   const mx::Stream& stream);

// Rows `ids` (32 or 64 bits) of w [rows, bytes of a row], dequantised to the dtype of `out`. Ids
// below zero count from the last row, and others out of range clamp to the last one. Gives `out`
// its memory. Nothing may be empty.
void gguf_rows_gpu(GgufKind kind,
                   const mx::array& w,
                   const mx::array& ids,
                   mx::array& out,
                   const mx::Stream& stream);

}  // namespace mlx_anvil
