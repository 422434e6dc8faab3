// Argument checks shared by the ops. Every message starts with "[op]", then says what was given and
// what is allowed. Every check runs when the op is called, not when it is evaluated.
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

// Returns true for float32, float16 and bfloat16, the dtypes that our kernels support.
bool is_kernel_dtype(mx::Dtype dtype);

// Returns the kernel dtype of `x`, for which is_kernel_dtype() must hold.
KernelDtype kernel_dtype_of(const mx::array& x);

// Throws for any other dtype.
void require_kernel_dtypes(const char* op, std::initializer_list<NamedArray> arrays);

// Throws unless `x` has an integer dtype.
void require_integers(const char* op, const NamedArray& x);

// Throws unless `x` has the shape `allowed`. `meaning` says in words what that is.
void require_shape(const char* op,
                   const NamedArray& x,
                   const mx::Shape& allowed,
                   const char* meaning);

// Throws unless least <= number <= most.
void require_inside(const char* op, const char* name, int64_t number, int64_t least, int64_t most);

// The common dtype under MLX's promotion rules (float16 with bfloat16 gives float32).
mx::Dtype promoted_dtype(std::initializer_list<NamedArray> arrays);

// Returns the shape that all arrays broadcast to. The error names every shape.
mx::Shape require_broadcastable(const char* op, std::initializer_list<NamedArray> arrays);

// Resolves `stream`. Throws for a GPU stream if MLX has no GPU backend.
mx::Stream require_stream(const char* op, const mx::StreamOrDevice& stream);

// "(2, 3)", as Python prints a shape.
std::string to_text(const mx::Shape& shape);

// "q has shape (2, 3)".
std::string shape_text(const std::string& name, const mx::array& x);

// "float32", as Python prints a dtype.
std::string to_text(mx::Dtype dtype);

}  // namespace mlx_anvil
