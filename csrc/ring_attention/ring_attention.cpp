#include "ring_attention/ring_attention.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/allocate.h"
#include "common/broadcast.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/run_on_cpu.h"
#include "common/shapeless.h"
#include "flash_attention/checks.h"
#include "flash_attention/forward.h"
#include "flash_attention/gradient.h"
#include "flash_attention/operands.h"
#include "flash_attention/primitive.h"
#include "ring_attention/agreement.h"
#include "ring_attention/call.h"
#include "ring_attention/graph.h"

namespace mlx_anvil {

namespace {

Arrays apply_forward(const RingConfig& config, const RingInputs& in, mx::Stream s);
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

  RingInputs operands(const Arrays& inputs) const {
    RingInputs in{inputs[0], inputs[1], inputs[2], std::nullopt, std::nullopt};
    if (config_.attention.has_sinks) {
      in.sinks = inputs[sinks_at()];
    }
    if (config_.has_lengths) {
      in.lengths = inputs[lengths_at()];
    }
    return in;
  }

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
         apply_forward(config_, operands(fold(batch, inputs, axes)), stream())) {
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

Arrays inputs_of(const RingInputs& in) {
  Arrays inputs = {in.q, in.k, in.v};
  OptionalInputs::append(inputs, in.sinks);
  OptionalInputs::append(inputs, in.lengths);
  return inputs;
}

Arrays apply_forward(const RingConfig& config, const RingInputs& in, mx::Stream s) {
  return outputs_of(std::make_shared<RingForward>(s, config), {in.q.dtype(), mx::float32},
                    inputs_of(in));
}

Arrays apply_backward(const RingConfig& config, const Arrays& inputs, mx::Stream s) {
  std::vector<mx::Dtype> dtypes(3, inputs[0].dtype());
  if (config.attention.has_sinks) {
    dtypes.push_back(mx::float32);
  }
  return outputs_of(std::make_shared<RingBackward>(s, config), dtypes, inputs);
}

// The gradients of the operands `argnums`, of those of a backward.
Arrays selected(const Arrays& gradients,
                const Arrays& primals,
                const std::vector<int>& argnums,
                bool has_sinks,
                mx::Stream s) {
  Arrays results;
  for (int i : argnums) {
    const mx::array& primal = primals[static_cast<size_t>(i)];
    const bool is_constant = i >= 3 + has_sinks;  // lengths
    results.push_back(is_constant ? mx::zeros_like(primal, s)
                                  : sum_to(gradients[static_cast<size_t>(i)], primal.shape(), s));
  }
  return results;
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
  return selected(gradients, primals, argnums, config_.attention.has_sinks, s);
}

// ---- the route ----------------------------------------------------------------------------------

bool runs_on_cpu(const RingConfig& config, const RingInputs& in, mx::Stream s) {
  const bool talks_on_cpu = config.group.size() == 1 ||
                            communication_stream(config.group).device == mx::Device::cpu;
  return !for_gpu(s) && talks_on_cpu &&
         !why_not_fused(in.q.shape(3), in.v.shape(3), /*gradient=*/true, /*on_gpu=*/false);
}

// The op as a graph whose gradient runs the backward kernels with what the forward saved.
Arrays graph_of_call(const RingConfig& config, const RingInputs& in, mx::Stream s) {
  const auto inputs_in = [config](const Arrays& x) {
    const size_t at = 3 + config.attention.has_sinks;
    RingInputs own{x[0], x[1], x[2], std::nullopt, std::nullopt};
    if (config.attention.has_sinks) {
      own.sinks = x[3];
    }
    if (config.has_lengths) {
      own.lengths = x[at];
    }
    return own;
  };
  const auto forward = [=](const Arrays& x) {
    return ring_forward_graph(config, inputs_in(x), RingGraph::kShortest, s);
  };
  const auto backward = [=](const Arrays& x, const Arrays& cotangents, const Arrays& results) {
    const RingInputs own = inputs_in(x);
    const Arrays gradients =
        ring_backward_graph(config, own, results[0], results[1], cotangents[0], cotangents[1],
                            RingGraph::kShortest, s);
    std::vector<int> all(x.size());
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = static_cast<int>(i);
    }
    return selected(gradients, x, all, config.attention.has_sinks, s);
  };
  return mx::custom_vjp(forward, backward)(inputs_of(in));
}

void check_call(const mx::array& q, const mx::array& k, const RingOptions& options) {
  if (q.shape(2) != k.shape(2)) {
    throw_value_error(kRingAttention, shape_text("q", q) + " and " + shape_text("k", k) +
                                          "; allowed: the same length, that of a rank's part.");
  }
  if (options.zigzag && q.shape(2) % 2 != 0) {
    throw_value_error(kRingAttention,
                      shape_text("q", q) +
                          "; allowed with layout='zigzag': an even length, two chunks.");
  }
  if (options.lengths) {
    require_integers(kRingAttention, {"lengths", *options.lengths});
    require_shape(kRingAttention, {"lengths", *options.lengths}, {q.shape(0)},
                  "the length of each whole sequence");
  }
}

AttentionResult result_of(const Arrays& outputs, const RingOptions& options) {
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

// The op in a shapeless trace: positions depend on lengths.
AttentionResult shapeless(const mx::array& q,
                          const mx::array& k,
                          const mx::array& v,
                          const RingOptions& options,
                          mx::Stream s) {
  Arrays inputs = {q, k, v};
  OptionalInputs::append(inputs, options.attention.sinks);
  OptionalInputs::append(inputs, options.lengths);
  const auto graph = [options, s](const Arrays& in) -> Arrays {
    RingOptions own = options;
    OptionalInputs optional(in, 3);
    optional.replace(own.attention.sinks);
    optional.replace(own.lengths);
    own.return_lse = true;
    const auto [out, lse] = ring_attention(in[0], in[1], in[2], own, s);
    return {out, *lse};
  };
  return result_of(shapeless_node(kRingAttention, s, std::move(inputs), graph), options);
}

}  // namespace

AttentionResult ring_attention(const mx::array& q,
                               const mx::array& k,
                               const mx::array& v,
                               const RingOptions& given,
                               mx::StreamOrDevice stream) {
  RingOptions options = given;
  options.attention.op = kRingAttention;
  const std::initializer_list<NamedArray> arrays = {{"q", q}, {"k", k}, {"v", v}};
  require_kernel_dtypes(kRingAttention, arrays);
  const mx::Stream s = require_stream(kRingAttention, stream);
  check_attention_shapes(kRingAttention, q, k, v);
  check_call(q, k, options);
  require_connection(kRingAttention);
  RingConfig config{options.group ? *options.group : mx::distributed::init(),
                    checked_attention_config(options.attention, q.shape(3)), options.zigzag,
                    options.lengths.has_value()};
  const mx::Dtype dtype = promoted_dtype(arrays);
  const AttentionExtras extras =
      checked_attention_extras(config.attention, options.attention, q, k, dtype, s);
  const auto of = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  if (traces_shapeless({&q, &k, &v, of(options.attention.sinks), of(options.lengths)})) {
    return shapeless(q, k, v, options, s);
  }
  RingInputs in{mx::astype(q, dtype, s), mx::astype(k, dtype, s), mx::astype(v, dtype, s),
                extras.sinks, std::nullopt};
  if (options.lengths) {
    in.lengths = mx::astype(*options.lengths, mx::int32, s);
  }
  return result_of(
      runs_on_cpu(config, in, s) ? apply_forward(config, in, s) : graph_of_call(config, in, s),
      options);
}

}  // namespace mlx_anvil
