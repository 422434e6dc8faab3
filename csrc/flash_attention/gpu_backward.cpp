// The launches of the gradients: delta, then dQ, dK and dV, and the sinks' share.
#include "flash_attention/gpu_launch.h"

namespace mlx_anvil {

namespace {

constexpr uint32_t kThreads = 128;  // four SIMD groups; metal/flash_attention/scores.h has the same
constexpr uint32_t kRowThreads = 256;  // of the kernels in metal/flash_attention/rows.metal
constexpr int64_t kRowsPerGroup = 8;

enum class Pass { kQueries, kKeys };

// Rows that a threadgroup keeps: sixteen for each SIMD group where two rows of fragments fit its
// registers, else eight (metal/flash_attention/backward.metal has the same table).
int64_t kept_rows(Pass pass, mx::Dtype dtype, const HeadTile& tile) {
  const bool wide = dtype == mx::float32;
  const int most = pass == Pass::kQueries ? (wide ? 64 : 96) : (wide ? 32 : 64);
  return tile.head_dim <= most ? 64 : 32;
}

mx::array launch_delta(AttentionParams& params,
                       const AttentionSizes& sizes,
                       const AttentionBackwardArrays& arrays,
                       const mx::Stream& stream) {
  mx::array delta = temporary(arrays.lse->shape(), mx::float32, stream.device);
  KernelLaunch request;
  request.kernel = &attention_kernel("flash_attention_delta_" + to_text(arrays.q->dtype()),
                                     {{kVectorLoads, false}, {kHasDLse, arrays.d_lse != nullptr}});
  request.inputs = {arrays.out, arrays.d_out, arrays.d_lse ? arrays.d_lse : arrays.lse};
  request.outputs = {&delta};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {groups_of(sizes.q_len, kRowsPerGroup), static_cast<uint32_t>(sizes.q_heads),
                  static_cast<uint32_t>(sizes.batch)};
  request.threadgroup = {kRowThreads, 1, 1};
  request.temporaries = {delta};
  launch(request, stream);
  return delta;
}

void launch_sinks(const AttentionParams& params,
                  const AttentionSizes& sizes,
                  const AttentionBackwardArrays& arrays,
                  const mx::array& delta,
                  const mx::Stream& stream) {
  KernelLaunch request;
  request.kernel = &attention_kernel("flash_attention_d_sinks", {});
  request.inputs = {arrays.sinks, arrays.lse, &delta};
  request.outputs = {arrays.d_sinks};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(sizes.q_heads), static_cast<uint32_t>(sizes.batch), 1};
  request.threadgroup = {kRowThreads, 1, 1};
  launch(request, stream);
}

void launch_pass(Pass pass,
                 const AttentionConfig& config,
                 const AttentionParams& params,
                 const AttentionSizes& sizes,
                 const AttentionBackwardArrays& arrays,
                 const mx::array& delta,
                 bool vectors,
                 const mx::Stream& stream) {
  const bool queries = pass == Pass::kQueries;
  const mx::Dtype dtype = arrays.q->dtype();
  const HeadTile tile = head_tile(sizes);
  std::vector<FunctionConstant> constants = score_constants(config, vectors);
  constants.push_back({kStoreDMask, queries && arrays.d_mask != nullptr});

  KernelLaunch request;
  request.kernel = &attention_kernel(
      kernel_name(queries ? "backward_dq" : "backward_dkv", dtype, tile.name()), constants);
  request.inputs = {arrays.q,   arrays.k,     arrays.v, arrays.mask ? arrays.mask : arrays.q,
                    arrays.lse, arrays.d_out, &delta};
  if (queries) {
    request.outputs = {arrays.d_q, arrays.d_mask ? arrays.d_mask : arrays.d_q};
  } else {
    request.outputs = {arrays.d_k, arrays.d_v};
  }
  request.params = &params;
  request.params_size = sizeof(params);
  const int64_t length = queries ? sizes.q_len : sizes.kv_len;
  const int64_t heads = queries ? sizes.q_heads : sizes.kv_heads;
  request.grid = {groups_of(length, kept_rows(pass, dtype, tile)), static_cast<uint32_t>(heads),
                  static_cast<uint32_t>(sizes.batch)};
  request.threadgroup = {kThreads, 1, 1};
  launch(request, stream);
}

}  // namespace

void attention_backward_gpu(const AttentionConfig& config,
                            const AttentionSizes& sizes,
                            const AttentionBackwardArrays& arrays,
                            const mx::Stream& stream) {
  if (sizes.batch * sizes.q_heads == 0) {
    return;
  }
  AttentionParams params = attention_params(config, sizes, arrays);
  set_strides(params.out_strides, arrays.out);
  set_strides(params.d_out_strides, arrays.d_out);
  set_strides(params.d_lse_strides, arrays.d_lse);
  set_strides(params.d_q_strides, arrays.d_q);
  set_strides(params.d_k_strides, arrays.d_k);
  set_strides(params.d_v_strides, arrays.d_v);

  // Without queries there are no rows, and still gradients of zero to be written.
  const mx::array delta = sizes.q_len > 0 ? launch_delta(params, sizes, arrays, stream)
                                          : temporary({1}, mx::float32, stream.device);
  if (arrays.d_sinks) {
    launch_sinks(params, sizes, arrays, delta, stream);
  }
  // The mask's gradient comes from the pass over queries, whether or not that of q is wanted.
  mx::array unwanted = *arrays.q;
  AttentionBackwardArrays all = arrays;
  if (arrays.d_mask && !arrays.d_q) {
    unwanted = temporary(arrays.q->shape(), arrays.q->dtype(), stream.device);
    all.d_q = &unwanted;
    set_strides(params.d_q_strides, all.d_q);
  }
  if (all.d_q && sizes.q_len > 0) {
    const bool vectors = rows_are_vectors({all.q, all.k, all.v, all.d_out, all.d_q});
    launch_pass(Pass::kQueries, config, params, sizes, all, delta, vectors, stream);
  }
  if (all.d_k && sizes.kv_len > 0) {
    const bool vectors = rows_are_vectors({all.q, all.k, all.v, all.d_out, all.d_k, all.d_v});
    launch_pass(Pass::kKeys, config, params, sizes, all, delta, vectors, stream);
  }
}

}  // namespace mlx_anvil
