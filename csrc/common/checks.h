// Argument checks shared by the ops. Every message starts with "[op]" and says what was given and
// what is allowed; every check runs when the op is called, not when it is evaluated.
#pragma once

#include <initializer_list>
#include <string>

#include "common/dtype.h"
#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

struct NamedArray {
  const char* name;
  const mx::array& value;
};

// float32, float16 and bfloat16: what our kernels compute in.
bool is_kernel_dtype(mx::Dtype dtype);

// Of an array whose dtype is_kernel_dtype().
KernelDtype kernel_dtype_of(const mx::array& x);

// Anything else throws.
void require_kernel_dtypes(const char* op, std::initializer_list<NamedArray> arrays);

// The common dtype by MLX's promotion rules (float16 with bfloat16 gives float32).
mx::Dtype promoted_dtype(std::initializer_list<NamedArray> arrays);

// The shape that all arrays broadcast to; throws with all shapes named.
mx::Shape require_broadcastable(const char* op, std::initializer_list<NamedArray> arrays);

// Resolves `stream`, refusing a GPU where MLX has no GPU backend.
mx::Stream require_stream(const char* op, const mx::StreamOrDevice& stream);

// "(2, 3)", as Python prints a shape.
std::string to_text(const mx::Shape& shape);

// "float32", as Python prints a dtype.
std::string to_text(mx::Dtype dtype);

}  // namespace mlx_anvil
