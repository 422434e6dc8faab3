// Launches softmax_topk's Metal kernels.
#include "softmax_topk/gpu.h"

#include <algorithm>
#include <string>

#include "common/launch.h"
#include "common/launch_arrays.h"
#include "metal/softmax_topk/params.h"
#include "softmax_topk/compose.h"

namespace mlx_anvil {

namespace {

// Indices as in metal/softmax_topk/rows.h.
enum Constant : uint32_t {
  kIsSigmoid,
  kIsNormalised,
  kInIndexOrder,
  kRowIsLong,
  kHasBias,
  kHasGroups,
  kIsSqrtSoftplus
};

// Must match metal/softmax_topk/rows.h.
constexpr int64_t kLanes = 32;
constexpr int64_t kRowsPerThreadgroup = 8;
// Elements per lane; kernels exist for these two values.
constexpr int64_t kFew = 4, kMany = 16;

void launch_rows(const char* variant,
                 const RouterOptions& options,
                 FunctionConstants constants,
                 const KernelInputs& inputs,
                 const KernelOutputs& outputs,
                 int64_t rows_per_bias,
                 const mx::Stream& stream) {
  const mx::array& logits = *inputs[0];
  const int64_t experts = logits.shape(-1);
  const int64_t rows = static_cast<int64_t>(logits.size()) / experts;
  const int64_t held = experts <= kLanes * kFew ? kFew : kMany;
  SoftmaxTopkParams params{};
  params.rows = static_cast<uint32_t>(rows);
  params.experts = static_cast<uint32_t>(experts);
  params.chosen = static_cast<uint32_t>(options.chosen);
  params.groups = static_cast<uint32_t>(options.groups);
  params.kept_groups = static_cast<uint32_t>(options.kept_groups);
  params.group_size = static_cast<uint32_t>(experts / options.groups);
  params.groups_by_max = options.group_scoring == GroupScoring::kMax;
  params.rows_per_bias = static_cast<uint32_t>(rows_per_bias);
  params.masked_key = masked_key(options);
  params.scale = options.scale;
  constants.add({{kIsSigmoid, options.scoring == RouterScoring::kSigmoid},
                 {kIsNormalised, options.norm},
                 {kRowIsLong, experts > kLanes * kMany},
                 {kIsSqrtSoftplus, options.scoring == RouterScoring::kSqrtSoftplus}});
  KernelLaunch request{};
  request.kernel = &kernel_named(
      "softmax_topk", {"softmax_topk_", variant, "_", dtype_name(logits), "_", held}, constants);
  request.inputs = inputs;
  request.outputs = outputs;
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = linear_grid(rows, kRowsPerThreadgroup);
  request.threadgroup = {static_cast<uint32_t>(kLanes * kRowsPerThreadgroup), 1, 1};
  launch(request, stream);
}

}  // namespace

int64_t rows_per_bias(const mx::array& logits, const mx::array& bias) {
  return static_cast<int64_t>(logits.size() / std::max<size_t>(bias.size(), 1));
}

void router_forward_gpu(const RouterOptions& options,
                        const Arrays& inputs,
                        Arrays& outputs,
                        const mx::Stream& stream) {
  const mx::array &logits = inputs[0], &bias = inputs.back();  // the logits again if there is none
  launch_rows("forward", options,
              {{kInIndexOrder, !options.sorted},
               {kHasBias, options.has_bias},
               {kHasGroups, options.has_groups()}},
              {&logits, &bias}, {&outputs[0], &outputs[1]}, rows_per_bias(logits, bias), stream);
}

void router_backward_gpu(const RouterOptions& options,
                         const Arrays& inputs,
                         mx::array& d_logits,
                         const mx::Stream& stream) {
  launch_rows("backward", options, {{kInIndexOrder, false}, {kHasBias, false}, {kHasGroups, false}},
              {&inputs[0], &inputs[1], &inputs[2]}, {&d_logits}, 1, stream);
}

}  // namespace mlx_anvil
