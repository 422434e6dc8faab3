// Launches the kernels of products of many rows: tiles.metal, and matmul.metal where there are
// matrix units.
#include <algorithm>

#include "quantized_matmul/gpu.h"
#include "quantized_matmul/gpu_request.h"

namespace mlx_anvil {

namespace {

// ---- matmul.metal -------------------------------------------------------------------------------

constexpr int64_t kTileRows = 32;
constexpr int64_t kGpuTileColumns = 64;

// ---- tiles.metal --------------------------------------------------------------------------------

constexpr int64_t kStep = 64;               // along the summed dimension
constexpr int64_t kPlainTileColumns = 128;  // otherwise kGpuTileColumns
constexpr int64_t kFewTileColumns = 16;
constexpr int64_t kGatedTileColumns = 8;

// matmul.metal suits matrix units: it stages weights in threadgroup memory, in the layout that they
// read.
void launch_staged(const QuantizedFormat& format,
                   const QuantizedSizes& sizes,
                   QuantizedProduct product,
                   const QuantizedRequest& request) {
  const bool transposed = product == QuantizedProduct::kTransposed;
  const int64_t columns = transposed ? sizes.outputs : sizes.columns;
  request.launch_kernel(
      {"quantized_matmul_", transposed ? "transposed_" : "plain_", dtype_name(request.x), "_",
       mode_name(format.kind), bits_in_name(format)},
      {{kRowsAreVectors, request.words_are_vectors(format)},
       {kTilesAreVectors, rows_are_vectors({&request.x, &request.out})}},
      params_of(format, sizes),
      {static_cast<uint32_t>(ceil_div(columns, kGpuTileColumns)),
       static_cast<uint32_t>(ceil_div(sizes.rows, kTileRows)), static_cast<uint32_t>(sizes.batch)});
}

FunctionConstants tile_constants(const QuantizedFormat& format,
                                 int64_t depth,
                                 const QuantizedRequest& request) {
  return {{kRowsAreVectors, request.words_are_vectors(format)},
          {kTilesAreVectors, rows_are_vectors({&request.x, &request.out})},
          {kStepsAreWhole, depth % kStep == 0}};
}

}  // namespace

bool suits_quantized_tiles(const QuantizedSizes& sizes, const mx::Stream& stream) {
  constexpr int64_t kVectorRows = 2;  // up to these, gemv.metal takes fewer instructions
  return !device_traits(stream.device).matrix_units && sizes.rows > kVectorRows;
}

void launch_quantized_tiles(const QuantizedFormat& format,
                            const QuantizedSizes& sizes,
                            QuantizedProduct product,
                            const QuantizedRequest& request) {
  if (device_traits(request.stream.device).matrix_units) {
    launch_staged(format, sizes, product, request);
    return;
  }
  const bool transposed = product == QuantizedProduct::kTransposed;
  const bool few = transposed && sizes.rows <= choices(request.stream.device).product_split_rows;
  const int64_t rows = few ? std::max<int64_t>(kernel_rows(sizes.rows), 8) : kTileRows;
  const int64_t columns = few ? kFewTileColumns : transposed ? kGpuTileColumns : kPlainTileColumns;
  const KernelName::Piece suffix = few ? KernelName::Piece(rows) : KernelName::Piece("");
  request.launch_kernel(
      {"quantized_tiles_",
       few          ? "few_"
       : transposed ? "transposed_"
                    : "plain_",
       dtype_name(request.x), "_", mode_name(format.kind), bits_in_name(format), few ? "_r" : "",
       suffix},
      tile_constants(format, transposed ? sizes.columns : sizes.outputs, request),
      params_of(format, sizes),
      {static_cast<uint32_t>(ceil_div(transposed ? sizes.outputs : sizes.columns, columns)),
       static_cast<uint32_t>(ceil_div(sizes.rows, rows)), static_cast<uint32_t>(sizes.batch)});
}

void launch_quantized_gated_tiles(const QuantizedFormat& format,
                                  const QuantizedSizes& sizes,
                                  const QuantizedRequest& request) {
  request.launch_kernel({"quantized_tiles_gated_", dtype_name(request.x), "_",
                         mode_name(format.kind), bits_in_name(format), "_r", kQuantizedGemvRows},
                        tile_constants(format, sizes.columns, request),
                        request.params(format, sizes),
                        {static_cast<uint32_t>(ceil_div(sizes.outputs, kGatedTileColumns)),
                         static_cast<uint32_t>(ceil_div(sizes.rows, kQuantizedGemvRows)), 1});
}

void quantized_tiles_gpu(const QuantizedFormat& format,
                         const QuantizedSizes& sizes,
                         const mx::array& x,
                         const QuantizedWeightArrays& weights,
                         mx::array& out,
                         const mx::Stream& stream) {
  launch_quantized_tiles(format, sizes, QuantizedProduct::kTransposed, {x, {weights}, out, stream});
}

}  // namespace mlx_anvil
