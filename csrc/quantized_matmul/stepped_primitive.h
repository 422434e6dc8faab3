// Primitives with the derivatives of their steps, such as gated products of quantized matrices.
#pragma once

#include <functional>

#include "common/select.h"
#include "gated/gated.h"
#include "quantized_matmul/quantized_primitive.h"
#include "silu_gate/silu_gate.h"

namespace mlx_anvil {

inline mx::array apply_gate(const mx::array& gate,
                            const mx::array& up,
                            const GateOptions& activation,
                            mx::Stream s) {
  return activation == GateOptions{} ? silu_gate(gate, up, s) : gated(gate, up, activation, s);
}

template <class Base>
class InSteps : public Base {
 public:
  using Base::Base;

 protected:
  // The result from ops with fused derivatives.
  virtual mx::array in_steps(const Arrays& inputs) = 0;

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    return mx::vjp(of_selected(primals, argnums), select(primals, argnums), cotangents).second;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    return mx::jvp(of_selected(primals, argnums), select(primals, argnums), tangents).second;
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    return {mx::vmap([this](const Arrays& in) -> Arrays { return {in_steps(in)}; }, axes)(inputs),
            {0}};
  }

 private:
  std::function<Arrays(const Arrays&)> of_selected(const Arrays& primals,
                                                   const std::vector<int>& argnums) {
    return [this, primals, argnums](const Arrays& values) -> Arrays {
      return {in_steps(substitute(primals, argnums, values))};
    };
  }
};

using SteppedPrimitive = InSteps<QuantizedPrimitive>;

}  // namespace mlx_anvil
