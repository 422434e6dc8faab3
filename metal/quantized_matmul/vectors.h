// The function constant of kernels that multiply tiles (matmul.metal, tiles.metal).
#pragma once

#include <metal_stdlib>

// True if rows of x and of out consist of whole, aligned 16-byte vectors.
constant bool x_and_out_are_vectors [[function_constant(3)]];
