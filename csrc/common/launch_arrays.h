// Properties of arrays that select a kernel variant.
#pragma once

#include <initializer_list>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// The dtype as kernel names spell it: "float32", "float16" or "bfloat16".
const char* dtype_name(const mx::array& x);

// Returns true if every row of every array consists of whole, aligned vectors of `vector_bytes`.
bool rows_are_vectors(std::initializer_list<const mx::array*> arrays, int vector_bytes = 16);

// CPU: true if a call with this many arrays of the size of `out` should use streaming stores. They
// require fresh memory, and rows that consist of whole cache lines.
bool streams_rows(const mx::array& out, int64_t arrays);

}  // namespace mlx_anvil
