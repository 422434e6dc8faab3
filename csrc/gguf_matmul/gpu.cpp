#include "gguf_matmul/gpu.h"

#include <algorithm>
#include <limits>

#include "common/allocate.h"
#include "metal/quantized_embedding/params.h"
#include "quantized_matmul/dense.h"
#include "quantized_matmul/gpu.h"
#include "quantized_matmul/gpu_request.h"

namespace mlx_anvil {

namespace {

constexpr const char* kOp = "gguf_matmul";
constexpr uint32_t kBlocksAreAligned = 6;  // function constant of codes.h

// Formats as metal/gguf_matmul/formats.h names them.
const char* name_in_kernels(GgufKind kind) {
  constexpr const char* kNames[] = {"q40", "q80", "q4k", "q5k", "q6k", "iq4nl", "iq4xs"};
  return kNames[static_cast<int32_t>(kind)];
}

bool blocks_are_aligned(GgufKind kind, const mx::array& w) {
  const int alignment = gguf_has_short_blocks(kind) || kind == GgufKind::kQ6K ? 2
                        : kind == GgufKind::kIq4Xs                            ? 8
                                                                              : 16;
  return rows_are_vectors({&w}, alignment);
}

QuantizedParams params_of(const QuantizedSizes& sizes) {
  QuantizedParams params{};
  params.rows = static_cast<int32_t>(sizes.rows);
  params.columns = static_cast<int32_t>(sizes.columns);
  params.outputs = static_cast<int32_t>(sizes.outputs);
  return params;
}

// A product and its arrays. Function constant 0 belongs to a header of every kernel; gemv.metal and
// gguf_rows read it.
struct Request {
  GgufKind kind;
  const QuantizedSizes& sizes;
  const mx::array& x;
  const mx::array& w;
  const mx::Stream& stream;

  const Kernel& kernel(const char* variant,
                       FunctionConstants constants,
                       KernelName::Piece rows_mark = "",
                       KernelName::Piece rows = "") const {
    constants.add({{kBlocksAreAligned, blocks_are_aligned(kind, w)}});
    return kernel_named(
        kOp, {"gguf_", variant, "_", dtype_name(x), "_", name_in_kernels(kind), rows_mark, rows},
        constants);
  }

  void launch_kernel(const Kernel& kernel,
                     const QuantizedParams& params,
                     mx::array& out,
                     int64_t column_blocks,
                     int64_t row_blocks,
                     int64_t threads) const {
    KernelLaunch request{};
    request.kernel = &kernel;
    request.inputs = {&x, &w};
    request.outputs = {&out};
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = {static_cast<uint32_t>(column_blocks), static_cast<uint32_t>(row_blocks),
                    static_cast<uint32_t>(sizes.batch)};
    request.threadgroup = {static_cast<uint32_t>(threads), 1, 1};
    launch(request, stream);
  }
};

void launch_gemv(const Request& request, mx::array& out) {
  const QuantizedSizes& sizes = request.sizes;
  const int64_t rows = std::min<int64_t>(sizes.rows, kQuantizedGemvRows);
  const int64_t simdgroups = ceil_div(sizes.outputs, gemv_streams(sizes.rows));
  const bool shared = gemv_shares_columns(sizes.outputs * sizes.batch, request.stream);
  const Kernel& kernel = request.kernel(
      "gemv", {{kRowsAreVectors, rows_are_vectors({&request.x})}, {kColumnsAreShared, shared}},
      "_r", kernel_rows(rows));
  request.launch_kernel(kernel, params_of(sizes), out,
                        shared ? simdgroups : ceil_div(simdgroups, kGemvSimdgroups),
                        ceil_div(sizes.rows, kQuantizedGemvRows), kGemvThreads);
}

// Rows of w are split into parts where columns alone would not occupy the GPU.
void launch_plain(const Request& request, mx::array& out) {
  constexpr int64_t kThreads = 256;  // a turn's rows of w: 32 per simdgroup
  constexpr int64_t kEnoughThreadgroups = 128, kUnit = 16, kMostSums = 64;
  const QuantizedSizes& sizes = request.sizes;
  const int64_t rows = kernel_rows(sizes.rows);
  const int64_t blocks = ceil_div(sizes.columns, 32 * std::min(kUnit, kMostSums / rows));
  const int64_t wanted = ceil_div(kEnoughThreadgroups, blocks * sizes.batch);
  QuantizedParams params = params_of(sizes);
  params.rows_per_part =
      static_cast<int32_t>(kThreads * ceil_div(ceil_div(sizes.outputs, kThreads), wanted));
  const int64_t parts = ceil_div(sizes.outputs, params.rows_per_part);
  const Kernel& kernel =
      request.kernel("plain", {{kRowsAreVectors, true}, {kPartsAreStored, parts > 1}}, "_r", rows);
  launch_in_parts(parts, out, request.stream, [&](mx::array& to) {
    request.launch_kernel(kernel, params, to, blocks, parts, kThreads);
  });
}

void launch_tiles(const Request& request, QuantizedProduct product, mx::array& out) {
  constexpr int64_t kTileRows = 32, kStep = 64;
  const QuantizedSizes& sizes = request.sizes;
  const bool transposed = product == QuantizedProduct::kTransposed;
  const bool few = transposed && sizes.rows <= choices(request.stream.device).product_split_rows;
  const int64_t rows = few ? std::max<int64_t>(kernel_rows(sizes.rows), 8) : kTileRows;
  const int64_t tile_columns = few ? 16 : transposed ? 64 : 128;
  const int64_t depth = transposed ? sizes.columns : sizes.outputs;
  const FunctionConstants constants = {{kRowsAreVectors, true},
                                       {kTilesAreVectors, rows_are_vectors({&request.x, &out})},
                                       {kStepsAreWhole, depth % kStep == 0}};
  const Kernel& kernel =
      few ? request.kernel("tiles_few", constants, "_r", rows)
          : request.kernel(transposed ? "tiles_transposed" : "tiles_plain", constants);
  request.launch_kernel(kernel, params_of(sizes), out,
                        ceil_div(transposed ? sizes.outputs : sizes.columns, tile_columns),
                        ceil_div(sizes.rows, rows), kGemvThreads);
}

}  // namespace

bool can_launch_gguf(GgufKind kind,
                     const QuantizedSizes& sizes,
                     const mx::Stream& stream,
                     std::string* why_not) {
  const int64_t row_bytes = sizes.columns / gguf_block_columns(kind) * gguf_block_bytes(kind);
  const int64_t rows = std::max<int64_t>(sizes.outputs * sizes.batch, 1);
  if (row_bytes > std::numeric_limits<uint32_t>::max() / rows) {
    *why_not = "the kernels take matrices of fewer than 2^32 bytes";
    return false;
  }
  return can_launch_quantized(sizes, stream, why_not);
}

void gguf_matmul_gpu(GgufKind kind,
                     const QuantizedSizes& sizes,
                     QuantizedProduct product,
                     const mx::array& x,
                     const mx::array& w,
                     mx::array& out,
                     const mx::Stream& stream) {
  const Request request{kind, sizes, x, w, stream};
  const bool transposed = product == QuantizedProduct::kTransposed;
  const bool tiled = transposed && suits_quantized_tiles(sizes, stream);
  const bool few = sizes.rows <= kQuantizedGemvRows && !tiled;
  if (!few && device_traits(stream.device).matrix_units && x.itemsize() == 2) {
    dense_product_gpu(kOp, {request.kernel("dequantize", {{kRowsAreVectors, true}}), {&w}, 0},
                      sizes, product, x, out, stream);
    return;
  }
  out.set_data(allocate(out.nbytes(), stream));
  if (!few) {
    launch_tiles(request, product, out);
  } else if (transposed) {
    launch_gemv(request, out);
  } else {
    launch_plain(request, out);
  }
}

void gguf_gemv_gpu(GgufKind kind,
                   const QuantizedSizes& sizes,
                   const mx::array& x,
                   const mx::array& w,
                   mx::array& out,
                   const mx::Stream& stream) {
  out.set_data(allocate(out.nbytes(), stream));
  launch_gemv({kind, sizes, x, w, stream}, out);
}

void gguf_rows_gpu(GgufKind kind,
                   const mx::array& w,
                   const mx::array& ids,
                   mx::array& out,
                   const mx::Stream& stream) {
  constexpr int64_t kThreads = 256, kPiece = 8, kMostRowsOfGrid = 65535;
  out.set_data(allocate(out.nbytes(), stream));
  QuantizedEmbeddingParams params{};
  params.ids = static_cast<int64_t>(ids.size());
  params.rows = w.shape(0);
  params.columns = out.shape(-1);
  params.words_per_id = static_cast<int32_t>(ids.itemsize() / sizeof(uint32_t));
  params.ids_are_signed = mx::issubdtype(ids.dtype(), mx::signedinteger);
  KernelLaunch request{};
  request.kernel = &kernel_named(kOp, {"gguf_rows_", dtype_name(out), "_", name_in_kernels(kind)},
                                 {{kRowsAreVectors, rows_are_vectors({&out})},
                                  {kBlocksAreAligned, blocks_are_aligned(kind, w)}});
  request.inputs = {&ids, &w};
  request.outputs = {&out};
  request.params = &params;
  request.params_size = sizeof(params);
  const int64_t pieces = params.columns / kPiece;
  const int64_t threads = std::min(kThreads, 32 * ceil_div(pieces, 32));
  request.grid = {static_cast<uint32_t>(ceil_div(pieces, threads)),
                  static_cast<uint32_t>(std::min(params.ids, kMostRowsOfGrid)), 1};
  request.threadgroup = {static_cast<uint32_t>(threads), 1, 1};
  launch(request, stream);
}

}  // namespace mlx_anvil
