// Elementwise ops: up to four inputs of one shape and dtype, up to two outputs of the same shape
// and dtype, and a number. An op supplies its formulas as an ElementwiseVariant; this file handles
// layouts, memory, threads, grids, vmap and routing.
#pragma once

#include "common/elementwise_layout.h"
#include "common/launch.h"

namespace mlx_anvil {

// One formula of an op. Ops keep one static variant per formula.
struct ElementwiseVariant {
  const char* op;         // the op's Python name
  const char* variant;    // "forward", "backward", ...; kernels are <op>_<variant>_<dtype>_<layout>
  const char* primitive;  // name of the graph node, as MLX prints it
  int outputs;
  const ElementwiseKernels& (*cpu)();  // for the current instruction set

  // The formula in MLX ops. Derivatives without a fused kernel are derived from it.
  Arrays (*compose)(const Arrays& inputs, float scalar, mx::Stream stream);

  // Fused derivatives. Null: differentiate `compose`.
  Arrays (*vjp)(const Arrays& primals,
                const Arrays& cotangents,
                const std::vector<int>& argnums,
                float scalar,
                mx::Stream stream) = nullptr;
  Arrays (*jvp)(const Arrays& primals,
                const Arrays& tangents,
                const std::vector<int>& argnums,
                float scalar,
                mx::Stream stream) = nullptr;
};

// Adds the formula to the graph. If `stream` has no kernels it adds the composition and notes the
// fallback for `trace()`. Inputs must share one dtype; their shapes broadcast. `scalar` is passed
// to the formula.
Arrays apply_elementwise(const ElementwiseVariant& variant,
                         const Arrays& inputs,
                         mx::Stream stream,
                         float scalar = 0.0f);

}  // namespace mlx_anvil
