// Evaluates graphs inside the evaluation of a primitive, where mx::eval() may not be called.
#pragma once

#include "common/primitive.h"

namespace mlx_anvil {

// By the device of the primitive's stream.
void evaluate_primitive(mx::Primitive& primitive, const Arrays& inputs, Arrays& outputs);

// Whether all primitives behind `results` that have not been evaluated are on `stream`.
bool all_on_stream(const Arrays& results, mx::Stream stream);

// Gives `results` their memory, and `stream` the work that fills it. `inputs` are what the graph
// starts from and have theirs.
void evaluate_graph(const Arrays& results, const Arrays& inputs, mx::Stream stream);

}  // namespace mlx_anvil
