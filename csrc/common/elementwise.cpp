#include "common/elementwise.h"

#include <algorithm>

#include "common/broadcast.h"
#include "common/cache_size.h"
#include "common/checks.h"
#include "common/composing.h"
#include "common/launch_arrays.h"
#include "common/parallel.h"
#include "common/run_on_cpu.h"
#include "common/vmap_axis.h"
#include "metal/common/elementwise_params.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_anvil {

namespace {

static_assert(kElementwiseMaxRank == MLX_ANVIL_ELEMENTWISE_MAX_RANK);
static_assert(kElementwiseMaxInputs == MLX_ANVIL_ELEMENTWISE_MAX_INPUTS);

// ---- kernels on the GPU -------------------------------------------------------------------------

constexpr uint32_t kThreads = 256;
constexpr int64_t kPackBytes = 16;      // one vector load; must match metal/common/elementwise.h
constexpr int64_t kPacksPerThread = 2;  // must match metal/common/elementwise.h

const Kernel& gpu_kernel(const ElementwiseVariant& variant,
                         const mx::array& output,
                         bool flat,
                         bool aligned) {
  return kernel_named(
      variant.op,
      {variant.op, "_", variant.variant, "_", dtype_name(output), flat ? "_flat" : "_strided"},
      {{0, aligned}});
}

// GPU buffers start at far larger powers of two, so only the offset into the buffer matters.
bool is_aligned(const mx::array& x) {
  return x.offset() % kPackBytes == 0;
}

// Returns true if every full pack of every array starts at a multiple of 16 bytes.
bool packs_are_aligned(const ElementwiseLayout& layout,
                       const Arrays& inputs,
                       const Arrays& outputs) {
  const int64_t pack = kPackBytes / static_cast<int64_t>(outputs[0].itemsize());
  bool aligned = std::all_of(inputs.begin(), inputs.end(), is_aligned) &&
                 std::all_of(outputs.begin(), outputs.end(), is_aligned);
  if (layout.flat) {
    return aligned;
  }
  aligned = aligned && layout.width() % pack == 0;
  for (size_t k = 0; k < inputs.size(); ++k) {
    aligned = aligned && layout.strides[k][layout.rank - 1] == 1;
    for (int axis = 0; axis < layout.rank - 1; ++axis) {
      aligned = aligned && layout.strides[k][axis] % pack == 0;
    }
  }
  return aligned;
}

ElementwiseParams make_params(const ElementwiseLayout& layout, float scalar) {
  ElementwiseParams params{};
  params.size = layout.size;
  params.rank = layout.rank;
  params.scalar = scalar;
  std::copy(std::begin(layout.shape), std::end(layout.shape), params.shape);
  for (int k = 0; k < kElementwiseMaxInputs; ++k) {
    std::copy(std::begin(layout.strides[k]), std::end(layout.strides[k]), params.strides[k]);
  }
  return params;
}

// ---- kernels on the CPU -------------------------------------------------------------------------

// Ranges start at multiples of this many elements, so that vectors have the same alignment in every
// thread.
constexpr int64_t kRangeUnit = 64;
// Minimum elements per thread: about 15 us of work, enough to pay for waking a thread.
constexpr int64_t kGrain = 32768;

// ---- the primitive ------------------------------------------------------------------------------

class ElementwisePrimitive : public FusedPrimitive {
 public:
  ElementwisePrimitive(mx::Stream stream, const ElementwiseVariant& variant, float scalar)
      : FusedPrimitive(stream), variant_(variant), scalar_(scalar) {}

  const char* op() const override { return variant_.op; }
  const char* kind() const override { return variant_.primitive; }
  Arrays compose(const Arrays& inputs) override {
    return variant_.compose(inputs, scalar_, stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return std::vector<mx::Shape>(variant_.outputs, inputs[0].shape());
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const ElementwisePrimitive&>(other);
    return &variant_ == &same.variant_ && scalar_ == same.scalar_;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override;

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    return variant_.vjp ? variant_.vjp(primals, cotangents, argnums, scalar_, stream())
                        : FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    return variant_.jvp ? variant_.jvp(primals, tangents, argnums, scalar_, stream())
                        : FusedPrimitive::tangent(primals, tangents, argnums);
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    Arrays front;  // apply_elementwise() broadcasts them, in shapeless graphs too
    for (size_t i = 0; i < inputs.size(); ++i) {
      front.push_back(with_vmap_axis(inputs[i], axes[i], 0, stream()));
    }
    Arrays outputs = apply_elementwise(variant_, front, stream(), scalar_);
    return {std::move(outputs), std::vector<int>(variant_.outputs, 0)};
  }

 private:
  const ElementwiseVariant& variant_;
  const float scalar_;
};

void ElementwisePrimitive::eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) {
  const ElementwiseLayout layout = prepare_elementwise(inputs, outputs, stream());
  if (layout.size == 0) {
    return;
  }
  ElementwiseArgs args{};
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (size_t k = 0; k < inputs.size(); ++k) {
    encoder.set_input_array(inputs[k]);
    args.inputs[k] = inputs[k].data<void>();
  }
  for (size_t k = 0; k < outputs.size(); ++k) {
    encoder.set_output_array(outputs[k]);
    args.outputs[k] = outputs[k].data<void>();
  }
  const size_t bytes = outputs[0].nbytes() * (inputs.size() + outputs.size());
  args.scalar = scalar_;
  args.stream_outputs = !layout.in_place && static_cast<int64_t>(bytes) > last_level_cache_bytes();

  const ElementwiseKernel kernel = variant_.cpu()[kernel_dtype_of(outputs[0])];
  SharedSpan span = dispatch_to_cpu(encoder, [args, layout, kernel]() mutable {
    args.rank = layout.rank;
    args.shape = layout.shape;
    for (int k = 0; k < kElementwiseMaxInputs; ++k) {
      args.strides[k] = layout.strides[k];
    }
    const int64_t units = (layout.size + kRangeUnit - 1) / kRangeUnit;
    parallel_for(units, kGrain / kRangeUnit, [&](int64_t begin, int64_t end) {
      kernel(args, begin * kRangeUnit, std::min(end * kRangeUnit, layout.size));
    });
  });
  record_on_cpu(
      *this, [&] { return gpu_kernel(variant_, outputs[0], layout.flat, true).name(); },
      std::move(span));
}

void ElementwisePrimitive::eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) {
  const ElementwiseLayout layout = prepare_elementwise(inputs, outputs, stream());
  if (layout.size == 0) {
    return;
  }
  const bool aligned = packs_are_aligned(layout, inputs, outputs);
  const ElementwiseParams params = make_params(layout, scalar_);
  const int64_t pack = kPackBytes / static_cast<int64_t>(outputs[0].itemsize());

  KernelLaunch request;
  request.kernel = &gpu_kernel(variant_, outputs[0], layout.flat, aligned);
  for (const mx::array& input : inputs) {
    request.inputs.push_back(&input);
  }
  for (mx::array& output : outputs) {
    request.outputs.push_back(&output);
  }
  request.params = &params;
  request.params_size = sizeof(params);
  request.threadgroup = {kThreads, 1, 1};
  if (layout.flat) {
    request.grid = linear_grid(layout.size, kThreads * kPacksPerThread * pack);
  } else {
    const int64_t packs_per_row = (layout.width() + pack - 1) / pack;
    request.grid = linear_grid(layout.size / layout.width() * packs_per_row, kThreads);
  }
  launch(request, stream());
}

}  // namespace

Arrays apply_elementwise(const ElementwiseVariant& variant,
                         const Arrays& inputs,
                         mx::Stream stream,
                         float scalar) {
  const Arrays same_shape = stretch_arrays(inputs, stream);
  std::string why_not;
  if (stream.device == mx::Device::gpu && !can_launch(stream.device, &why_not)) {
    note_fallback(variant.op, why_not);
    return variant.compose(same_shape, scalar, stream);
  }
  Arrays operands;
  for (const mx::array& x : same_shape) {
    // Rank does not matter to a kernel if an array is dense.
    const bool deep = x.ndim() > static_cast<size_t>(kElementwiseMaxRank);
    operands.push_back(deep ? dense_copy(x, stream) : x);
  }
  const std::vector<mx::Dtype> dtypes(variant.outputs, operands[0].dtype());
  return outputs_of(std::make_shared<ElementwisePrimitive>(stream, variant, scalar), dtypes,
                    std::move(operands));
}

}  // namespace mlx_anvil
