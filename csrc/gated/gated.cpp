#include "gated/gated.h"

#include <cmath>
#include <string>

#include "common/activation.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/gate.h"
#include "common/shapeless.h"
#include "gated/simd/kernels.h"

namespace mlx_anvil {

namespace {

constexpr float kOaiSlope = 1.702f;

// What the activations share, and what differs by name only.
#define MLX_ANVIL_GATE(activation, Name)                                                       \
  static constexpr const char* kOp = kGated;                                                   \
  static constexpr const char* kVariants[] = {#activation "_forward", #activation "_backward", \
                                              #activation "_jvp"};                             \
  static constexpr const char* kPrimitives[] = {"Gated" #Name, "Gated" #Name "Backward",       \
                                                "Gated" #Name "Jvp"};                          \
  static constexpr GateKernels kCpu = {.forward = gated_##activation##_forward_kernels,        \
                                       .backward = gated_##activation##_backward_kernels,      \
                                       .jvp = gated_##activation##_jvp_kernels};

struct GatedSilu {
  MLX_ANVIL_GATE(silu, Silu)
  static constexpr float kUpOffset = 0.0f;
  static mx::array activation(const mx::array& x, mx::Stream s) { return silu(x, s); }
  static mx::array derivative(const mx::array& x, mx::Stream s) { return silu_derivative(x, s); }
};

struct GatedGelu {
  MLX_ANVIL_GATE(gelu, Gelu)
  static constexpr float kUpOffset = 0.0f;
  static mx::array activation(const mx::array& x, mx::Stream s) { return gelu(x, s); }
  static mx::array derivative(const mx::array& x, mx::Stream s) { return gelu_derivative(x, s); }
};

struct GatedGeluTanh {
  MLX_ANVIL_GATE(gelu_tanh, GeluTanh)
  static constexpr float kUpOffset = 0.0f;
  static mx::array activation(const mx::array& x, mx::Stream s) { return gelu_tanh(x, s); }
  static mx::array derivative(const mx::array& x, mx::Stream s) {
    return gelu_tanh_derivative(x, s);
  }
};

struct GatedRelu2 {
  MLX_ANVIL_GATE(relu2, Relu2)
  static constexpr float kUpOffset = 0.0f;
  static mx::array activation(const mx::array& x, mx::Stream s) { return relu2(x, s); }
  static mx::array derivative(const mx::array& x, mx::Stream s) { return relu2_derivative(x, s); }
};

struct GatedSwigluOai {
  MLX_ANVIL_GATE(swiglu_oai, SwigluOai)
  static constexpr float kUpOffset = 1.0f;
  static mx::array activation(const mx::array& x, mx::Stream s) {
    return sloped_silu(x, kOaiSlope, s);
  }
  static mx::array derivative(const mx::array& x, mx::Stream s) {
    return sloped_silu_derivative(x, kOaiSlope, s);
  }
};

#undef MLX_ANVIL_GATE

const ElementwiseVariant& forward_of(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return GateVariants<GatedSilu>::forward;
    case Activation::kGelu:
      return GateVariants<GatedGelu>::forward;
    case Activation::kGeluTanh:
      return GateVariants<GatedGeluTanh>::forward;
    case Activation::kRelu2:
      return GateVariants<GatedRelu2>::forward;
    case Activation::kSwigluOai:
      return GateVariants<GatedSwigluOai>::forward;
  }
  throw_internal_error(kGated, "unknown activation.");
}

}  // namespace

GateOptions checked_gate(const char* op, Activation activation, std::optional<float> limit) {
  if (limit && !(*limit > 0.0f && std::isfinite(*limit))) {
    throw_value_error(
        op, "limit is " + std::to_string(*limit) + "; allowed: None, or a finite number above 0.");
  }
  const float none = activation == Activation::kSwigluOai ? kDefaultOaiLimit : 0.0f;
  return {activation, limit.value_or(none)};
}

mx::array gated(const mx::array& gate,
                const mx::array& up,
                const GateOptions& options,
                mx::StreamOrDevice stream) {
  const std::initializer_list<NamedArray> arrays = {{"gate", gate}, {"up", up}};
  require_kernel_dtypes(kGated, arrays);
  require_broadcastable(kGated, arrays);
  const mx::Stream s = require_stream(kGated, stream);
  if (traces_shapeless({&gate, &up})) {
    return shapeless_node(kGated, s, {gate, up}, [=](const Arrays& in) -> Arrays {
      return {gated(in[0], in[1], options, s)};
    })[0];
  }
  const mx::Dtype dtype = promoted_dtype(arrays);
  return apply_elementwise(forward_of(options.activation),
                           {mx::astype(gate, dtype, s), mx::astype(up, dtype, s)}, s,
                           options.limit)[0];
}

mx::array compose_gated(const mx::array& gate,
                        const mx::array& up,
                        const GateOptions& options,
                        mx::Stream s) {
  return forward_of(options.activation).compose({gate, up}, options.limit, s)[0];
}

}  // namespace mlx_anvil
