// Launches the kernels of x W^T for few rows: gemv.metal, and gemv_matrix.metal where there are
// matrix units.
#include <algorithm>
#include <limits>

#include "quantized_matmul/gpu.h"
#include "quantized_matmul/gpu_request.h"
#include "quantized_matmul/matrix_tiles.h"

namespace mlx_anvil {

namespace {

// ---- gemv_matrix.metal --------------------------------------------------------------------------

// Fewer tiles get more simdgroups each. Larger tiles amortise the preparation of x over more rows
// of w. The choice depends on w only; otherwise results would depend on the number of rows of x.
MatrixTile matrix_tile(int64_t all_outputs, const DeviceTraits& traits) {
  constexpr int64_t kManyOutputs = 65536;
  return all_outputs <= 2 * 16 * traits.multiprocessors
             ? MatrixTile{16, 8}
             : MatrixTile{32, all_outputs < kManyOutputs ? 4 : 8};
}

// Rows of w are cut into `whole` tiles, followed by tiles of half the height.
struct MatrixTiles {
  int64_t whole;
  int64_t all;
};

// If all tiles run in one wave, each multiprocessor gets the same number of whole tiles and at most
// one half tile. With whole tiles only, some multiprocessors would get one tile more than others.
MatrixTiles matrix_tiles(const MatrixTile& tile,
                         const QuantizedSizes& sizes,
                         int64_t matrices,
                         const DeviceTraits& traits) {
  const int64_t rows = tile.outputs / matrices, all = ceil_div(sizes.outputs, rows);
  const int64_t halves = ceil_div(sizes.outputs, rows / 2);
  const int64_t whole = ceil_div(halves, traits.multiprocessors) / 2 * traits.multiprocessors;
  const MatrixTiles cut = {whole, std::max(all, halves - whole)};
  const bool has_halves =
      tile.outputs == 32 && tile.simdgroups == 4 && matrices == 1 && sizes.batch == 1;
  const bool at_once = cut.all * 32 * tile.simdgroups <= kThreadsAtOnce * traits.multiprocessors;
  return has_halves && at_once ? cut : MatrixTiles{all, all};
}

void launch_gemv_matrix(const char* kernel,
                        const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const QuantizedRequest& request) {
  const auto matrices = static_cast<int64_t>(request.matrices.size());
  const DeviceTraits traits = device_traits(request.stream.device);
  const MatrixTile tile = matrix_tile(sizes.outputs * matrices * sizes.batch, traits);
  const int64_t rows = std::min<int64_t>(sizes.rows, kQuantizedGemvRows);
  const bool staged = tile.stages(rows, format) + tile.static_memory() <= kMemoryOfThreadgroup;
  const int64_t memory = tile.stages(staged ? rows : 0, format), threads = 32 * tile.simdgroups;
  const int64_t at_once = std::min(
      kThreadsAtOnce / threads,
      traits.threadgroup_memory / (memory + tile.static_memory() + kReservedThreadgroupMemory));
  QuantizedParams params = request.params(format, sizes);
  const MatrixTiles tiles = matrix_tiles(tile, sizes, matrices, traits);
  // Threadgroups loop over tiles only if all tiles are whole.
  const int64_t threadgroups =
      tiles.whole < tiles.all ? tiles.all : std::min(tiles.all, at_once * traits.multiprocessors);
  params.whole_tiles = static_cast<int32_t>(tiles.whole);
  request.launch_kernel({"quantized_", kernel, "_matrix_", dtype_name(request.x), "_g",
                         format.group, "_n", tile.outputs, "s", tile.simdgroups},
                        {{kRowsAreVectors, true}, {kXIsStaged, staged}}, params,
                        {static_cast<uint32_t>(threadgroups),
                         static_cast<uint32_t>(ceil_div(sizes.rows, kQuantizedGemvRows)),
                         static_cast<uint32_t>(sizes.batch)},
                        threads, memory);
}

void launch_gemv(const char* kernel,
                 const QuantizedFormat& format,
                 const QuantizedSizes& sizes,
                 const QuantizedRequest& request) {
  if (takes_matrix_units(format, sizes, request)) {
    launch_gemv_matrix(kernel, format, sizes, request);
    return;
  }
  const auto matrices = static_cast<int64_t>(request.matrices.size());
  const int64_t all_outputs = sizes.outputs * matrices * sizes.batch;
  const char* dtype = dtype_name(request.x);
  const auto row_blocks = static_cast<uint32_t>(ceil_div(sizes.rows, kQuantizedGemvRows));
  const auto batch = static_cast<uint32_t>(sizes.batch);
  // streams: rows of w per simdgroup, or per threadgroup if columns are shared.
  const auto grid = [&](int64_t streams, bool shared) -> Extent {
    const int64_t all = ceil_div(sizes.outputs, streams / matrices);
    return {static_cast<uint32_t>(shared ? all : ceil_div(all, kGemvSimdgroups)), row_blocks,
            batch};
  };
  // The op limits a swiglu to this many rows.
  const int64_t rows = std::min<int64_t>(sizes.rows, kQuantizedGemvRows);
  const bool shared = gemv_shares_columns(all_outputs, request.stream);
  const bool vectors = request.words_are_vectors(format) && rows_are_vectors({&request.x});
  request.launch_kernel({"quantized_", kernel, "_", dtype, "_", mode_name(format.kind),
                         bits_in_name(format), "_r", kernel_rows(rows)},
                        {{kRowsAreVectors, vectors}, {kColumnsAreShared, shared}},
                        request.params(format, sizes), grid(gemv_streams(sizes.rows), shared));
}

}  // namespace

bool takes_matrix_units(const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const QuantizedRequest& request) {
  return device_traits(request.stream.device).matrix_units && format.has_biases() &&
         format.bits == 4 && request.x.itemsize() == 2 && sizes.columns % kMatrixColumns == 0 &&
         sizes.outputs * sizes.batch <= std::numeric_limits<int32_t>::max() &&
         request.words_are_vectors(format) && request.factors_are_vectors(format) &&
         rows_are_vectors({&request.x});
}

bool gemv_takes_matrix_units(const QuantizedFormat& format,
                             const QuantizedSizes& sizes,
                             const mx::array& x,
                             const QuantizedWeightArrays& weights,
                             const mx::Stream& stream) {
  mx::array unused({}, x.dtype(), nullptr, {});
  return takes_matrix_units(format, sizes, {x, {weights}, unused, stream});
}

void quantized_gemv_gpu(const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const mx::array& x,
                        const QuantizedWeightArrays& weights,
                        mx::array& out,
                        const mx::Stream& stream) {
  launch_gemv("gemv", format, sizes, {x, {weights}, out, stream});
}

void quantized_swiglu_gpu(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          const mx::array& x,
                          const QuantizedWeightArrays& gate,
                          const QuantizedWeightArrays& up,
                          const GateOptions& activation,
                          mx::array& out,
                          const mx::Stream& stream) {
  const QuantizedRequest request{x, {gate, up}, out, stream, activation};
  if (suits_quantized_tiles(sizes, stream)) {
    launch_quantized_gated_tiles(format, sizes, request);
  } else {
    launch_gemv("swiglu", format, sizes, request);
  }
}

}  // namespace mlx_anvil
