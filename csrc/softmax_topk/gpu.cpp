// Launches softmax_topk's Metal kernels.
#include "softmax_topk/gpu.h"

#include <string>

#include "common/launch.h"
#include "common/launch_arrays.h"
#include "metal/softmax_topk/params.h"

namespace mlx_anvil {

namespace {

// Indices as in metal/softmax_topk/rows.h.
enum Constant : uint32_t { kIsSigmoid, kIsNormalised, kInIndexOrder, kRowIsLong };

// Must match metal/softmax_topk/rows.h.
constexpr int64_t kLanes = 32;
constexpr int64_t kRowsPerThreadgroup = 8;
// Elements per lane; kernels exist for these two values.
constexpr int64_t kFew = 4, kMany = 16;

void launch_rows(const char* variant,
                 const RouterOptions& options,
                 bool in_index_order,
                 const KernelInputs& inputs,
                 const KernelOutputs& outputs,
                 const mx::Stream& stream) {
  const mx::array& logits = *inputs[0];
  const int64_t experts = logits.shape(-1);
  const int64_t rows = static_cast<int64_t>(logits.size()) / experts;
  const int64_t held = experts <= kLanes * kFew ? kFew : kMany;
  const SoftmaxTopkParams params = {static_cast<uint32_t>(rows), static_cast<uint32_t>(experts),
                                    static_cast<uint32_t>(options.chosen)};
  KernelLaunch request{};
  request.kernel =
      &kernel_named("softmax_topk", {"softmax_topk_", variant, "_", dtype_name(logits), "_", held},
                    {{kIsSigmoid, options.scoring == RouterScoring::kSigmoid},
                     {kIsNormalised, options.norm},
                     {kInIndexOrder, in_index_order},
                     {kRowIsLong, experts > kLanes * kMany}});
  request.inputs = inputs;
  request.outputs = outputs;
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = linear_grid(rows, kRowsPerThreadgroup);
  request.threadgroup = {static_cast<uint32_t>(kLanes * kRowsPerThreadgroup), 1, 1};
  launch(request, stream);
}

}  // namespace

void router_forward_gpu(const RouterOptions& options,
                        const mx::array& logits,
                        Arrays& outputs,
                        const mx::Stream& stream) {
  launch_rows("forward", options, !options.sorted, {&logits}, {&outputs[0], &outputs[1]}, stream);
}

void router_backward_gpu(const RouterOptions& options,
                         const Arrays& inputs,
                         mx::array& d_logits,
                         const mx::Stream& stream) {
  launch_rows("backward", options, false, {&inputs[0], &inputs[1], &inputs[2]}, {&d_logits},
              stream);
}

}  // namespace mlx_anvil
