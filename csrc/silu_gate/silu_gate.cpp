#include "silu_gate/silu_gate.h"

#include <algorithm>

#include "common/checks.h"
#include "common/shapeless.h"
#include "silu_gate/simd/kernels.h"

namespace mlx_anvil {

namespace {

// ---- definitions in MLX ops, in float32 for every input dtype -----------------------------------

mx::array wide(const mx::array& x, mx::Stream s) {
  return mx::astype(x, mx::float32, s);
}

mx::array silu(const mx::array& x, mx::Stream s) {
  return mx::multiply(x, mx::sigmoid(x, s), s);
}

// s (1 + x (1 - s)) with s = sigmoid(x). 1 - s is computed as sigmoid(-x), which does not cancel.
mx::array silu_derivative(const mx::array& x, mx::Stream s) {
  const mx::array sigmoid = mx::sigmoid(x, s);
  const mx::array complement = mx::sigmoid(mx::negative(x, s), s);
  return mx::multiply(sigmoid, mx::add(mx::array(1.0f), mx::multiply(x, complement, s), s), s);
}

Arrays compose_forward(const Arrays& in, mx::Stream s) {
  const mx::array out = mx::multiply(silu(wide(in[0], s), s), wide(in[1], s), s);
  return {mx::astype(out, in[0].dtype(), s)};
}

// gate, up, dy -> gradients of gate and up
Arrays compose_backward(const Arrays& in, mx::Stream s) {
  const mx::array gate = wide(in[0], s), up = wide(in[1], s), dy = wide(in[2], s);
  const mx::array d_gate = mx::multiply(dy, mx::multiply(up, silu_derivative(gate, s), s), s);
  const mx::array d_up = mx::multiply(dy, silu(gate, s), s);
  return {mx::astype(d_gate, in[0].dtype(), s), mx::astype(d_up, in[0].dtype(), s)};
}

// gate, up, their tangents -> tangent of silu_gate
Arrays compose_jvp(const Arrays& in, mx::Stream s) {
  const mx::array gate = wide(in[0], s), up = wide(in[1], s);
  const mx::array through_gate =
      mx::multiply(wide(in[2], s), mx::multiply(up, silu_derivative(gate, s), s), s);
  const mx::array through_up = mx::multiply(wide(in[3], s), silu(gate, s), s);
  return {mx::astype(mx::add(through_gate, through_up, s), in[0].dtype(), s)};
}

// ---- variants ----------------------------------------------------------------------------------

constinit const ElementwiseVariant kBackward{
    kSiluGate, "backward", "SiluGateBackward", 2, silu_gate_backward_kernels, compose_backward};

constinit const ElementwiseVariant kJvp{kSiluGate,  "jvp", "SiluGateJvp", 1, silu_gate_jvp_kernels,
                                        compose_jvp};

Arrays vjp(const Arrays& primals,
           const Arrays& cotangents,
           const std::vector<int>& argnums,
           mx::Stream s);
Arrays jvp(const Arrays& primals,
           const Arrays& tangents,
           const std::vector<int>& argnums,
           mx::Stream s);

constinit const ElementwiseVariant kForward{
    kSiluGate, "forward", "SiluGate", 1, silu_gate_forward_kernels, compose_forward, vjp, jvp};

// One kernel computes both gradients and recomputes the sigmoid.
Arrays vjp(const Arrays& primals,
           const Arrays& cotangents,
           const std::vector<int>& argnums,
           mx::Stream s) {
  const Arrays both = apply_elementwise(kBackward, {primals[0], primals[1], cotangents[0]}, s);
  Arrays wanted;
  for (int i : argnums) {
    wanted.push_back(both[i]);
  }
  return wanted;
}

// A missing tangent is omitted rather than replaced by zero: zero times infinity is NaN.
Arrays jvp(const Arrays& primals,
           const Arrays& tangents,
           const std::vector<int>& argnums,
           mx::Stream s) {
  const mx::array &gate = primals[0], &up = primals[1];
  if (argnums.size() == 2) {
    const bool in_order = argnums[0] == 0;
    return apply_elementwise(kJvp, {gate, up, tangents[!in_order], tangents[in_order]}, s);
  }
  if (argnums[0] == 1) {
    return apply_elementwise(kForward, {gate, tangents[0]}, s);
  }
  return {apply_elementwise(kBackward, {gate, up, tangents[0]}, s)[0]};
}

}  // namespace

mx::array silu_gate(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream) {
  const std::initializer_list<NamedArray> arrays = {{"gate", gate}, {"up", up}};
  require_kernel_dtypes(kSiluGate, arrays);
  require_broadcastable(kSiluGate, arrays);
  const mx::Stream s = require_stream(kSiluGate, stream);
  if (traces_shapeless({&gate, &up})) {
    return shapeless_node(kSiluGate, s, {gate, up}, [s](const Arrays& in) -> Arrays {
      return {silu_gate(in[0], in[1], s)};
    })[0];
  }
  const mx::Dtype dtype = promoted_dtype(arrays);
  return apply_elementwise(kForward, {mx::astype(gate, dtype, s), mx::astype(up, dtype, s)}, s)[0];
}

}  // namespace mlx_anvil
