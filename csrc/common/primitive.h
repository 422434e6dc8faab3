// The base class of every op's primitives. A derived class defines the op in MLX ops (`compose`)
// and inherits vjp, jvp and vmap from that definition. It overrides those for which a fused kernel
// is faster, so every op is differentiable to any order.
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

  // The op's Python name, for messages and trace().
  virtual const char* op() const = 0;

  // What the primitive computes, for messages: "SiluGateBackward".
  virtual const char* kind() const = 0;

  // Never the name of a primitive that MLX can export: MLX would read state that ours do not have.
  const char* name() const final;

  // The computation as a differentiable graph of MLX ops on this primitive's stream.
  virtual Arrays compose(const Arrays& inputs) = 0;

  // Computes the shapes without evaluating. Shapeless compilation needs them.
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override = 0;

  // eval_cpu_kernels() runs the CPU kernels. eval_gpu_kernels() runs the Metal kernels, on a GPU
  // stream or if the primitive was created inside simulate().
  virtual void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) = 0;
  virtual void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) = 0;

  // Returns true if evaluation calls eval_gpu_kernels().
  bool launches_kernels() { return stream().device == mx::Device::gpu || simulation_.on; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) final;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) final;

  // MLX's entry points. Derivatives of a simulated primitive are simulated too.
  Arrays vjp(const Arrays& primals,
             const Arrays& cotangents,
             const std::vector<int>& argnums,
             const Arrays& outputs) final;
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) final;
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) final;

  // Compares class and simulation mode. A class with parameters must compare those too.
  bool is_equivalent(const mx::Primitive& other) const override {
    return typeid(*this) == typeid(other) &&
           simulation_ == static_cast<const FusedPrimitive&>(other).simulation_;
  }

 protected:
  // Returns true if input i must be row-contiguous in eval_cpu_kernels() and eval_gpu_kernels(); it
  // is copied there if not, since a copy node costs 1-2 us per call. Derivatives do use copy nodes:
  // MLX's matrix products return different bits for different layouts.
  virtual bool wants_dense(size_t) const { return false; }

  // Returns true for another layout of input i, which wants_dense(), that the kernels read as it
  // is.
  virtual bool takes(size_t, const mx::array&) const { return false; }
  virtual bool copies_primal(size_t i) const { return wants_dense(i); }

  // Returns true if `compose` calls fused primitives, so that its derivatives are no fallback.
  virtual bool composes_kernels() const { return false; }

  // The defaults differentiate or vectorise `compose`. Override them if a fused version is faster.
  virtual Arrays gradient(const Arrays& primals,
                          const Arrays& cotangents,
                          const std::vector<int>& argnums,
                          const Arrays& outputs);
  virtual Arrays tangent(const Arrays& primals,
                         const Arrays& tangents,
                         const std::vector<int>& argnums);
  virtual std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                                      const std::vector<int>& axes);

  // The value of simulation_mode() when the primitive was created.
  const SimulationMode& simulation_of_call() const { return simulation_; }

 private:
  Arrays dense_primals(const Arrays& primals);

  template <class Eval>
  void eval_dense(const Arrays& inputs, Eval eval);

  const SimulationMode simulation_;
};

// Returns true if `x` is evaluated, row-contiguous and constant. A tracer is not constant: a
// transformation may call the traced graph with other values.
bool is_evaluated_dense(const mx::array& x);

// Copies repeated results: if a result occurs twice, mx::vjp (0.32.4) keeps its first cotangent and
// drops the others.
Arrays copy_repeated_results(Arrays results, mx::Stream stream);

// The outputs of a primitive, as graph nodes. Move `inputs` in if possible: each copy of an array
// costs two atomic operations, which add up in an op call.
mx::array output_of(std::shared_ptr<FusedPrimitive> primitive, mx::Dtype dtype, Arrays inputs);
Arrays outputs_of(std::shared_ptr<FusedPrimitive> primitive,
                  const std::vector<mx::Dtype>& dtypes,
                  Arrays inputs);

}  // namespace mlx_anvil
