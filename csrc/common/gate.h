// Gates: activation(gate) * up, elementwise, with both gradients and the tangent in one kernel
// each. A Gate is a struct with the names, the CPU kernels, and the activation in MLX ops:
//   kOp, kVariants[3], kPrimitives[3], kCpu      of the forward pass, the gradients and the tangent
//   kUpOffset                                    a number that is added to `up`
//   activation(x, s), derivative(x, s)           float32
// The scalar of the call is the limit: if positive, min(gate, limit) and clip(up, -limit, limit)
// take the place of gate and up.
#pragma once

#include <optional>

#include "common/elementwise.h"
#include "common/select.h"

namespace mlx_anvil {

// The CPU kernels of a gate, for the current instruction set.
struct GateKernels {
  const ElementwiseKernels& (*forward)();
  const ElementwiseKernels& (*backward)();
  const ElementwiseKernels& (*jvp)();
};

template <class Gate>
struct GateVariants {
  static const ElementwiseVariant forward;
  static const ElementwiseVariant backward;  // gate, up, dy -> gradients of gate and up
  static const ElementwiseVariant jvp;       // gate, up, their tangents -> tangent

 private:
  // An operand in float32, after the clamp, and where its derivative passes.
  struct Operand {
    mx::array value;
    std::optional<mx::array> passes;

    // MLX multiplies by the mask, so that NaN times false stays NaN.
    mx::array derivative(const mx::array& dx, mx::Stream s) const {
      return passes ? mx::multiply(dx, *passes, s) : dx;
    }
  };

  static mx::array wide(const mx::array& x, mx::Stream s) { return mx::astype(x, mx::float32, s); }

  static mx::array activation_derivative(const Operand& gate, const Operand& up, mx::Stream s) {
    return mx::multiply(up.value, Gate::derivative(gate.value, s), s);
  }

  static Operand clamped_gate(const mx::array& x, float limit, mx::Stream s) {
    const mx::array gate = wide(x, s);
    if (limit <= 0.0f) {
      return {gate, std::nullopt};
    }
    const mx::array most(limit);
    return {mx::minimum(gate, most, s), wide(mx::less(gate, most, s), s)};
  }

  static Operand clamped_up(const mx::array& x, float limit, mx::Stream s) {
    Operand up{wide(x, s), std::nullopt};
    if (limit > 0.0f) {
      const mx::array most(limit), least(-limit);
      up.passes =
          wide(mx::logical_and(mx::less(least, up.value, s), mx::less(up.value, most, s), s), s);
      up.value = mx::minimum(mx::maximum(up.value, least, s), most, s);
    }
    if (Gate::kUpOffset != 0.0f) {
      up.value = mx::add(up.value, mx::array(Gate::kUpOffset), s);
    }
    return up;
  }

  static Arrays compose_forward(const Arrays& in, float limit, mx::Stream s) {
    const Operand gate = clamped_gate(in[0], limit, s), up = clamped_up(in[1], limit, s);
    const mx::array out = mx::multiply(Gate::activation(gate.value, s), up.value, s);
    return {mx::astype(out, in[0].dtype(), s)};
  }

  static Arrays compose_backward(const Arrays& in, float limit, mx::Stream s) {
    const Operand gate = clamped_gate(in[0], limit, s), up = clamped_up(in[1], limit, s);
    const mx::array dy = wide(in[2], s);
    const mx::array d_gate = mx::multiply(dy, activation_derivative(gate, up, s), s);
    const mx::array d_up = mx::multiply(dy, Gate::activation(gate.value, s), s);
    return {mx::astype(gate.derivative(d_gate, s), in[0].dtype(), s),
            mx::astype(up.derivative(d_up, s), in[0].dtype(), s)};
  }

  static Arrays compose_jvp(const Arrays& in, float limit, mx::Stream s) {
    const Operand gate = clamped_gate(in[0], limit, s), up = clamped_up(in[1], limit, s);
    const mx::array through_gate =
        mx::multiply(gate.derivative(wide(in[2], s), s), activation_derivative(gate, up, s), s);
    const mx::array through_up =
        mx::multiply(up.derivative(wide(in[3], s), s), Gate::activation(gate.value, s), s);
    return {mx::astype(mx::add(through_gate, through_up, s), in[0].dtype(), s)};
  }

  // One kernel computes both gradients and recomputes the activation.
  static Arrays vjp_of(const Arrays& primals,
                       const Arrays& cotangents,
                       const std::vector<int>& argnums,
                       float limit,
                       mx::Stream s) {
    return select(apply_elementwise(backward, {primals[0], primals[1], cotangents[0]}, s, limit),
                  argnums);
  }

  // A missing tangent is omitted rather than replaced by zero: zero times infinity is NaN.
  static Arrays jvp_of(const Arrays& primals,
                       const Arrays& tangents,
                       const std::vector<int>& argnums,
                       float limit,
                       mx::Stream s) {
    const mx::array &gate = primals[0], &up = primals[1];
    if (argnums.size() == 2) {
      const bool in_order = argnums[0] == 0;
      return apply_elementwise(jvp, {gate, up, tangents[!in_order], tangents[in_order]}, s, limit);
    }
    if (argnums[0] == 1 && limit <= 0.0f && Gate::kUpOffset == 0.0f) {
      return apply_elementwise(forward, {gate, tangents[0]}, s);
    }
    return {apply_elementwise(backward, {gate, up, tangents[0]}, s, limit)[argnums[0]]};
  }
};

template <class Gate>
constinit const ElementwiseVariant GateVariants<Gate>::forward{.op = Gate::kOp,
                                                               .variant = Gate::kVariants[0],
                                                               .primitive = Gate::kPrimitives[0],
                                                               .outputs = 1,
                                                               .cpu = Gate::kCpu.forward,
                                                               .compose = compose_forward,
                                                               .vjp = vjp_of,
                                                               .jvp = jvp_of};

template <class Gate>
constinit const ElementwiseVariant GateVariants<Gate>::backward{.op = Gate::kOp,
                                                                .variant = Gate::kVariants[1],
                                                                .primitive = Gate::kPrimitives[1],
                                                                .outputs = 2,
                                                                .cpu = Gate::kCpu.backward,
                                                                .compose = compose_backward};

template <class Gate>
constinit const ElementwiseVariant GateVariants<Gate>::jvp{.op = Gate::kOp,
                                                           .variant = Gate::kVariants[2],
                                                           .primitive = Gate::kPrimitives[2],
                                                           .outputs = 1,
                                                           .cpu = Gate::kCpu.jvp,
                                                           .compose = compose_jvp};

}  // namespace mlx_anvil
