// Makes MLX keep more freed CPU memory for reuse. primitive.cpp calls it for every output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Call this when an op creates an output, before MLX evaluates it.
//
// MLX keeps only 32 MB of freed memory on the CPU, so every larger output is fresh memory, and the
// first touch of its pages takes longer than our kernels. The first large output raises the limit
// to a quarter of the memory limit, unless the program has set one. Later outputs clear the cache
// when MLX's memory limit or the machine's memory is about to be exceeded.
void keep_freed_memory(size_t output_bytes, const mx::Stream& stream);

// Bytes that this process can still allocate before the machine swaps or the container is killed.
// Empty if the system does not report it.
std::optional<int64_t> available_memory();

}  // namespace mlx_anvil
