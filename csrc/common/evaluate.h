// Evaluates a graph while a primitive is being evaluated, where mx::eval() must not be called.
#pragma once

#include <functional>

#include "common/primitive.h"

namespace mlx_anvil {

// Calls eval_cpu() or eval_gpu(), depending on the primitive's stream.
void evaluate_primitive(mx::Primitive& primitive, const Arrays& inputs, Arrays& outputs);

// Returns true if all unevaluated primitives behind `results` are on `stream`.
bool all_on_stream(const Arrays& results, mx::Stream stream);

// Allocates `results` and enqueues the work that computes them on `stream`. `inputs` are the leaves
// of the graph and must have memory.
void evaluate_graph(const Arrays& results, const Arrays& inputs, mx::Stream stream);

// Returns the results of a graph of MLX ops, while a primitive is evaluated. If a launch reads
// them, pass them to keep_until_done() after it.
Arrays evaluated(const std::function<Arrays(const Arrays&)>& graph,
                 const Arrays& inputs,
                 mx::Stream stream);

// Gives `output` memory of zeros, while its primitive is evaluated.
void set_zeros(mx::array& output, mx::Stream stream);

// MLX's own kernel that is faster than ours for a call.
struct MlxKernel {
  const char* name;  // of the op: "mx.matmul"
  const char* reason;
};

// Runs a graph of MLX ops in place of a kernel of ours, while the primitive of `op` is evaluated,
// and gives `output` the memory of its result. trace() shows the name and the reason.
void run_mlx_kernel(const char* op,
                    const MlxKernel& kernel,
                    const std::function<mx::array(const Arrays&)>& graph,
                    const Arrays& inputs,
                    mx::array& output,
                    mx::Stream stream);

}  // namespace mlx_anvil
