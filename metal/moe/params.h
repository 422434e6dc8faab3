// Parameters of the kernels of moe_permute and moe_combine, shared by the host (C++) and the
// kernels (MSL).
//
// Bindings. Sort:     ids | offsets order inverse sorted | params
//           permute:  ids x | offsets order inverse sorted rows | params
//           count:    ids | counts | params
//           place:    ids counts | offsets order inverse sorted | params
//           spread:   x inverse | rows | params
//           combine:  y inverse weights residual shared gate | out | params
//           backward: d_out y inverse weights shared gate | d_y d_weights d_shared d_gate | params
// All arrays are dense. The host binds some other array in place of an absent or empty one.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// For the kernels that sort. Each batch is sorted on its own.
struct MoeSortParams {
  uint32_t batches;
  uint32_t pairs;   // of a batch
  uint32_t chosen;  // pairs of a token
  uint32_t experts;
  uint32_t ids_are_signed;
  uint32_t expert_bits;  // of the largest expert
  uint32_t block;        // pairs that a threadgroup counts, a multiple of 32
  uint32_t blocks;       // of a batch
  uint32_t columns;      // of x, in words of the kernel
};

// For the kernels in which each thread computes some columns of a token.
struct MoeRowParams {
  uint32_t tokens;            // of all batches
  uint32_t tokens_per_batch;  // at least 1
  uint32_t chosen;
  uint32_t pairs;  // of a batch
  uint32_t columns;
};

static_assert(sizeof(MoeSortParams) == 4 * 9, "same layout in C++ and MSL");
static_assert(sizeof(MoeRowParams) == 4 * 5, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
