// Launches the kernels of x W for few rows (plain.metal).
#include <algorithm>

#include "quantized_matmul/gpu_request.h"

namespace mlx_anvil {

namespace {

constexpr int kPlainThreads = 256;
constexpr int64_t kEnoughThreadgroups = 128;
constexpr int64_t kRowsOfTurn = kPlainThreads;  // rows of w per turn, 32 per simdgroup

// Columns per threadgroup: those of its lanes, as in PlainColumns.
int64_t plain_block(const QuantizedFormat& format, int64_t kernel_rows) {
  const int64_t chunk = format.bits == 8 ? 16 : 32;
  return 32 * std::min(chunk, 64 / kernel_rows);
}

}  // namespace

void launch_quantized_sum(const Scratch& parts, mx::array& out, const mx::Stream& stream) {
  QuantizedSumParams params{};
  params.size = static_cast<int64_t>(out.size());
  params.parts = parts.get()->shape(0);
  KernelLaunch request{};
  request.kernel = &kernel_named("quantized_matmul", {"quantized_sum_parts_", dtype_name(out)},
                                 {{kRowsAreVectors, false}});
  request.inputs = {parts.get()};
  request.outputs = {&out};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = linear_grid(params.size, kPlainThreads);
  request.threadgroup = {kPlainThreads, 1, 1};
  request.temporaries = {&parts};
  launch(request, stream);
}

void launch_quantized_plain(const QuantizedFormat& format,
                            const QuantizedSizes& sizes,
                            const QuantizedRequest& request) {
  const int64_t rows = kernel_rows(sizes.rows);
  const int64_t blocks = ceil_div(sizes.columns, plain_block(format, rows));
  const int64_t wanted = ceil_div(kEnoughThreadgroups, blocks * sizes.batch);
  const int64_t turns = ceil_div(sizes.outputs, kRowsOfTurn);
  QuantizedParams params = params_of(format, sizes);
  params.rows_per_part = static_cast<int32_t>(kRowsOfTurn * ceil_div(turns, wanted));
  const int64_t parts = ceil_div(sizes.outputs, params.rows_per_part);
  const KernelName name = {"quantized_plain_",
                           dtype_name(request.x),
                           "_",
                           mode_name(format.kind),
                           bits_in_name(format),
                           "_r",
                           rows};
  const FunctionConstants constants = {{kRowsAreVectors, request.words_are_vectors(format)},
                                       {kPartsAreStored, parts > 1}};
  const Extent grid = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(parts),
                       static_cast<uint32_t>(sizes.batch)};
  launch_in_parts(parts, request.out, request.stream, [&](mx::array& out) {
    QuantizedRequest{request.x, request.matrices, out, request.stream}.launch_kernel(
        name, constants, params, grid, kPlainThreads);
  });
}

}  // namespace mlx_anvil
