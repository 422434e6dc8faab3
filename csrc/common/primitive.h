// The base of every op's primitives. A derived class says how the op is defined in MLX ops
// (`compose`) and gets vjp, jvp and vmap from that definition; it overrides those for which a fused
// kernel is better. So every op is differentiable to any order.
#pragma once

#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include "common/simulate.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace mlx_anvil {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

class FusedPrimitive : public mx::Primitive {
 public:
  explicit FusedPrimitive(mx::Stream stream)
      : mx::Primitive(stream), simulation_(simulation_mode()) {}

  // The Python name of the op, for messages and `trace()`.
  virtual const char* op() const = 0;

  // What it computes, for messages: "SiluGateBackward".
  virtual const char* kind() const = 0;

  // Never that of a primitive that MLX can export: MLX would read a state that ours do not have.
  const char* name() const final;

  // What this primitive computes, as a graph of MLX ops on this primitive's stream. Differentiable.
  virtual Arrays compose(const Arrays& inputs) = 0;

  // Derived classes give the shapes without evaluating: shapeless compilation needs them.
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override = 0;

  // The op on a CPU stream, by the CPU kernels; and by the Metal kernels, on a GPU stream or where
  // the primitive was made inside `simulate()`.
  virtual void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) = 0;
  virtual void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) = 0;

  // Whether an evaluation is eval_gpu_kernels().
  bool launches_kernels() { return stream().device == mx::Device::gpu || simulation_.on; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) final;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) final;

  // MLX's entry points; derivatives of a simulated primitive are simulated too.
  Arrays vjp(const Arrays& primals,
             const Arrays& cotangents,
             const std::vector<int>& argnums,
             const Arrays& outputs) final;
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) final;
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) final;

  // True when both are of the same class and run in the same way; a class with parameters compares
  // them too.
  bool is_equivalent(const mx::Primitive& other) const override {
    return typeid(*this) == typeid(other) &&
           simulation_ == static_cast<const FusedPrimitive&>(other).simulation_;
  }

 protected:
  // Whether an input is to be row-contiguous when it comes to eval_cpu_kernels() and
  // eval_gpu_kernels(): one that is not is copied then. A node of the graph would cost a
  // microsecond or two each time. Derivatives get theirs from such nodes: MLX's products give other
  // bits for other layouts.
  virtual bool wants_dense(size_t) const { return false; }

  // By default the derivatives and the batching of `compose`; overridden where fused is better.
  virtual Arrays gradient(const Arrays& primals,
                          const Arrays& cotangents,
                          const std::vector<int>& argnums,
                          const Arrays& outputs);
  virtual Arrays tangent(const Arrays& primals,
                         const Arrays& tangents,
                         const std::vector<int>& argnums);
  virtual std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                                      const std::vector<int>& axes);

  // What simulation_mode() was when the primitive was made.
  const SimulationMode& simulation_of_call() const { return simulation_; }

 private:
  Arrays dense_primals(const Arrays& primals);

  template <class Eval>
  void eval_dense(const Arrays& inputs, Eval eval);

  const SimulationMode simulation_;
};

// Whether the numbers of `x` are there, row after row, and stay: what a transformation traces may
// be given others.
bool is_evaluated_dense(const mx::array& x);

// For elementwise primitives: moves each batch axis to the front and broadcasts the inputs that
// have none (axis -1), so that all inputs have one shape again.
Arrays batch_to_front(const Arrays& inputs, const std::vector<int>& axes, mx::Stream stream);

// The results of a primitive, as nodes of the graph. To be given `inputs` that nobody needs any
// more: every copy of an array costs two atomic operations, and they add up in a call of an op.
mx::array output_of(std::shared_ptr<FusedPrimitive> primitive, mx::Dtype dtype, Arrays inputs);
Arrays outputs_of(std::shared_ptr<FusedPrimitive> primitive,
                  const std::vector<mx::Dtype>& dtypes,
                  Arrays inputs);

}  // namespace mlx_anvil
