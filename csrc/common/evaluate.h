// Evaluates a graph while a primitive is being evaluated, where mx::eval() must not be called.
#pragma once

#include "common/primitive.h"

namespace mlx_anvil {

// Calls eval_cpu() or eval_gpu(), depending on the primitive's stream.
void evaluate_primitive(mx::Primitive& primitive, const Arrays& inputs, Arrays& outputs);

// Returns true if all unevaluated primitives behind `results` are on `stream`.
bool all_on_stream(const Arrays& results, mx::Stream stream);

// Allocates `results` and enqueues the work that computes them on `stream`. `inputs` are the leaves
// of the graph and must have memory.
void evaluate_graph(const Arrays& results, const Arrays& inputs, mx::Stream stream);

}  // namespace mlx_anvil
