// Freed memory that MLX keeps on the CPU for the outputs to come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// An op calls this when it makes an output, before MLX evaluates it.
//
// MLX keeps only 32 MB of freed memory on the CPU. Every larger output is new memory then, and the
// first touch of its pages takes longer than our kernels. The first large output raises that limit
// to a quarter of the memory limit, unless the program has set one. Later ones give the kept memory
// back when MLX's memory limit or the machine's memory is about to be exceeded.
void keep_freed_memory(size_t output_bytes, const mx::Stream& stream);

// Bytes that this process can still allocate before the machine swaps or its container is stopped;
// nothing where the system does not say.
std::optional<int64_t> available_memory();

}  // namespace mlx_anvil
