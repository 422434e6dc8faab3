// Quantized experts: few rows of each by GEMV, and what both ways share.
#include "gather_matmul/cpu.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "common/parallel.h"
#include "gather_matmul/cpu_support.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/gemv_operand.h"

namespace mlx_anvil {

namespace {

// Elements of x that one thread packs faster than it wakes another.
constexpr int64_t kLeastPackedElements = 1 << 14;

// [rows][count] to those columns of the piece's rows.
void store(const GatherCall& call,
           const GatherPiece& piece,
           int64_t first,
           int64_t count,
           const float* results) {
  const int64_t size = element_size(call.dtype);
  for (int64_t m = 0; m < piece.count; ++m) {
    quantized_cpu_kernels().store_dense(call.dtype, results + m * count, count,
                                        at(call.out_row(piece, m), first * size));
  }
}

void run(const GatherCall& call) {
  if (call.rows.rows.empty() || call.out_columns() == 0) {
    return;
  }
  std::vector<GatherPiece> few, many;
  for (const GatherPiece& piece : call.rows.pieces(kMostGatherRows)) {
    (piece.count <= kQuantizedGemvRows ? few : many).push_back(piece);
  }
  if (call.transposed()) {
    multiply_few_rows(call, few);
  } else {
    for (const GatherPiece& piece : few) {
      multiply_alone(call, piece);
    }
  }
  multiply_many_rows(call, many);
}

}  // namespace

QuantizedMatrixView GatherCall::matrix(int which, int64_t expert) const {
  return matrix_of_batch(format, dtype, sizes.columns, sizes.outputs, weights[which], expert);
}

void GatherCall::add_bias(
    int which, int64_t expert, int64_t first, int64_t count, int64_t of_rows, float* to) const {
  if (!biases[which]) {
    return;
  }
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const int64_t padded = round_up(count, 2 * kernels.lanes);
  const Floats bias = floats(padded);
  kernels.load_row(dtype, at(biases[which], (expert * sizes.outputs + first) * element_size(dtype)),
                   count, 1, padded / kernels.lanes, bias.get(), 2 * kernels.lanes);
  for (int64_t m = 0; m < of_rows; ++m) {
    for (int64_t i = 0; i < count; ++i) {
      to[m * count + i] += bias[i];
    }
  }
}

void multiply_alone(const GatherCall& call, const GatherPiece& piece) {
  const Floats x = bytes(piece.count * call.x_bytes());
  call.rows.copy_x(piece, call.x, call.x_bytes(), x.get());
  Floats results[2];
  for (int which = 0; which < call.matrices(); ++which) {
    results[which] = bytes(piece.count * call.out_bytes());
    const QuantizedMatrixView matrix = call.matrix(which, piece.expert);
    QuantizedMatmulArgs one{};
    one.dtype = call.dtype;
    one.format = call.format;
    one.product = call.product;
    one.sizes = {1, piece.count, matrix.columns, matrix.outputs};
    one.weights = matrix.weights;
    one.x = x.get();
    one.out = results[which].get();
    quantized_matmul_cpu(one);
  }
  finish_columns(call, piece, 0, call.out_columns(), results[0].get(), results[1].get());
}

void multiply_few_rows(const GatherCall& call, const std::vector<GatherPiece>& pieces) {
  if (pieces.empty()) {
    return;
  }
  std::vector<std::shared_ptr<const GemvOperand>> operands(pieces.size());
  // The experts of a single token share its row.
  const auto shares = [&](size_t i) { return i > 0 && call.rows.same_x(pieces[i - 1], pieces[i]); };
  parallel_for(static_cast<int64_t>(pieces.size()),
               std::max<int64_t>(1, kLeastPackedElements / std::max<int64_t>(1, call.x_columns())),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   if (shares(i)) {
                     continue;
                   }
                   const GatherPiece& piece = pieces[i];
                   const Floats x = bytes(piece.count * call.x_bytes());
                   call.rows.copy_x(piece, call.x, call.x_bytes(), x.get());
                   operands[i] = std::make_shared<const GemvOperand>(call.matrix(0, piece.expert),
                                                                     x.get(), piece.count);
                 }
               });
  for (size_t i = 1; i < pieces.size(); ++i) {
    if (!operands[i]) {
      operands[i] = operands[i - 1];
    }
  }
  const int64_t outputs = call.sizes.outputs;
  parallel_for(static_cast<int64_t>(pieces.size()) * outputs, gemv_grain(call.matrix(0, 0)),
               [&](int64_t begin, int64_t end) {
                 while (begin < end) {
                   const int64_t i = begin / outputs, first = begin % outputs;
                   const int64_t count = std::min(end - begin, outputs - first);
                   const GatherPiece& piece = pieces[i];
                   const GemvOperand& operand = *operands[i];
                   Floats results = operand.multiply(call.matrix(0, piece.expert), first, count);
                   if (call.gated) {
                     Floats ups = operand.multiply(call.matrix(1, piece.expert), first, count);
                     call.add_bias(0, piece.expert, first, count, piece.count, results.get());
                     call.add_bias(1, piece.expert, first, count, piece.count, ups.get());
                     quantized_cpu_kernels().gate(call.options, results.get(), ups.get(),
                                                  piece.count * count);
                   }
                   store(call, piece, first, count, results.get());
                   begin += count;
                 }
               });
}

void gather_quantized_matmul_cpu(const GatherQuantizedArgs& args) {
  const GatherRows rows(args.sizes, args.ids);
  run({args.dtype,
       args.format,
       args.product,
       args.sizes,
       rows,
       {args.weights, {}},
       {},
       false,
       {},
       args.x,
       args.out});
}

void gather_quantized_swiglu_cpu(const GatherSwigluArgs& args) {
  const GatherRows rows(args.sizes, args.ids);
  run({args.dtype,
       args.format,
       QuantizedProduct::kTransposed,
       args.sizes,
       rows,
       {args.gate, args.up},
       {args.gate_bias, args.up_bias},
       true,
       args.options,
       args.x,
       args.out});
}

}  // namespace mlx_anvil
