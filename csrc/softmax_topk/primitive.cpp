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

bool has_kernels(const RouterOptions& options,
                 const mx::array& logits,
                 const mx::Stream& stream,
                 std::string* why_not) {
  const auto experts = static_cast<size_t>(logits.shape(-1));
  if (options.chosen > kMostChosen || experts > kMostExperts) {
    *why_not = "the kernels choose at most 64 of at most 4096 experts";
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
    args.is_sigmoid = options_.scoring == RouterScoring::kSigmoid;
    args.is_normalised = options_.norm;
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

// Input: logits. Outputs: weights, indices.
class SoftmaxTopk : public RouterPrimitive {
 public:
  using RouterPrimitive::RouterPrimitive;

  const char* kind() const override { return "SoftmaxTopk"; }

  Arrays compose(const Arrays& inputs) override {
    const mx::array indices = compose_choice(options_, inputs[0], stream());
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
    args.weights = outputs[0].data<void>();
    args.indices = outputs[1].data<uint32_t>();
    const RouterProblem problem = problem_of(inputs[0]);
    dispatch_cpu("forward", inputs, outputs,
                 [problem, args] { router_forward_cpu(problem, args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_outputs(outputs);
    if (inputs[0].size() > 0) {
      router_forward_gpu(options_, inputs[0], outputs, stream());
    }
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>&,
                  const Arrays& outputs) override {
    return {apply_softmax_topk_backward(options_, primals[0], outputs[1], cotangents[0], stream())};
  }

  Arrays tangent(const Arrays& primals, const Arrays& tangents, const std::vector<int>&) override {
    note_fallback(op(), "the forward-mode derivative of SoftmaxTopk is a graph of MLX ops");
    const mx::array indices = apply_softmax_topk(options_, primals[0], stream())[1];
    return {compose_tangent(options_, primals[0], indices, tangents[0], stream()),
            mx::zeros_like(indices, stream())};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const Arrays in = with_vmap_in_front(inputs, axes, stream());
    return {apply_softmax_topk(options_, in[0], stream()), {0, 0}};
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
  if (options.chosen < 1 || options.chosen > shape.back()) {
    throw_value_error(kSoftmaxTopk, "k is " + std::to_string(options.chosen) +
                                        " and logits has shape " + to_text(shape) +
                                        "; allowed: from 1 to the last axis.");
  }
}

Arrays apply_softmax_topk(const RouterOptions& options, const mx::array& logits, mx::Stream s) {
  auto primitive = std::make_shared<SoftmaxTopk>(s, options);
  std::string why_not;
  if (!has_kernels(options, logits, s, &why_not)) {
    note_fallback(kSoftmaxTopk, why_not);
    return primitive->compose({logits});
  }
  return outputs_of(std::move(primitive), {logits.dtype(), mx::uint32}, {logits});
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
