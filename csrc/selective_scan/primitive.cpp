#include "selective_scan/primitive.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "common/run_on_cpu.h"
#include "common/select.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "selective_scan/compose.h"
#include "selective_scan/cpu.h"
#include "selective_scan/gpu.h"

namespace mlx_anvil {

namespace {

ScanRows rows_of(const mx::array* x) {
  return x ? ScanRows{x->data<void>(), x->strides(0), x->strides(1)} : ScanRows{};
}

const float* floats_of(const mx::array* x) {
  return x ? x->data<float>() : nullptr;
}

class ScanPrimitive : public FusedPrimitive {
 public:
  ScanPrimitive(mx::Stream stream, const ScanConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kSelectiveScan; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const ScanPrimitive&>(other).config_;
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  // Rows may be any strides apart.
  bool takes(size_t i, const mx::array& x) const override {
    const bool is_rows = config_.is_rows(i) || i == config_.count();  // or the cotangent of y
    return is_rows && (x.strides(2) == 1 || x.shape(2) == 1);
  }

  template <class Args>
  Args args_of(const ScanView& in) const {
    Args args{};
    args.dtype = kernel_dtype_of(*in.x);
    args.sizes = {in.x->shape(0), in.x->shape(1), in.x->shape(2), in.a->shape(1)};
    args.x = rows_of(in.x);
    args.dt = rows_of(in.dt);
    args.b = rows_of(in.b);
    args.c = rows_of(in.c);
    args.z = rows_of(in.z);
    args.a = floats_of(in.a);
    args.d = floats_of(in.d);
    args.state = floats_of(in.state);
    args.lengths = in.lengths ? in.lengths->data<int32_t>() : nullptr;
    args.softplus = config_.softplus;
    return args;
  }

  template <class Work>
  void dispatch_cpu(const char* variant, const Arrays& inputs, Arrays& outputs, Work work) {
    run_on_cpu(*this, inputs, outputs, std::move(work), [&] {
      return std::string(kSelectiveScan) + "_" + variant + "_" + dtype_name(inputs[0]);
    });
  }

  const ScanConfig config_;
};

// Inputs: the operands, then the cotangents of y and of the last state. Outputs: gradients of the
// operands that have one.
class SelectiveScanBackward : public ScanPrimitive {
 public:
  using ScanPrimitive::ScanPrimitive;

  const char* kind() const override { return "SelectiveScanBackward"; }

  Arrays compose(const Arrays& inputs) override {
    const Arrays operands(inputs.begin(), inputs.begin() + config_.count());
    const Arrays cotangents(inputs.begin() + config_.count(), inputs.end());
    std::vector<int> argnums(config_.differentiable());
    for (size_t i = 0; i < argnums.size(); ++i) {
      argnums[i] = static_cast<int>(i);
    }
    const auto forward = [&](const Arrays& values) {
      return compose_scan(config_, substitute(operands, argnums, values), stream());
    };
    return mx::vjp(forward, select(operands, argnums), cotangents).second;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < config_.differentiable(); ++i) {
      shapes.push_back(inputs[i].shape());
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    const ScanGradients to(config_, outputs);
    auto args = args_of<ScanBackwardArgs>(ScanView(config_, inputs));
    const auto data = [](mx::array* x) { return x ? x->data<float>() : nullptr; };
    args.d_y = rows_of(&inputs[config_.count()]);
    args.d_last_state = floats_of(&inputs[config_.count() + 1]);
    args.d_x = to.x->data<void>();
    args.d_dt = to.dt->data<void>();
    args.d_z = to.z ? to.z->data<void>() : nullptr;
    args.d_a = data(to.a);
    args.d_d = data(to.d);
    args.d_state = data(to.state);
    void *const d_b = to.b->data<void>(), *const d_c = to.c->data<void>();
    dispatch_cpu("backward", inputs, outputs,
                 [args, d_b, d_c] { scan_backward_cpu(args, d_b, d_c); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    scan_backward_gpu(config_, inputs, ScanGradients(config_, outputs), stream());
  }
};

// Outputs: y and the last state.
class SelectiveScan : public ScanPrimitive {
 public:
  using ScanPrimitive::ScanPrimitive;

  const char* kind() const override { return "SelectiveScan"; }

  Arrays compose(const Arrays& inputs) override { return compose_scan(config_, inputs, stream()); }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), ScanView(config_, inputs).state_shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    auto args = args_of<ScanForwardArgs>(ScanView(config_, inputs));
    args.y = outputs[0].data<void>();
    args.last_state = outputs[1].data<float>();
    dispatch_cpu("forward", inputs, outputs, [args] { scan_forward_cpu(args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    scan_forward_gpu(config_, inputs, outputs[0], outputs[1], stream());
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    Arrays inputs = primals;
    inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
    std::vector<mx::Dtype> dtypes;
    for (size_t i = 0; i < config_.differentiable(); ++i) {
      dtypes.push_back(primals[i].dtype());
    }
    Arrays all = outputs_of(std::make_shared<SelectiveScanBackward>(stream(), config_), dtypes,
                            std::move(inputs));
    if (config_.has_lengths) {
      all.push_back(mx::zeros_like(primals[config_.lengths_at()], stream()));
    }
    return select(all, argnums);
  }

  // The axis becomes part of the batch, unless A or D has it.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    if (axes[2] >= 0 || (config_.has_d && axes[ScanConfig::kD] >= 0)) {
      return FusedPrimitive::batched(inputs, axes);
    }
    const int length = vmap_length(inputs, axes);
    Arrays folded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_shared = i == 2 || (config_.has_d && i == ScanConfig::kD);
      folded.push_back(
          is_shared ? inputs[i]
                    : mx::flatten(repeated_over_vmap(inputs[i], axes[i], 0, length, stream()), 0, 1,
                                  stream()));
    }
    return {unfolded_from_batch(apply_scan(config_, std::move(folded), stream()), length, stream()),
            {0, 0}};
  }
};

}  // namespace

Arrays apply_scan(const ScanConfig& config, Arrays inputs, mx::Stream s) {
  auto primitive = std::make_shared<SelectiveScan>(s, config);
  if (primitive->launches_kernels() && ScanView(config, inputs).a->shape(1) > kMostGpuStates) {
    note_fallback(kSelectiveScan, "GPU kernels take up to 16 states");
    return primitive->compose(inputs);
  }
  std::string why_not;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &why_not)) {
    note_fallback(kSelectiveScan, why_not);
    return primitive->compose(inputs);
  }
  const mx::Dtype dtype = inputs[0].dtype();
  return outputs_of(std::move(primitive), {dtype, mx::float32}, std::move(inputs));
}

}  // namespace mlx_anvil
