// The tiles of the attention kernels: the one list that the instantiations (MSL) and the dispatch
// (C++) are made from. Smaller before larger: a call runs in the first tile that holds its head
// dims, padded inside the kernel.
//
// What limits a tile is the registers of a thread; Apple's GPUs give it 128 of 32 bits without
// spilling. The 32 lanes of a SIMD group hold 8 rows of q (d / 4 registers a thread, half of that
// for 16-bit types), of the accumulated output (dv / 4) and of the scores (keys / 4), times
// row_fragments. 16 rows use each fragment of k and v from threadgroup memory twice, which is why
// they are taken wherever these stay below 112 or so, and fewer keys where that makes them fit.
// Wide float32 heads leave no room for q: it is read again for each block of keys (keeps_q false).
//
// Threadgroup memory holds a block of keys and one of values: 5 to 17 KB for 16-bit types.
#pragma once

// X(dtype, type, d, dv, row_fragments, keys, keeps_q, simdgroups, staging)
#define MLX_ANVIL_ATTENTION_FORWARD_TILES_16(X, dtype, type) \
  X(dtype, type, 32, 32, 2, 32, true, 4, kStagesTogether)    \
  X(dtype, type, 64, 64, 2, 32, true, 4, kStagesTogether)    \
  X(dtype, type, 72, 72, 2, 32, true, 4, kStagesTogether)    \
  X(dtype, type, 80, 80, 2, 32, true, 4, kStagesTogether)    \
  X(dtype, type, 96, 96, 2, 32, true, 4, kStagesTogether)    \
  X(dtype, type, 128, 128, 2, 16, true, 4, kStagesTogether)  \
  X(dtype, type, 192, 128, 1, 16, true, 4, kStagesTogether)  \
  X(dtype, type, 192, 192, 1, 16, true, 4, kStagesTogether)  \
  X(dtype, type, 256, 256, 1, 16, true, 4, kStagesEach)

#define MLX_ANVIL_ATTENTION_FORWARD_TILES(X)                 \
  X(float32, float, 32, 32, 2, 32, true, 4, kStagesTogether) \
  X(float32, float, 64, 64, 2, 32, true, 4, kStagesTogether) \
  X(float32, float, 72, 72, 2, 32, true, 4, kStagesTogether) \
  X(float32, float, 80, 80, 2, 16, true, 4, kStagesTogether) \
  X(float32, float, 96, 96, 2, 16, true, 4, kStagesTogether) \
  X(float32, float, 128, 128, 1, 8, true, 4, kStagesEach)    \
  X(float32, float, 192, 128, 2, 16, false, 4, kStagesEach)  \
  X(float32, float, 192, 192, 2, 16, false, 4, kStagesEach)  \
  X(float32, float, 256, 256, 1, 8, false, 4, kStagesEach)   \
  MLX_ANVIL_ATTENTION_FORWARD_TILES_16(X, float16, half)     \
  MLX_ANVIL_ATTENTION_FORWARD_TILES_16(X, bfloat16, bfloat)

// Of a decode. A lane holds at least 4 columns (d / 32) of each row, in q and in out: 64 registers
// in the widest.
// X(dtype, type, d, rows)
#define MLX_ANVIL_ATTENTION_DECODE_TILES(X, dtype, type) \
  X(dtype, type, 64, 1)                                  \
  X(dtype, type, 64, 4)                                  \
  X(dtype, type, 64, 8)                                  \
  X(dtype, type, 128, 1)                                 \
  X(dtype, type, 128, 4)                                 \
  X(dtype, type, 128, 8)                                 \
  X(dtype, type, 256, 1)                                 \
  X(dtype, type, 256, 4)                                 \
  X(dtype, type, 512, 1)                                 \
  X(dtype, type, 512, 2)

// Of the backward: rows that a threadgroup keeps (of queries for dq, of keys for dkv), and rows of
// the other side that pass by, tile by tile. A row fragment takes of every thread d / 4 registers
// for each of the two kept operands (half of that for 16-bit types), d / 4 for each gradient that
// is added up (one in dq, two in dkv) and tile rows / 2 for the scores and their gradient. Where
// that does not fit, the kept operands are read again for each tile (kKeptNowhere). The two
// gradients of wide heads do not fit together: dk and dv are passes of their own, and S is formed
// once more.
//
// X(pass, dtype, type, d, dv, row_fragments, tile rows, keeping of each operand, staging)
#define MLX_ANVIL_ATTENTION_BACKWARD_TILES_16(X, dtype, type)                          \
  X(dq, dtype, type, 32, 32, 2, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach)   \
  X(dq, dtype, type, 64, 64, 2, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach)   \
  X(dq, dtype, type, 72, 72, 2, 16, kKeptInRegisters, kKeptInRegisters, kStagesEach)   \
  X(dq, dtype, type, 80, 80, 2, 16, kKeptInRegisters, kKeptInRegisters, kStagesEach)   \
  X(dq, dtype, type, 96, 96, 1, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach)   \
  X(dq, dtype, type, 128, 128, 1, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach) \
  X(dq, dtype, type, 192, 128, 1, 16, kKeptInRegisters, kKeptInRegisters, kStagesEach) \
  X(dq, dtype, type, 192, 192, 1, 16, kKeptInRegisters, kKeptInRegisters, kStagesEach) \
  X(dq, dtype, type, 256, 256, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dkv, dtype, type, 32, 32, 2, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach)  \
  X(dkv, dtype, type, 64, 64, 2, 16, kKeptInRegisters, kKeptInRegisters, kStagesEach)  \
  X(dkv, dtype, type, 72, 72, 1, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach)  \
  X(dkv, dtype, type, 80, 80, 1, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach)  \
  X(dkv, dtype, type, 96, 96, 1, 32, kKeptInRegisters, kKeptInRegisters, kStagesEach)  \
  X(dkv, dtype, type, 128, 128, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dkv, dtype, type, 192, 128, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dk, dtype, type, 192, 192, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dv, dtype, type, 192, 192, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dk, dtype, type, 256, 256, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dv, dtype, type, 256, 256, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)

#define MLX_ANVIL_ATTENTION_BACKWARD_TILES(X)                                           \
  X(dq, float32, float, 32, 32, 1, 16, kKeptInRegisters, kKeptInRegisters, kStagesEach) \
  X(dq, float32, float, 64, 64, 1, 32, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dq, float32, float, 72, 72, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dq, float32, float, 80, 80, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dq, float32, float, 96, 96, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)         \
  X(dq, float32, float, 128, 128, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)       \
  X(dq, float32, float, 192, 128, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)       \
  X(dq, float32, float, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dq, float32, float, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dkv, float32, float, 32, 32, 2, 16, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dkv, float32, float, 64, 64, 1, 32, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dkv, float32, float, 72, 72, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dkv, float32, float, 80, 80, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dkv, float32, float, 96, 96, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dkv, float32, float, 128, 128, 1, 16, kKeptNowhere, kKeptNowhere, kStagesEach)      \
  X(dk, float32, float, 192, 128, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dv, float32, float, 192, 128, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dk, float32, float, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dv, float32, float, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dk, float32, float, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  X(dv, float32, float, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, kStagesEach)        \
  MLX_ANVIL_ATTENTION_BACKWARD_TILES_16(X, float16, half)                               \
  MLX_ANVIL_ATTENTION_BACKWARD_TILES_16(X, bfloat16, bfloat)

// The same for GPUs with units for products of 16 x 8 and 16 x 16 numbers, which 8 rows would leave
// half empty, 255 registers a thread and 48 KB of threadgroup memory: see has_matrix_units() of
// csrc/common/launch.h. Heads that fit none run in the tiles above. More of the rows that pass, in
// a tile, was faster wherever they fitted.
#define MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES_16(X, dtype, type) \
  X(dtype, type, 32, 32, 4, 96, true, 4, kStagesAhead)              \
  X(dtype, type, 64, 64, 4, 48, true, 4, kStagesAhead)              \
  X(dtype, type, 96, 96, 2, 32, true, 4, kStagesAhead)              \
  X(dtype, type, 128, 128, 2, 32, true, 4, kStagesAhead)

#define MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES(X)             \
  MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES_16(X, float16, half) \
  MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES_16(X, bfloat16, bfloat)

#define MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES_16(X, dtype, type)                    \
  X(dq, dtype, type, 32, 32, 4, 64, kKeptInRegisters, kKeptInRegisters, kStagesAhead)   \
  X(dq, dtype, type, 64, 64, 4, 32, kKeptInRegisters, kKeptInRegisters, kStagesAhead)   \
  X(dq, dtype, type, 96, 96, 2, 32, kKeptInRegisters, kKeptInRegisters, kStagesAhead)   \
  X(dq, dtype, type, 128, 128, 2, 32, kKeptInRegisters, kKeptInRegisters, kStagesAhead) \
  X(dkv, dtype, type, 32, 32, 4, 32, kKeptInRegisters, kKeptInRegisters, kStagesAhead)  \
  X(dkv, dtype, type, 64, 64, 2, 48, kKeptInRegisters, kKeptInRegisters, kStagesAhead)  \
  X(dkv, dtype, type, 96, 96, 2, 32, kKeptInRegisters, kKeptInMemory, kStagesAhead)     \
  X(dkv, dtype, type, 128, 128, 2, 16, kKeptInRegisters, kKeptInMemory, kStagesAhead)

#define MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES(X)             \
  MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES_16(X, float16, half) \
  MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES_16(X, bfloat16, bfloat)

// Of a decode. A block of keys and one of values take 32 registers of a thread each, q d / 8, the
// output d / 4.
// X(dtype, type, d, keys, simdgroups)
#define MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(X, dtype, type) \
  X(dtype, type, 64, 32, 4)                                     \
  X(dtype, type, 128, 16, 4)
