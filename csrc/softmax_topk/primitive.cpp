#include "softmax_topk/primitive.h"

#include <limits>
#include <string>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "common/run_on_cpu.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "softmax_topk/compose.h"
#include "softmax_topk/cpu.h"
#include "softmax_topk/gpu.h"

namespace mlx_anvil {

namespace {

// Limits of the kernels' register layout.
constexpr int64_t kMostChosen = 64;
constexpr int64_t kMostExperts = 4096;
constexpr int64_t kMostGroups = 32;

bool has_kernels(const RouterOptions& options,
                 const mx::array& logits,
                 const mx::Stream& stream,
                 std::string* why_not) {
  const auto experts = static_cast<size_t>(logits.shape(-1));
  if (options.chosen > kMostChosen || experts > kMostExperts) {
    *why_not = "the kernels choose at most 64 of at most 4096 experts";
    return false;
  }
  if (options.has_groups() && options.groups > kMostGroups) {
    *why_not = "the kernels take at most 32 groups of experts";
    return false;
  }
  if (logits.size() / experts > std::numeric_limits<int32_t>::max()) {
    *why_not = "the kernels take at most 2^31 - 1 rows";
    return false;
  }
  return stream.device == mx::Device::cpu || can_launch(stream.device, why_not);
}

class RouterPrimitive : public FusedPrimitive {
 public:
  RouterPrimitive(mx::Stream stream, const RouterOptions& options)
      : FusedPrimitive(stream), options_(options) {}

  const char* op() const override { return kSoftmaxTopk; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           options_ == static_cast<const RouterPrimitive&>(other).options_;
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  void allocate_outputs(Arrays& outputs) {
    for (mx::array& out : outputs) {
      out.set_data(allocate(out.nbytes(), stream()));
    }
  }

  RouterProblem problem_of(const mx::array& logits) const {
    RouterProblem problem;
    problem.dtype = kernel_dtype_of(logits);
    problem.rows = static_cast<int64_t>(logits.size()) / logits.shape(-1);
    return problem;
  }

  template <class Args>
  Args args_of(const mx::array& logits) const {
    Args args{};
    args.logits = logits.data<void>();
    args.experts = logits.shape(-1);
    args.chosen = options_.chosen;
    args.scoring = options_.scoring;
    args.is_normalised = options_.norm;
    args.is_steered = options_.is_steered();
    args.scale = options_.scale;
    return args;
  }

  template <class Work>
  void dispatch_cpu(const char* variant, const Arrays& inputs, Arrays& outputs, Work work) {
    run_on_cpu(*this, inputs, outputs, std::move(work), [&] {
      return std::string(kSoftmaxTopk) + "_" + variant + "_" + dtype_name(inputs[0]);
    });
  }

  const RouterOptions options_;
};

// Inputs: logits[, bias]. Outputs: weights, indices.
class SoftmaxTopk : public RouterPrimitive {
 public:
  using RouterPrimitive::RouterPrimitive;

  const char* kind() const override { return "SoftmaxTopk"; }

  Arrays compose(const Arrays& inputs) override {
    const mx::array indices = compose_choice(options_, inputs, stream());
    return {compose_weights(options_, inputs[0], indices, stream()), indices};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = static_cast<int>(options_.chosen);
    return {shape, shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_outputs(outputs);
    auto args = args_of<RouterForwardArgs>(inputs[0]);
    args.in_index_order = !options_.sorted;
    args.groups = options_.has_groups() ? options_.groups : 1;
    args.kept_groups = options_.kept_groups;
    args.groups_by_max = options_.group_scoring == GroupScoring::kMax;
    args.masked_key = masked_key(options_);
    if (options_.has_bias) {
      args.bias = inputs[1].data<float>();
      args.rows_per_bias = rows_per_bias(inputs[0], inputs[1]);
    }
    args.weights = outputs[0].data<void>();
    args.indices = outputs[1].data<uint32_t>();
    const RouterProblem problem = problem_of(inputs[0]);
    dispatch_cpu("forward", inputs, outputs,
                 [problem, args] { router_forward_cpu(problem, args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_outputs(outputs);
    if (inputs[0].size() > 0) {
      router_forward_gpu(options_, inputs, outputs, stream());
    }
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>&,
                  const Arrays& outputs) override {
    // The op stops gradients of the bias, so MLX asks for that of the logits only.
    return {apply_softmax_topk_backward(options_, primals[0], outputs[1], cotangents[0], stream())};
  }

  Arrays tangent(const Arrays& primals, const Arrays& tangents, const std::vector<int>&) override {
    note_fallback(op(), "the forward-mode derivative of SoftmaxTopk is a graph of MLX ops");
    const mx::array indices = apply_softmax_topk(options_, primals, stream())[1];
    return {compose_tangent(options_, primals[0], indices, tangents[0], stream()),
            mx::zeros_like(indices, stream())};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    // One bias for all rows stays one.
    const bool shares_bias = inputs.size() == 2 && axes[1] < 0 && inputs[1].ndim() == 1;
    Arrays in = shares_bias ? with_vmap_in_front({inputs[0]}, {axes[0]}, stream())
                            : with_vmap_in_front(inputs, axes, stream());
    if (shares_bias) {
      in.push_back(inputs[1]);
    }
    return {apply_softmax_topk(options_, std::move(in), stream()), {0, 0}};
  }
};

// Inputs: logits, indices, d_weights. Output: d_logits.
class SoftmaxTopkBackward : public RouterPrimitive {
 public:
  using RouterPrimitive::RouterPrimitive;

  const char* kind() const override { return "SoftmaxTopkBackward"; }

  Arrays compose(const Arrays& inputs) override {
    return {compose_gradient(options_, inputs[0], inputs[1], inputs[2], stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_outputs(outputs);
    auto args = args_of<RouterBackwardArgs>(inputs[0]);
    args.indices = inputs[1].data<uint32_t>();
    args.d_weights = inputs[2].data<void>();
    args.d_logits = outputs[0].data<void>();
    const RouterProblem problem = problem_of(inputs[0]);
    dispatch_cpu("backward", inputs, outputs,
                 [problem, args] { router_backward_cpu(problem, args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_outputs(outputs);
    if (inputs[0].size() > 0) {
      router_backward_gpu(options_, inputs, outputs[0], stream());
    }
  }

 protected:
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const Arrays in = with_vmap_in_front(inputs, axes, stream());
    return {{apply_softmax_topk_backward(options_, in[0], in[1], in[2], stream())}, {0}};
  }
};

}  // namespace

void require_chosen(const RouterOptions& options, const mx::Shape& shape) {
  const int64_t experts = shape.back();
  const auto number = [](int64_t n) { return std::to_string(n); };
  if (options.chosen < 1 || options.chosen > experts) {
    throw_value_error(kSoftmaxTopk, "k is " + number(options.chosen) + " and logits has shape " +
                                        to_text(shape) + "; allowed: from 1 to the last axis.");
  }
  if (options.groups < 1 || experts % options.groups != 0) {
    throw_value_error(kSoftmaxTopk, "n_group is " + number(options.groups) +
                                        " and logits has shape " + to_text(shape) +
                                        "; allowed: a divisor of the last axis.");
  }
  if (options.kept_groups < 1 || options.kept_groups > options.groups) {
    throw_value_error(kSoftmaxTopk, "topk_group is " + number(options.kept_groups) +
                                        " and n_group is " + number(options.groups) +
                                        "; allowed: from 1 to n_group.");
  }
  const int64_t size = experts / options.groups;
  if (options.has_groups() && options.chosen > size * options.kept_groups) {
    throw_value_error(kSoftmaxTopk, "k is " + number(options.chosen) + " and topk_group is " +
                                        number(options.kept_groups) + ", with " + number(size) +
                                        " experts in a group; allowed: k up to the experts in "
                                        "topk_group groups.");
  }
  if (options.has_groups() && options.group_scoring == GroupScoring::kSumOfTwo && size < 2) {
    throw_value_error(kSoftmaxTopk,
                      "group_scoring is 'top2', with 1 expert in a group; allowed: "
                      "2 experts or more, or 'max'.");
  }
}

Arrays apply_softmax_topk(const RouterOptions& options, Arrays inputs, mx::Stream s) {
  auto primitive = std::make_shared<SoftmaxTopk>(s, options);
  std::string why_not;
  if (!has_kernels(options, inputs[0], s, &why_not)) {
    note_fallback(kSoftmaxTopk, why_not);
    return primitive->compose(inputs);
  }
  const mx::Dtype dtype = inputs[0].dtype();
  return outputs_of(std::move(primitive), {dtype, mx::uint32}, std::move(inputs));
}

mx::array apply_softmax_topk_backward(const RouterOptions& options,
                                      const mx::array& logits,
                                      const mx::array& indices,
                                      const mx::array& d_weights,
                                      mx::Stream s) {
  return output_of(std::make_shared<SoftmaxTopkBackward>(s, options), logits.dtype(),
                   {logits, indices, d_weights});
}

}  // namespace mlx_anvil
