// Gradients of quantized experts in scales and biases: the kernel of quantized_matmul for the rows
// of one expert after the other.
#include <cstring>

#include "gather_matmul/cpu.h"
#include "gather_matmul/cpu_support.h"
#include "quantized_matmul/cpu.h"

namespace mlx_anvil {

namespace {

// Copies one row of each of the piece's rows, chosen by `place`.
Floats copied(const GatherRows& rows,
              const GatherPiece& piece,
              const void* from,
              int64_t row_bytes,
              int64_t GatherRow::* place) {
  Floats to = bytes(piece.count * row_bytes);
  for (int64_t i = 0; i < piece.count; ++i) {
    std::memcpy(at(to.get(), i * row_bytes),
                at(from, rows.rows[piece.begin + i].*place * row_bytes), row_bytes);
  }
  return to;
}

}  // namespace

void gather_scale_gradient_cpu(const GatherScaleGradientArgs& args) {
  const GatherSizes& sizes = args.sizes;
  const int64_t size = element_size(args.dtype);
  const int64_t result_bytes = sizes.outputs * (sizes.columns / args.format.group) * size;
  const bool transposed = args.product == QuantizedProduct::kTransposed;
  for (void* out : {args.d_scales, args.d_biases}) {
    if (out) {  // experts without rows
      std::memset(out, 0, sizes.experts * result_bytes);
    }
  }
  const int64_t x_bytes = (transposed ? sizes.columns : sizes.outputs) * size;
  const int64_t dy_bytes = (transposed ? sizes.outputs : sizes.columns) * size;
  const GatherRows rows(sizes, args.ids);
  for (const GatherPiece& piece : rows.experts) {
    const Floats x = copied(rows, piece, args.x, x_bytes, &GatherRow::x);
    const Floats dy = copied(rows, piece, args.dy, dy_bytes, &GatherRow::out);
    QuantizedScaleGradientArgs of_expert{};
    of_expert.dtype = args.dtype;
    of_expert.format = args.format;
    of_expert.sizes = {1, piece.count, sizes.columns, sizes.outputs};
    of_expert.w = args.w + piece.expert * sizes.outputs * (sizes.columns * args.format.bits / 32);
    of_expert.y = transposed ? dy.get() : x.get();
    of_expert.x = transposed ? x.get() : dy.get();
    if (args.d_scales) {
      of_expert.d_scales = at(args.d_scales, piece.expert * result_bytes);
    }
    of_expert.d_biases = at(args.d_biases, piece.expert * result_bytes);
    quantized_scale_gradient_cpu(of_expert);
  }
}

}  // namespace mlx_anvil
