#include "quantized_matmul/gpu.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "common/allocate.h"
#include "common/errors.h"
#include "common/launch.h"
#include "quantized_matmul/dense.h"
#include "quantized_matmul/gpu_support.h"

namespace mlx_anvil {

namespace {

constexpr const char* kFolder = "quantized_matmul";

// Offsets in kernels are 32 bits. Words of w have four weights or more.
constexpr int64_t kMostElements = std::numeric_limits<uint32_t>::max();
constexpr int64_t kMostWeights = 4 * kMostElements;

// Function constants of plain.metal, matmul.metal, gemv_stage.h and lane_weights.h.
enum Constant : uint32_t { kPartsAreStored = 2, kTilesAreVectors, kXIsStaged, kStepsAreWhole };

// ---- gemv_matrix.metal --------------------------------------------------------------------------

constexpr int64_t kStages = 2;                      // per simdgroup, in threadgroup memory
constexpr int64_t kMemoryOfThreadgroup = 99 << 10;  // available on every GPU with matrix units

constexpr int64_t kThreadsAtOnce = 512;       // per multiprocessor, limited by registers
constexpr int64_t kMemoryOfSystem = 1 << 10;  // reserved per threadgroup

// Rows of w per tile, and simdgroups that share it.
struct MatrixTile {
  int64_t outputs;
  int64_t simdgroups;

  // Bytes of partial sums.
  int64_t static_memory() const { return simdgroups * (outputs / 8) * 32 * 8; }

  int64_t stages(int64_t rows_of_x, const QuantizedFormat& format) const {
    const int64_t codes = kMatrixColumns / 2, factors = kMatrixColumns / format.group * 4;
    return kStages * simdgroups * (outputs * (codes + factors) + rows_of_x * kMatrixColumns * 2);
  }
};

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

// ---- plain.metal --------------------------------------------------------------------------------

constexpr int kPlainThreads = 256;
constexpr int64_t kEnoughThreadgroups = 128;
constexpr int64_t kRowsOfTurn = kPlainThreads;  // rows of w per turn, 32 per simdgroup

// ---- matmul.metal -------------------------------------------------------------------------------

constexpr int64_t kTileRows = 32;
constexpr int64_t kGpuTileColumns = 64;

// ---- tiles.metal --------------------------------------------------------------------------------

constexpr int64_t kStep = 64;               // along the summed dimension
constexpr int64_t kPlainTileColumns = 128;  // otherwise kGpuTileColumns
constexpr int64_t kFewTileColumns = 16;
constexpr int64_t kFewRows = 32;  // up to these, simdgroups split the summed dimension

// Columns per threadgroup: those of its lanes, as in PlainColumns.
int64_t plain_block(const QuantizedFormat& format, int64_t kernel_rows) {
  const int64_t chunk = format.bits == 8 ? 16 : 32;
  return 32 * std::min(chunk, 64 / kernel_rows);
}

// Arguments shared by all launches in this file.
struct Request {
  const mx::array& x;
  InlineVector<QuantizedWeightArrays, 2> matrices;
  mx::array& out;
  const mx::Stream& stream;
  GateOptions activation = {};  // of a swiglu

  QuantizedParams params(const QuantizedFormat& format, const QuantizedSizes& sizes) const {
    QuantizedParams params = params_of(format, sizes);
    params.activation = static_cast<int32_t>(activation.activation);
    params.limit = activation.limit;
    return params;
  }

  bool words_are_vectors(const QuantizedFormat& format) const {
    return std::all_of(matrices.begin(), matrices.end(), [&](const QuantizedWeightArrays& m) {
      return mlx_anvil::words_are_vectors(format, *m.w);
    });
  }

  // True if scales and biases can be loaded as vectors of up to four: those of 256 columns
  // (gemv_stage.h).
  bool factors_are_vectors(const QuantizedFormat& format) const {
    const int bytes = format.group == 128 ? 4 : 8;
    return std::all_of(matrices.begin(), matrices.end(), [&](const QuantizedWeightArrays& m) {
      return rows_are_vectors({m.scales, m.biases}, bytes);
    });
  }

  void launch_kernel(const KernelName& name,
                     const FunctionConstants& constants,
                     const QuantizedParams& params,
                     Extent grid,
                     int64_t threads = kGemvThreads,
                     int64_t threadgroup_memory = 0) const {
    KernelLaunch request{};
    request.kernel = &kernel_named(kFolder, name, constants);
    request.inputs = {&x};
    for (const QuantizedWeightArrays& m : matrices) {
      request.inputs.append({m.w, m.scales, m.biases ? m.biases : &x});
    }
    request.outputs = {&out};
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = grid;
    request.threadgroup = {static_cast<uint32_t>(threads), 1, 1};
    if (threadgroup_memory > 0) {
      request.threadgroup_memory = {static_cast<uint32_t>(threadgroup_memory)};
    }
    launch(request, stream);
  }
};

// The choice must not depend on the number of rows from 1 to 8, or results would.
bool takes_matrix_units(const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const Request& request) {
  return device_traits(request.stream.device).matrix_units && format.has_biases() &&
         format.bits == 4 && request.x.itemsize() == 2 && sizes.columns % kMatrixColumns == 0 &&
         sizes.outputs * sizes.batch <= std::numeric_limits<int32_t>::max() &&
         request.words_are_vectors(format) && request.factors_are_vectors(format) &&
         rows_are_vectors({&request.x});
}

void launch_gemv_matrix(const char* kernel,
                        const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const Request& request) {
  const auto matrices = static_cast<int64_t>(request.matrices.size());
  const DeviceTraits traits = device_traits(request.stream.device);
  const MatrixTile tile = matrix_tile(sizes.outputs * matrices * sizes.batch, traits);
  const int64_t rows = std::min<int64_t>(sizes.rows, kQuantizedGemvRows);
  const bool staged = tile.stages(rows, format) + tile.static_memory() <= kMemoryOfThreadgroup;
  const int64_t memory = tile.stages(staged ? rows : 0, format), threads = 32 * tile.simdgroups;
  const int64_t at_once =
      std::min(kThreadsAtOnce / threads,
               traits.threadgroup_memory / (memory + tile.static_memory() + kMemoryOfSystem));
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
                 const Request& request) {
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
  const bool shared = gemv_shares_columns(all_outputs);
  const bool vectors = request.words_are_vectors(format) && rows_are_vectors({&request.x});
  request.launch_kernel({"quantized_", kernel, "_", dtype, "_", mode_name(format.kind),
                         bits_in_name(format), "_r", kernel_rows(rows)},
                        {{kRowsAreVectors, vectors}, {kColumnsAreShared, shared}},
                        request.params(format, sizes), grid(gemv_streams(sizes.rows), shared));
}

void launch_sum(const Scratch& parts, int count, mx::array& out, const mx::Stream& stream) {
  QuantizedSumParams params{};
  params.size = static_cast<int64_t>(out.size());
  params.parts = count;
  KernelLaunch request{};
  request.kernel =
      &kernel_named(kFolder, {"quantized_sum_parts_", dtype_name(out)}, {{kRowsAreVectors, false}});
  request.inputs = {parts.get()};
  request.outputs = {&out};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = linear_grid(params.size, kPlainThreads);
  request.threadgroup = {kPlainThreads, 1, 1};
  request.temporaries = {&parts};
  launch(request, stream);
}

void launch_plain(const QuantizedFormat& format,
                  const QuantizedSizes& sizes,
                  const Request& request) {
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
  if (parts == 1) {
    request.launch_kernel(name, constants, params, grid, kPlainThreads);
    return;
  }
  mx::Shape shape = request.out.shape();
  shape.insert(shape.begin(), static_cast<int>(parts));
  Scratch partial(shape, mx::float32, request.stream);
  Request{request.x, request.matrices, *partial, request.stream}.launch_kernel(
      name, constants, params, grid, kPlainThreads);
  launch_sum(partial, static_cast<int>(parts), request.out, request.stream);
}

// matmul.metal suits matrix units: it stages weights in threadgroup memory, in the layout that they
// read.
void launch_staged(const QuantizedFormat& format,
                   const QuantizedSizes& sizes,
                   QuantizedProduct product,
                   const Request& request) {
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

void launch_tiled(const QuantizedFormat& format,
                  const QuantizedSizes& sizes,
                  QuantizedProduct product,
                  const Request& request) {
  if (device_traits(request.stream.device).matrix_units) {
    launch_staged(format, sizes, product, request);
    return;
  }
  const bool transposed = product == QuantizedProduct::kTransposed;
  const bool few = transposed && sizes.rows <= kFewRows;
  const int64_t rows = few ? kernel_rows(sizes.rows) : kTileRows;
  const int64_t columns = few ? kFewTileColumns : transposed ? kGpuTileColumns : kPlainTileColumns;
  const KernelName::Piece suffix = few ? KernelName::Piece(rows) : KernelName::Piece("");
  request.launch_kernel(
      {"quantized_tiles_",
       few          ? "few_"
       : transposed ? "transposed_"
                    : "plain_",
       dtype_name(request.x), "_", mode_name(format.kind), bits_in_name(format), few ? "_r" : "",
       suffix},
      {{kRowsAreVectors, request.words_are_vectors(format)},
       {kTilesAreVectors, rows_are_vectors({&request.x, &request.out})},
       {kStepsAreWhole, (transposed ? sizes.columns : sizes.outputs) % kStep == 0}},
      params_of(format, sizes),
      {static_cast<uint32_t>(ceil_div(transposed ? sizes.outputs : sizes.columns, columns)),
       static_cast<uint32_t>(ceil_div(sizes.rows, rows)), static_cast<uint32_t>(sizes.batch)});
}

// Kernels that read w once for every 8 rows of x; a dense product of dequantised blocks; or tiles
// of matmul.metal or tiles.metal.
enum class Route { kFewRows, kDense, kTiles };

Route route_of(const QuantizedFormat& format,
               const QuantizedSizes& sizes,
               QuantizedProduct product,
               const Request& request) {
  if (sizes.rows <= kQuantizedGemvRows) {
    return Route::kFewRows;
  }
  if (!device_traits(request.stream.device).matrix_units || request.x.itemsize() != 2) {
    return Route::kTiles;
  }
  const bool several = sizes.rows <= kMostMatrixRows && product == QuantizedProduct::kTransposed;
  return several && takes_matrix_units(format, sizes, request) ? Route::kFewRows : Route::kDense;
}

}  // namespace

bool can_launch_quantized(const QuantizedSizes& sizes,
                          const mx::Stream& stream,
                          std::string* why_not,
                          bool stores_results) {
  constexpr int64_t kLongest = std::numeric_limits<int32_t>::max() / 32;
  constexpr int64_t kMostBatches = 65535;
  if (std::max({sizes.rows, sizes.columns, sizes.outputs}) > kLongest ||
      sizes.batch > kMostBatches) {
    *why_not = "the kernels take at most 2^26 rows and columns, and 65535 matrices";
    return false;
  }
  const int64_t batch = std::max<int64_t>(sizes.batch, 1);
  const int64_t longest = stores_results ? std::max(sizes.columns, sizes.outputs) : sizes.columns;
  if (sizes.outputs * sizes.columns > kMostWeights / batch ||
      sizes.rows * longest > kMostElements / batch) {
    *why_not = "the kernels take fewer than 2^34 weights, and than 2^32 elements of x or results";
    return false;
  }
  return can_launch(stream.device, why_not);
}

void quantized_matmul_gpu(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const mx::array& x,
                          const QuantizedWeightArrays& weights,
                          mx::array& out,
                          const mx::Stream& stream) {
  const Request request{x, {weights}, out, stream};
  switch (route_of(format, sizes, product, request)) {
    case Route::kDense:
      quantized_dense_gpu(format, sizes, product, x, weights, out, stream);
      return;
    case Route::kFewRows:
      out.set_data(allocate(out.nbytes(), stream));
      if (product == QuantizedProduct::kTransposed) {
        launch_gemv("gemv", format, sizes, request);
      } else {
        launch_plain(format, sizes, request);
      }
      return;
    case Route::kTiles:
      out.set_data(allocate(out.nbytes(), stream));
      launch_tiled(format, sizes, product, request);
  }
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
  launch_gemv("swiglu", format, sizes, Request{x, {gate, up}, out, stream, activation});
}

}  // namespace mlx_anvil
