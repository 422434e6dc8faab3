#include "quantized_matmul/dense.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "common/launch.h"
#include "common/plan.h"
#include "common/trace.h"
#include "quantized_matmul/gpu_support.h"

namespace mlx_anvil {

namespace {

// A layer's matrix in one block: more of them took longer, although their weights stay in cache.
std::atomic<int64_t> scratch_bytes{int64_t{128} << 20};
constexpr int64_t kSplitStep = 256;  // blocks begin at multiples of this
constexpr int64_t kThreads = 256;
constexpr int64_t kPiece = 8;  // columns per thread

using Parts = std::vector<mx::array>;

int to_int(int64_t size) {
  return static_cast<int>(size);
}

// A row-contiguous view of part of `x`, or with `transposed` the same with its last two dimensions
// swapped.
mx::array view(const mx::array& x, mx::Shape shape, int64_t offset, bool transposed = false) {
  mx::Strides strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) {
    strides[i - 1] = strides[i] * shape[i];
  }
  if (transposed) {
    std::swap(shape[1], shape[2]);
    std::swap(strides[1], strides[2]);
  }
  mx::array of_x(std::move(shape), x.dtype(), nullptr, {});
  mx::array::Flags flags{};
  flags.contiguous = true;
  flags.row_contiguous = !transposed;
  of_x.copy_shared_buffer(x, std::move(strides), flags, of_x.size(), offset);
  return of_x;
}

// Runs the last op of a graph within the evaluation of ours. The op allocates its output.
mx::array evaluated(mx::array node) {
  mx::Primitive& op = node.primitive();
  const Parts inputs = node.inputs();
  Parts outputs = {node};
  if (op.device() == mx::Device::gpu) {
    op.eval_gpu(inputs, outputs);
  } else {
    op.eval_cpu(inputs, outputs);
  }
  node.detach();
  return node;
}

struct Block {
  int64_t matrix, matrices;  // of the batch
  int64_t begin, count;      // rows or columns of w
};

// What the blocks of a call have in common.
struct Call {
  const DequantizeKernel& dequantizer;
  const QuantizedSizes& sizes;
  bool transposed;
  const mx::array& x;
  const mx::Stream& stream;

  void dequantize(const Block& block, Scratch& scratch, const mx::array* after) const {
    const int64_t rows = block.matrices * (transposed ? block.count : sizes.outputs);
    QuantizedBlockParams params{};
    params.first_row = block.matrix * sizes.outputs + (transposed ? block.begin : 0);
    params.first_column = to_int(transposed ? 0 : block.begin);
    params.columns = to_int(sizes.columns);
    params.group_shift = dequantizer.group_shift;
    params.block_rows = to_int(rows);
    params.block_columns = to_int(transposed ? sizes.columns : block.count);
    KernelLaunch request{};
    request.kernel = &dequantizer.kernel;
    request.inputs = dequantizer.inputs;
    request.outputs = {scratch.get()};
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = linear_grid(rows * params.block_columns / kPiece, kThreads);
    request.threadgroup = {kThreads, 1, 1};
    request.temporaries = {&scratch};
    request.after = after;
    launch(request, stream);
  }

  mx::array multiply(const Block& block, const Scratch& scratch) const {
    const int64_t terms = x.shape(-1);
    const int64_t rows_of_w = transposed ? block.count : sizes.outputs;
    const int64_t columns_of_w = transposed ? sizes.columns : block.count;
    const mx::array left = view(x, {to_int(block.matrices), to_int(sizes.rows), to_int(terms)},
                                block.matrix * sizes.rows * terms);
    const mx::array right = view(
        *scratch, {to_int(block.matrices), to_int(rows_of_w), to_int(columns_of_w)}, 0, transposed);
    return evaluated(mx::matmul(left, right, stream));
  }

  mx::array joined(Parts parts, int axis) const {
    if (parts.size() == 1) {
      return parts[0];
    }
    mx::array whole = evaluated(mx::concatenate(parts, axis, stream));
    keep_until_done(std::move(parts), stream);
    return whole;
  }
};

}  // namespace

int64_t set_dense_scratch_bytes(int64_t bytes) {
  return scratch_bytes.exchange(bytes);
}

DenseBlocks dense_blocks(const QuantizedSizes& sizes, QuantizedProduct product) {
  const bool transposed = product == QuantizedProduct::kTransposed;
  const int64_t split = transposed ? sizes.outputs : sizes.columns;
  const int64_t line_bytes = 2 * (transposed ? sizes.columns : sizes.outputs);
  const int64_t lines = scratch_bytes / line_bytes;
  if (lines >= split) {
    return {std::min(sizes.batch, lines / split), split};
  }
  return {1, std::max(kSplitStep, lines / kSplitStep * kSplitStep)};
}

void quantized_dense_gpu(const QuantizedFormat& format,
                         const QuantizedSizes& sizes,
                         QuantizedProduct product,
                         const mx::array& x,
                         const QuantizedWeightArrays& weights,
                         mx::array& out,
                         const mx::Stream& stream) {
  const Kernel& kernel = kernel_named(
      "quantized_matmul",
      {"quantized_dequantize_", dtype_name(x), "_", mode_name(format.kind), bits_in_name(format)},
      {{kRowsAreVectors, words_are_vectors(format, *weights.w)}});
  dense_product_gpu("quantized_matmul",
                    {kernel,
                     {weights.w, weights.scales, weights.biases ? weights.biases : &x},
                     std::countr_zero(static_cast<uint32_t>(format.group))},
                    sizes, product, x, out, stream);
}

void dense_product_gpu(const char* op,
                       const DequantizeKernel& dequantizer,
                       const QuantizedSizes& sizes,
                       QuantizedProduct product,
                       const mx::array& x,
                       mx::array& out,
                       const mx::Stream& stream) {
  const bool transposed = product == QuantizedProduct::kTransposed;
  const Call call{dequantizer, sizes, transposed, x, stream};
  const DenseBlocks blocks = dense_blocks(sizes, product);
  const int64_t split = transposed ? sizes.outputs : sizes.columns;
  const int64_t other = transposed ? sizes.columns : sizes.outputs;
  Scratch scratch({to_int(blocks.matrices), to_int(blocks.split), to_int(other)}, x.dtype(),
                  stream);
  Parts of_batches;
  std::optional<mx::array> before;
  for (int64_t matrix = 0; matrix < sizes.batch; matrix += blocks.matrices) {
    Parts parts;
    for (int64_t begin = 0; begin < split; begin += blocks.split) {
      const Block block = {matrix, std::min(blocks.matrices, sizes.batch - matrix), begin,
                           std::min(blocks.split, split - begin)};
      call.dequantize(block, scratch, before ? &*before : nullptr);
      if (!planning()) {
        before = call.multiply(block, scratch);
        parts.push_back(*before);
      }
    }
    if (!planning()) {
      of_batches.push_back(call.joined(std::move(parts), 2));
    }
  }
  if (planning()) {
    return;
  }
  note_mlx_kernel(op, "mx.matmul", "a dense product of dequantised weights");
  const mx::array result = call.joined(std::move(of_batches), 0);
  mx::array::Flags flags{};
  flags.contiguous = flags.row_contiguous = true;
  flags.col_contiguous = out.size() <= 1;
  out.copy_shared_buffer(result, out.strides(), flags, out.size());
}

}  // namespace mlx_anvil
