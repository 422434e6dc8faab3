// Launches kv_append's Metal kernels.
#include "kv_append/gpu.h"

#include <algorithm>
#include <utility>

#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "metal/kv_append/params.h"
#include "rope/gpu.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kAppendThreads = 256;
constexpr int64_t kAppendPack = 8;             // columns per thread
constexpr int64_t kMostAppendBatches = 65535;  // limit of a grid's z dimension
constexpr int64_t kMostCopyGroups = 4096;

// Indices as in metal/rope/rope.h.
enum AppendConstant : uint32_t { kNeighbours = 1, kGivenFreqs = 2 };

void copy_cache(const mx::array& from, mx::array& to, const mx::Stream& stream) {
  if (to.size() == 0 || from.data_shared_ptr() == to.data_shared_ptr()) {
    return;
  }
  const KvCopyParams params = {static_cast<int64_t>(to.nbytes())};
  KernelLaunch request{};
  request.kernel = &kernel_named("kv_append", {"kv_append_copy"}, {});
  request.inputs = {&from};
  request.outputs = {&to};
  request.params = &params;
  request.params_size = sizeof(params);
  const int64_t groups = ceil_div(ceil_div(params.bytes, int64_t{2}), kAppendThreads);
  request.grid = {static_cast<uint32_t>(std::min(groups, kMostCopyGroups)), 1, 1};
  request.threadgroup = {kAppendThreads, 1, 1};
  launch(request, stream);
}

}  // namespace

void kv_append_gpu(const KvAppendConfig& config,
                   const KvAppendArrays& arrays,
                   Arrays& outputs,
                   const mx::Stream& stream) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    copy_cache(arrays.caches[i], outputs[i], stream);
  }
  const mx::array &k = arrays.tokens[0], &v = arrays.tokens[1];
  const mx::array& cache = arrays.caches[0];
  KvAppendParams params{};
  if (config.rope) {
    params.rotation = rope_params(*config.rope, k, {*arrays.positions, arrays.freqs});
  }
  std::copy_n(k.strides().begin(), 4, params.strides[0]);
  std::copy_n(v.strides().begin(), 4, params.strides[1]);
  params.batch = k.shape(0);
  params.heads = k.shape(1);
  params.length = k.shape(2);
  params.columns[0] = k.shape(3);
  params.columns[1] = v.shape(3);
  params.page_size = cache.shape(2);
  params.group = config.group;
  const auto step = [](const mx::array& x) { return x.shape(0) > 1 ? x.shape(1) : 0; };
  params.row_step = step(arrays.rows);
  params.row_counts = arrays.rows.shape(1) == 1;
  if (config.rope) {
    params.position_step = step(*arrays.positions);
    params.position_counts = arrays.positions->shape(1) == 1;
  }
  params.distinct = config.distinct;
  std::copy_n(config.bits, 2, params.bits);
  if (k.size() + v.size() == 0 || cache.shape(0) == 0 || params.page_size == 0) {
    return;
  }
  params.pages = cache.shape(0) / params.batch;
  const int64_t packs = std::max(ceil_div(int64_t{params.columns[0]}, kAppendPack),
                                 ceil_div(int64_t{params.columns[1]}, kAppendPack));
  params.packs = static_cast<int32_t>(packs);

  // Without a rotation the kernel reads neither positions nor frequencies.
  const mx::array& positions = config.rope ? *arrays.positions : arrays.rows;
  mx::array frequencies = !config.rope   ? arrays.rows
                          : arrays.freqs ? *arrays.freqs
                                         : rope_turns_array(*config.rope, stream.device);
  KernelLaunch request{};
  request.kernel = &kernel_named(
      "kv_append", {config.quantizes() ? "kv_append_affine_" : "kv_append_plain_", dtype_name(k)},
      {{kNeighbours, config.rope && config.rope->traditional},
       {kGivenFreqs, arrays.freqs.has_value()}});
  request.inputs = {&k, &v, &arrays.rows, &positions, &frequencies};
  for (mx::array& out : outputs) {
    request.outputs.push_back(&out);
  }
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(ceil_div(packs * params.length, kAppendThreads)),
                  static_cast<uint32_t>(2 * params.heads),
                  static_cast<uint32_t>(std::min<int64_t>(params.batch, kMostAppendBatches))};
  request.threadgroup = {kAppendThreads, 1, 1};
  launch(request, stream);
  if (config.rope && frequencies.is_donatable()) {  // neither cached nor the caller's
    keep_until_done({std::move(frequencies)}, stream);
  }
}

}  // namespace mlx_anvil
