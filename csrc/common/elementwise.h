// Elementwise ops: up to four inputs of one shape and dtype, up to two outputs of that shape and
// dtype. An op describes its formulas (ElementwiseVariant); layouts, memory, threads, grids, vmap
// and the route to a kernel are here.
#pragma once

#include "common/elementwise_layout.h"
#include "common/launch.h"

namespace mlx_anvil {

// One formula of an op, with everything that is known about it. Ops keep one static variant for
// each.
struct ElementwiseVariant {
  const char* op;         // the op's Python name
  const char* variant;    // "forward", "backward", ...; kernels are <op>_<variant>_<dtype>_<layout>
  const char* primitive;  // name of the graph node, as MLX prints it
  int outputs;
  const ElementwiseKernels& (*cpu)();  // for the current instruction set

  // The formula in MLX ops: what the derivatives without a kernel of their own are taken of.
  Arrays (*compose)(const Arrays& inputs, mx::Stream stream);

  // Fused derivatives; null where those of `compose` have to do.
  Arrays (*vjp)(const Arrays& primals,
                const Arrays& cotangents,
                const std::vector<int>& argnums,
                mx::Stream stream) = nullptr;
  Arrays (*jvp)(const Arrays& primals,
                const Arrays& tangents,
                const std::vector<int>& argnums,
                mx::Stream stream) = nullptr;
};

// Adds the formula to the graph, or its composition where `stream` has no kernels (which `trace()`
// shows). Inputs have one dtype already; shapes broadcast.
Arrays apply_elementwise(const ElementwiseVariant& variant,
                         const Arrays& inputs,
                         mx::Stream stream);

}  // namespace mlx_anvil
