#include "distributed/ring_node.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/allocate.h"
#include "common/broadcast.h"
#include "common/errors.h"
#include "common/run_on_cpu.h"
#include "common/shapeless.h"
#include "distributed/ring_agreement.h"
#include "distributed/ring_call.h"
#include "distributed/ring_graph.h"
#include "flash_attention/gradient.h"
#include "flash_attention/operands.h"
#include "flash_attention/primitive.h"

namespace mlx_anvil {

namespace {

Arrays apply_backward(const RingConfig& config, const Arrays& inputs, mx::Stream s);

// The first inputs are q, k, v, sinks and lengths, without those that the call lacks. Runs on the
// CPU: for GPUs, the op is a graph.
class RingPrimitive : public FusedPrimitive {
 public:
  RingPrimitive(mx::Stream stream, const RingConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kRingAttention; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const RingPrimitive&>(other).config_;
  }

  void eval_gpu_kernels(const Arrays&, Arrays&) override {
    throw_internal_error(op(), "a node for the CPU was evaluated elsewhere.");
  }

 protected:
  bool composes_kernels() const override { return true; }
  bool wants_dense(size_t input) const override {
    return config_.has_lengths && input == lengths_at();
  }

  size_t sinks_at() const { return 3; }
  size_t lengths_at() const { return 3 + config_.attention.has_sinks; }
  size_t operand_count() const { return lengths_at() + config_.has_lengths; }

  RingInputs operands(const Arrays& inputs) const { return ring_inputs(config_, inputs); }

  Arrays fold(const BatchFold& batch, const Arrays& inputs, const std::vector<int>& axes) const {
    Arrays folded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool stretches = config_.attention.has_sinks && i == sinks_at();
      folded.push_back(batch.fold(inputs[i], axes[i], stretches));
    }
    return folded;
  }

  // The call, and memory for what passes through.
  RingCall call_of(const Arrays& inputs, bool with_gradients) {
    const mx::array& q = inputs[0];
    const RingLayout layout = {config_.group.size(), q.shape(2), config_.zigzag};
    const RingPlan plan(layout, config_.group.rank(), config_.attention);
    const AttentionSizes sizes = sizes_of(arrays_of(inputs));
    const auto memory = [&](int64_t bytes) {
      mx::array x({static_cast<int>(bytes / sizeof(int64_t)) + 1}, mx::int64, nullptr, {});
      x.set_data(allocate(x.nbytes(), stream()));
      return x;
    };
    const auto two = [&](int64_t item_bytes) {
      const int64_t bytes = piece_bytes(sizes, plan.longest_piece(), item_bytes);
      return std::array{memory(bytes), memory(bytes)};
    };
    RingCall call{.group = config_.group,
                  .layout = layout,
                  .pieces = two(static_cast<int64_t>(mx::size_of(q.dtype()))),
                  .gradients = two(with_gradients ? sizeof(float) : 0),
                  .told = {memory(agreement_bytes()), memory(agreement_bytes())},
                  .with_gradients = with_gradients};
    if (config_.has_lengths) {
      call.lengths = inputs[lengths_at()].data<int32_t>();
    }
    return call;
  }

  // What the attention kernels read.
  AttentionInputs arrays_of(const Arrays& inputs) const {
    AttentionInputs in{inputs[0], inputs[1], inputs[2], std::nullopt, std::nullopt, std::nullopt};
    if (config_.attention.has_sinks) {
      in.sinks = inputs[sinks_at()];
    }
    return in;
  }

  template <class Args>
  Args operands_of(const Arrays& inputs) const {
    Args args{};
    fill_operands(args, config_.attention, arrays_of(inputs));
    return args;
  }

  template <class Args>
  void dispatch(const char* variant,
                const Arrays& inputs,
                Arrays& outputs,
                const Args& args,
                RingCall call,
                void (*run)(const Args&, const RingCall&)) {
    run_on_cpu(
        *this, inputs, outputs, [args, call = std::move(call), run] { run(args, call); },
        [&] {
          return std::string(op()) + "_" + variant + "_" + to_text(inputs[0].dtype()) + "_d" +
                 std::to_string(inputs[0].shape(3));
        });
  }

  const RingConfig config_;
};

class RingForward : public RingPrimitive {
 public:
  using RingPrimitive::RingPrimitive;

  const char* kind() const override { return "RingAttention"; }

  Arrays compose(const Arrays& inputs) override {
    return ring_forward_graph(config_, operands(inputs), RingGraph::kSame, stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape& q = inputs[0].shape();
    return {{q[0], q[1], q[2], inputs[2].shape(3)}, {q[0], q[1], q[2]}};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_like(outputs[0], inputs[0], stream());
    outputs[1].set_data(allocate(outputs[1].nbytes(), stream()));
    auto args = operands_of<AttentionForwardArgs>(inputs);
    args.out = output_of(outputs[0]);
    args.lse = outputs[1].data<float>();
    args.lse_stride = args.sizes.q_len;
    dispatch("forward", inputs, outputs, args, call_of(inputs, false), ring_forward_cpu);
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const BatchFold batch(inputs, axes, stream());
    Arrays outputs;
    for (const mx::array& x :
         apply_ring_attention(config_, operands(fold(batch, inputs, axes)), stream())) {
      outputs.push_back(batch.unfold(x));
    }
    return {outputs, {0, 0}};
  }
};

// Inputs: the operands, out, lse, d_out and d_lse. Outputs: d_q, d_k, d_v and, with sinks, d_sinks.
class RingBackward : public RingPrimitive {
 public:
  using RingPrimitive::RingPrimitive;

  const char* kind() const override { return "RingAttentionBackward"; }

  Arrays compose(const Arrays& inputs) override {
    const size_t at = operand_count();
    return ring_backward_graph(config_, operands(inputs), inputs[at], inputs[at + 1],
                               inputs[at + 2], inputs[at + 3], RingGraph::kSame, stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes = {inputs[0].shape(), inputs[1].shape(), inputs[2].shape()};
    if (config_.attention.has_sinks) {
      shapes.push_back({inputs[0].shape(0), inputs[0].shape(1)});
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    for (size_t i = 0; i < 3; ++i) {
      allocate_like(outputs[i], inputs[i], stream());
    }
    const size_t at = operand_count();
    auto args = operands_of<AttentionBackwardArgs>(inputs);
    args.out = view_of(inputs[at]);
    args.lse = inputs[at + 1].data<float>();
    args.lse_stride = args.sizes.q_len;
    args.d_out = view_of(inputs[at + 2]);
    const mx::array& d_lse = inputs[at + 3];
    args.d_lse = d_lse.data<float>();
    std::copy(d_lse.strides().begin(), d_lse.strides().end(), args.d_lse_strides);
    args.d_q = output_of(outputs[0]);
    args.d_k = output_of(outputs[1]);
    args.d_v = output_of(outputs[2]);
    if (config_.attention.has_sinks) {
      outputs[3].set_data(allocate(outputs[3].nbytes(), stream()));
      args.d_sinks = outputs[3].data<float>();
    }
    dispatch("backward", inputs, outputs, args, call_of(inputs, true), ring_backward_cpu);
  }

 protected:
  // Under vmap, lse can be a broadcast view.
  bool wants_dense(size_t input) const override {
    return input == operand_count() + 1 || RingPrimitive::wants_dense(input);
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const BatchFold batch(inputs, axes, stream());
    Arrays outputs;
    for (const mx::array& x : apply_backward(config_, fold(batch, inputs, axes), stream())) {
      outputs.push_back(batch.unfold(x));
    }
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }
};

Arrays apply_backward(const RingConfig& config, const Arrays& inputs, mx::Stream s) {
  std::vector<mx::Dtype> dtypes(3, inputs[0].dtype());
  if (config.attention.has_sinks) {
    dtypes.push_back(mx::float32);
  }
  return outputs_of(std::make_shared<RingBackward>(s, config), dtypes, inputs);
}

Arrays RingForward::gradient(const Arrays& primals,
                             const Arrays& cotangents,
                             const std::vector<int>& argnums,
                             const Arrays& outputs) {
  const mx::Stream s = stream();
  mx::array d_out = cotangents[0], d_lse = cotangents[1];
  std::optional<mx::array> d_lse_of_sinks;
  if (config_.has_lengths) {
    const SeenGradients seen =
        of_seeing_rows(d_out, d_lse, outputs[0], outputs[1], operands(primals).sinks, s);
    d_out = seen.d_out;
    d_lse = *seen.d_lse;
    d_lse_of_sinks = seen.d_lse_of_sinks;
  }
  Arrays inputs = primals;
  inputs.insert(inputs.end(), {outputs[0], outputs[1], d_out, d_lse});
  Arrays gradients = apply_backward(config_, inputs, s);
  if (config_.attention.has_sinks && d_lse_of_sinks) {
    gradients[3] = mx::add(gradients[3], mx::sum(*d_lse_of_sinks, -1, false, s), s);
  }
  return selected_gradients(config_, gradients, primals, argnums, s);
}

}  // namespace

Arrays apply_ring_attention(const RingConfig& config, const RingInputs& in, mx::Stream s) {
  return outputs_of(std::make_shared<RingForward>(s, config), {in.q.dtype(), mx::float32},
                    inputs_of(in));
}

Arrays inputs_of(const RingInputs& in) {
  Arrays inputs = {in.q, in.k, in.v};
  OptionalInputs::append(inputs, in.sinks);
  OptionalInputs::append(inputs, in.lengths);
  return inputs;
}

RingInputs ring_inputs(const RingConfig& config, const Arrays& inputs) {
  RingInputs in{inputs[0], inputs[1], inputs[2], std::nullopt, std::nullopt};
  size_t next = 3;
  if (config.attention.has_sinks) {
    in.sinks = inputs[next++];
  }
  if (config.has_lengths) {
    in.lengths = inputs[next];
  }
  return in;
}

Arrays selected_gradients(const RingConfig& config,
                          const Arrays& gradients,
                          const Arrays& primals,
                          const std::vector<int>& argnums,
                          mx::Stream s) {
  Arrays results;
  for (int i : argnums) {
    const mx::array& primal = primals[static_cast<size_t>(i)];
    const bool is_constant = i >= 3 + config.attention.has_sinks;  // lengths
    results.push_back(is_constant ? mx::zeros_like(primal, s)
                                  : sum_to(gradients[static_cast<size_t>(i)], primal.shape(), s));
  }
  return results;
}

}  // namespace mlx_anvil
