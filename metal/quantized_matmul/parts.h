// The function constant of kernels whose sums may be split into parts.
#pragma once

#include <metal_stdlib>

// True if out is float32 scratch, [parts, batch, rows, columns], which quantized_sum_parts adds up.
constant bool outputs_are_in_parts [[function_constant(2)]];
