#include "quantized_embedding/gpu.h"

#include <algorithm>
#include <bit>
#include <string>

#include "common/launch.h"
#include "metal/quantized_embedding/params.h"
#include "quantized_matmul/gpu_support.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kPiece = 8;  // columns per thread
constexpr int64_t kMostRowsOfGrid = 65535;

}  // namespace

void quantized_embedding_gpu(const QuantizedFormat& format,
                             const mx::array& ids,
                             const QuantizedWeightArrays& weights,
                             mx::array& out,
                             const mx::Stream& stream) {
  QuantizedEmbeddingParams params{};
  params.ids = static_cast<int64_t>(ids.size());
  params.rows = weights.w->shape(0);
  params.columns = out.shape(-1);
  params.group_shift = std::countr_zero(static_cast<uint32_t>(format.group));
  params.words_per_id = static_cast<int32_t>(ids.itemsize() / sizeof(uint32_t));
  params.ids_are_signed = mx::issubdtype(ids.dtype(), mx::signedinteger);
  KernelLaunch request{};
  const bool by_rows = !device_traits(stream.device).is_nvidia();
  request.kernel =
      &kernel_named("quantized_embedding",
                    {by_rows ? "quantized_embedding_rows_" : "quantized_embedding_",
                     dtype_name(out), "_", mode_name(format.kind), bits_in_name(format)},
                    {{kRowsAreVectors, rows_are_vectors({weights.w, &out})}});
  request.inputs = {&ids, weights.w, weights.scales,
                    weights.biases ? weights.biases : weights.scales};
  request.outputs = {&out};
  request.params = &params;
  request.params_size = sizeof(params);
  if (by_rows) {
    const int64_t pieces = params.columns / kPiece;
    const int64_t threads = std::min(kThreads, 32 * ceil_div(pieces, 32));
    request.grid = {static_cast<uint32_t>(ceil_div(pieces, threads)),
                    static_cast<uint32_t>(std::min(params.ids, kMostRowsOfGrid)), 1};
    request.threadgroup = {static_cast<uint32_t>(threads), 1, 1};
  } else {
    request.grid = linear_grid(static_cast<int64_t>(out.size()) / kPiece, kThreads);
    request.threadgroup = {kThreads, 1, 1};
  }
  launch(request, stream);
}

}  // namespace mlx_anvil
