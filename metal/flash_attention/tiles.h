// Tile sizes of the attention kernels. Both the instantiations (MSL) and the dispatch (C++) are
// generated from these lists. Tiles are sorted by head dim: a call runs in the first tile that
// holds its head dims, and the kernel pads to it.
//
// Registers limit a tile: Apple's GPUs give a thread 128 registers of 32 bits before it spills.
// Over the 32 lanes of a simdgroup, 8 rows take d / 4 registers per thread for q (half that for
// 16-bit types), dv / 4 for the accumulated output and keys / 4 for the scores. About 40 more hold
// addresses, and what the compiler keeps. So a simdgroup has 8 rows, and eight of them share each
// tile where registers allow; with 16 rows, heads of 64 spill already. Wide heads leave no room for
// q: they reload it for each block of keys (kKeptNowhere). `mslc agx` counts (docs/apple.md).
//
// Threadgroup memory holds a block of keys and one of values: 5 to 25 KB.
#pragma once

// X(dtype, type, d, dv, row_fragments, keys, keeping, simdgroups, staging)
#define MLX_ANVIL_ATTENTION_FORWARD_TILES_16(X, dtype, type)            \
  X(dtype, type, 32, 32, 1, 32, kKeptInRegisters, 8, kStagesTogether)   \
  X(dtype, type, 64, 64, 1, 32, kKeptInRegisters, 8, kStagesTogether)   \
  X(dtype, type, 72, 72, 1, 32, kKeptInRegisters, 8, kStagesTogether)   \
  X(dtype, type, 80, 80, 1, 32, kKeptInRegisters, 8, kStagesTogether)   \
  X(dtype, type, 96, 96, 1, 32, kKeptInRegisters, 8, kStagesTogether)   \
  X(dtype, type, 128, 128, 1, 16, kKeptInRegisters, 8, kStagesTogether) \
  X(dtype, type, 192, 128, 1, 16, kKeptNowhere, 4, kStagesTogether)     \
  X(dtype, type, 192, 192, 1, 16, kKeptNowhere, 4, kStagesTogether)     \
  X(dtype, type, 256, 256, 1, 16, kKeptNowhere, 4, kStagesEach)         \
  X(dtype, type, 512, 256, 1, 16, kKeptNowhere, 4, kStagesEach)         \
  X(dtype, type, 576, 256, 1, 16, kKeptNowhere, 4, kStagesEach)

#define MLX_ANVIL_ATTENTION_FORWARD_TILES(X)                             \
  X(float32, float, 32, 32, 1, 32, kKeptInRegisters, 8, kStagesTogether) \
  X(float32, float, 64, 64, 1, 32, kKeptInRegisters, 8, kStagesTogether) \
  X(float32, float, 72, 72, 1, 32, kKeptInRegisters, 8, kStagesTogether) \
  X(float32, float, 80, 80, 1, 16, kKeptInRegisters, 8, kStagesTogether) \
  X(float32, float, 96, 96, 1, 16, kKeptInRegisters, 8, kStagesTogether) \
  X(float32, float, 128, 128, 1, 8, kKeptInRegisters, 4, kStagesEach)    \
  X(float32, float, 192, 128, 1, 16, kKeptNowhere, 4, kStagesEach)       \
  X(float32, float, 192, 192, 1, 16, kKeptNowhere, 4, kStagesEach)       \
  X(float32, float, 256, 256, 1, 8, kKeptNowhere, 4, kStagesEach)        \
  X(float32, float, 512, 256, 1, 8, kKeptNowhere, 4, kStagesEach)        \
  X(float32, float, 576, 256, 1, 8, kKeptNowhere, 4, kStagesEach)        \
  MLX_ANVIL_ATTENTION_FORWARD_TILES_16(X, float16, half)                 \
  MLX_ANVIL_ATTENTION_FORWARD_TILES_16(X, bfloat16, bfloat)

// Decode. A threadgroup has `rows`, in row_groups equal shares. As many of its simdgroups read the
// same keys, each for its own rows. A simdgroup takes `steps` times as many keys at once as it
// needs to load whole vectors, and has as many rows times steps as lanes share a key, at most.
// Tiles of a head dim are sorted by rows; each has fewer simdgroups than fill a core's registers.
// X(dtype, type, d, rows, steps, row_groups, simdgroups)
#define MLX_ANVIL_ATTENTION_DECODE_TILES_16(X, dtype, type) \
  X(dtype, type, 64, 1, 2, 1, 24)                           \
  X(dtype, type, 64, 2, 4, 1, 16)                           \
  X(dtype, type, 64, 4, 2, 1, 16)                           \
  X(dtype, type, 64, 8, 2, 2, 16)                           \
  X(dtype, type, 128, 1, 2, 1, 24)                          \
  X(dtype, type, 128, 2, 4, 1, 16)                          \
  X(dtype, type, 128, 4, 2, 1, 16)                          \
  X(dtype, type, 128, 8, 2, 2, 16)                          \
  X(dtype, type, 256, 1, 2, 1, 24)                          \
  X(dtype, type, 256, 2, 4, 1, 16)                          \
  X(dtype, type, 256, 4, 4, 2, 16)                          \
  X(dtype, type, 512, 1, 2, 1, 8)                           \
  X(dtype, type, 512, 2, 1, 1, 8)

#define MLX_ANVIL_ATTENTION_DECODE_TILES(X)             \
  X(float32, float, 64, 1, 4, 1, 16)                    \
  X(float32, float, 64, 2, 4, 1, 16)                    \
  X(float32, float, 64, 4, 4, 1, 16)                    \
  X(float32, float, 64, 8, 4, 2, 16)                    \
  X(float32, float, 128, 1, 4, 1, 16)                   \
  X(float32, float, 128, 2, 4, 1, 16)                   \
  X(float32, float, 128, 4, 2, 1, 16)                   \
  X(float32, float, 128, 8, 2, 2, 16)                   \
  X(float32, float, 256, 1, 2, 1, 16)                   \
  X(float32, float, 256, 2, 2, 1, 16)                   \
  X(float32, float, 256, 4, 2, 2, 16)                   \
  X(float32, float, 512, 1, 1, 1, 8)                    \
  X(float32, float, 512, 2, 1, 1, 8)                    \
  MLX_ANVIL_ATTENTION_DECODE_TILES_16(X, float16, half) \
  MLX_ANVIL_ATTENTION_DECODE_TILES_16(X, bfloat16, bfloat)

// Decode over quantized keys and values. As above; a lane has `columns` of a key, which share a
// scale. Fewer sizes: what a call lacks costs little, since it reads a fraction of the bytes.
// X(dtype, type, d, rows, steps, columns, row_groups, simdgroups)
#define MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_TILES_OF(X, dtype, type) \
  X(dtype, type, 64, 1, 2, 16, 1, 16)                                 \
  X(dtype, type, 64, 4, 2, 8, 1, 12)                                  \
  X(dtype, type, 64, 8, 2, 8, 2, 12)                                  \
  X(dtype, type, 128, 1, 2, 16, 1, 16)                                \
  X(dtype, type, 128, 4, 2, 8, 1, 12)                                 \
  X(dtype, type, 128, 8, 2, 8, 2, 12)                                 \
  X(dtype, type, 256, 1, 2, 16, 1, 16)                                \
  X(dtype, type, 256, 4, 2, 16, 2, 12)                                \
  X(dtype, type, 512, 2, 2, 16, 1, 8)

#define MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_TILES(X)              \
  MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_TILES_OF(X, float32, float) \
  MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_TILES_OF(X, float16, half)  \
  MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_TILES_OF(X, bfloat16, bfloat)

// Forward over quantized keys and values, with the same meaning as the tiles of the forward. They
// are dequantised between the loads and the stores of their staging.
#define MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_TILES_16(X, dtype, type) \
  X(dtype, type, 64, 64, 1, 32, kKeptInRegisters, 8)                   \
  X(dtype, type, 128, 128, 1, 16, kKeptInRegisters, 8)                 \
  X(dtype, type, 256, 256, 1, 8, kKeptNowhere, 4)

#define MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_TILES(X)             \
  X(float32, float, 64, 64, 1, 32, kKeptInRegisters, 8)            \
  X(float32, float, 128, 128, 1, 8, kKeptInRegisters, 4)           \
  X(float32, float, 256, 256, 1, 8, kKeptNowhere, 4)               \
  MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_TILES_16(X, float16, half) \
  MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_TILES_16(X, bfloat16, bfloat)

// Backward. A simdgroup keeps 8 * row_fragments rows (queries in dq, keys in dkv). Tiles of the
// other side's rows pass through threadgroup memory. Per row fragment, a thread needs d / 4
// registers for each of the two kept operands (half that for 16-bit types), d / 4 for each
// accumulated gradient (one in dq, two in dkv), and tile rows / 2 for the scores and their
// gradient. If that does not fit, the kept operands stay in threadgroup memory, or are reloaded for
// each tile (kKeptNowhere). In dq, 8 SIMD groups fit twice where a thread has 208 halves at most.
//
// X(pass, dtype, type, d, dv, row_fragments, tile rows, keeping of each operand, simdgroups,
//   staging)
#define MLX_ANVIL_ATTENTION_BACKWARD_TILES_16(X, dtype, type)                           \
  X(dq, dtype, type, 32, 32, 1, 32, kKeptInRegisters, kKeptInRegisters, 8, kStagesEach) \
  X(dq, dtype, type, 64, 64, 1, 32, kKeptInRegisters, kKeptInRegisters, 8, kStagesEach) \
  X(dq, dtype, type, 72, 72, 1, 32, kKeptInRegisters, kKeptInRegisters, 8, kStagesEach) \
  X(dq, dtype, type, 80, 80, 1, 32, kKeptInRegisters, kKeptInRegisters, 8, kStagesEach) \
  X(dq, dtype, type, 96, 96, 1, 32, kKeptInRegisters, kKeptInRegisters, 8, kStagesEach) \
  X(dq, dtype, type, 128, 128, 1, 16, kKeptInMemory, kKeptInRegisters, 8, kStagesEach)  \
  X(dq, dtype, type, 192, 128, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)       \
  X(dq, dtype, type, 192, 192, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)       \
  X(dq, dtype, type, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)

#define MLX_ANVIL_ATTENTION_BACKWARD_TILES(X)                                              \
  X(dq, float32, float, 32, 32, 1, 16, kKeptInRegisters, kKeptInRegisters, 4, kStagesEach) \
  X(dq, float32, float, 64, 64, 1, 32, kKeptNowhere, kKeptNowhere, 4, kStagesEach)         \
  X(dq, float32, float, 72, 72, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)         \
  X(dq, float32, float, 80, 80, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)         \
  X(dq, float32, float, 96, 96, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)         \
  X(dq, float32, float, 128, 128, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)       \
  X(dq, float32, float, 192, 128, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)       \
  X(dq, float32, float, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)        \
  X(dq, float32, float, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)        \
  MLX_ANVIL_ATTENTION_BACKWARD_TILES_16(X, float16, half)                                  \
  MLX_ANVIL_ATTENTION_BACKWARD_TILES_16(X, bfloat16, bfloat)

// dK and dV by computing P again, on GPUs with matrix units, for what these do not take. Where the
// two gradients do not fit together, dk and dv are separate passes.
#define MLX_ANVIL_ATTENTION_BACKWARD_KEYS_TILES_16(X, dtype, type)               \
  X(dk, dtype, type, 192, 128, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach) \
  X(dv, dtype, type, 192, 128, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach) \
  X(dk, dtype, type, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach) \
  X(dv, dtype, type, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach) \
  X(dk, dtype, type, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach) \
  X(dv, dtype, type, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)

#define MLX_ANVIL_ATTENTION_BACKWARD_KEYS_TILES(X)                                   \
  X(dkv, float32, float, 32, 32, 2, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dkv, float32, float, 64, 64, 1, 32, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dkv, float32, float, 72, 72, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dkv, float32, float, 80, 80, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dkv, float32, float, 96, 96, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dk, float32, float, 128, 128, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dv, float32, float, 128, 128, 1, 16, kKeptNowhere, kKeptNowhere, 4, kStagesEach) \
  X(dk, float32, float, 192, 128, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dv, float32, float, 192, 128, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dk, float32, float, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dv, float32, float, 192, 192, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dk, float32, float, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  X(dv, float32, float, 256, 256, 1, 8, kKeptNowhere, kKeptNowhere, 4, kStagesEach)  \
  MLX_ANVIL_ATTENTION_BACKWARD_KEYS_TILES_16(X, float16, half)                       \
  MLX_ANVIL_ATTENTION_BACKWARD_KEYS_TILES_16(X, bfloat16, bfloat)

// dK and dV from stored weights. A SIMD group has 32 keys and d / column_groups columns; a
// threadgroup has key_groups times as many keys. Of the operand's rows, 32 are in threadgroup
// memory. X(dtype, type, d, key_groups, column_groups)
#define MLX_ANVIL_ATTENTION_SUMS_TILES_OF(X, dtype, type) \
  X(dtype, type, 32, 4, 1)                                \
  X(dtype, type, 64, 2, 2)                                \
  X(dtype, type, 80, 2, 2)                                \
  X(dtype, type, 96, 2, 3)                                \
  X(dtype, type, 128, 2, 4)                               \
  X(dtype, type, 192, 1, 6)                               \
  X(dtype, type, 256, 1, 8)

#define MLX_ANVIL_ATTENTION_SUMS_TILES(X)              \
  MLX_ANVIL_ATTENTION_SUMS_TILES_OF(X, float32, float) \
  MLX_ANVIL_ATTENTION_SUMS_TILES_OF(X, float16, half)  \
  MLX_ANVIL_ATTENTION_SUMS_TILES_OF(X, bfloat16, bfloat)

// Tiles for GPUs with matrix units (see csrc/common/device_traits.h). A product has
// 16 rows there, so 8 rows would leave half of a unit idle. A thread has 255 registers, and a
// threadgroup 48 KB of memory. More passing rows per tile measured faster wherever they fit. Head
// dims that fit no tile here run in the tiles above.
#define MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES_16(X, dtype, type) \
  X(dtype, type, 32, 32, 4, 96, kKeptInRegisters, 4, kStagesAhead)  \
  X(dtype, type, 64, 64, 4, 64, kKeptInRegisters, 4, kStagesAhead)  \
  X(dtype, type, 96, 96, 2, 32, kKeptInRegisters, 4, kStagesAhead)  \
  X(dtype, type, 128, 128, 2, 32, kKeptInRegisters, 4, kStagesAhead)

#define MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES(X)             \
  MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES_16(X, float16, half) \
  MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES_16(X, bfloat16, bfloat)

// Over quantized keys and values: without a second buffer, since nothing is copied as it is.
#define MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_MATRIX_TILES(X) \
  X(float16, half, 64, 64, 4, 64, kKeptInRegisters, 4)        \
  X(float16, half, 128, 128, 2, 32, kKeptInRegisters, 4)      \
  X(bfloat16, bfloat, 64, 64, 4, 64, kKeptInRegisters, 4)     \
  X(bfloat16, bfloat, 128, 128, 2, 32, kKeptInRegisters, 4)

// Larger ones of the same head dims, for multiprocessors that hold two such blocks. Their tiles, 68
// KB, are in threadgroup memory that the launch sets. `long`: more keys per tile. `tall`: more rows
// too, so that each tile is read for twice as many; its queries are in memory as well.
#define MLX_ANVIL_ATTENTION_FORWARD_LONG_TILES(X)                      \
  X(float16, half, 128, 128, 2, 64, kKeptInRegisters, 4, kStagesAhead) \
  X(bfloat16, bfloat, 128, 128, 2, 64, kKeptInRegisters, 4, kStagesAhead)
#define MLX_ANVIL_ATTENTION_FORWARD_TALL_TILES(X)                   \
  X(float16, half, 128, 128, 4, 32, kKeptInMemory, 4, kStagesAhead) \
  X(bfloat16, bfloat, 128, 128, 4, 32, kKeptInMemory, 4, kStagesAhead)

// For matrix units that multiply for four SIMD groups at once. Threadgroup memory, which the launch
// sets, holds two tiles of keys and two of values: 32 and 96 KB.
// X(dtype, type, d, dv, keys, simdgroups, threadgroups that registers are left for)
#define MLX_ANVIL_ATTENTION_FORWARD_GROUP_TILES(X) \
  X(float16, half, 64, 64, 64, 8, 2)               \
  X(float16, half, 128, 128, 96, 8, 1)             \
  X(bfloat16, bfloat, 64, 64, 64, 8, 2)            \
  X(bfloat16, bfloat, 128, 128, 96, 8, 1)

// Over quantized keys and values: 32 and 64 KB.
// X(dtype, type, d, dv, keys, simdgroups)
#define MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_GROUP_TILES(X) \
  X(float16, half, 64, 64, 64, 8)                            \
  X(float16, half, 128, 128, 64, 8)                          \
  X(bfloat16, bfloat, 64, 64, 64, 8)                         \
  X(bfloat16, bfloat, 128, 128, 64, 8)

#define MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES_16(X, dtype, type)                       \
  X(dq, dtype, type, 32, 32, 4, 64, kKeptInRegisters, kKeptInRegisters, 4, kStagesAhead)   \
  X(dq, dtype, type, 64, 64, 4, 32, kKeptInRegisters, kKeptInRegisters, 4, kStagesAhead)   \
  X(dq, dtype, type, 96, 96, 2, 32, kKeptInRegisters, kKeptInRegisters, 4, kStagesAhead)   \
  X(dq, dtype, type, 128, 128, 2, 32, kKeptInRegisters, kKeptInRegisters, 4, kStagesAhead) \
  X(dkv, dtype, type, 32, 32, 4, 32, kKeptInRegisters, kKeptInRegisters, 4, kStagesAhead)  \
  X(dkv, dtype, type, 64, 64, 2, 64, kKeptInRegisters, kKeptInRegisters, 4, kStagesAhead)  \
  X(dkv, dtype, type, 96, 96, 2, 32, kKeptInRegisters, kKeptInMemory, 4, kStagesAhead)     \
  X(dkv, dtype, type, 128, 128, 2, 16, kKeptInRegisters, kKeptInMemory, 4, kStagesAhead)

#define MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES(X)             \
  MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES_16(X, float16, half) \
  MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES_16(X, bfloat16, bfloat)

// As the long tiles of the forward pass, with 51 KB.
#define MLX_ANVIL_ATTENTION_BACKWARD_LONG_TILES(X)                                         \
  X(dkv, float16, half, 128, 128, 2, 32, kKeptInRegisters, kKeptInMemory, 4, kStagesAhead) \
  X(dkv, bfloat16, bfloat, 128, 128, 2, 32, kKeptInRegisters, kKeptInMemory, 4, kStagesAhead)

// For matrix units that multiply for four SIMD groups at once. Threadgroup memory, which the launch
// sets, holds four tiles of each passing operand, and for dkv also the block's keys and values: 193
// and 130 KB. dq keeps queries and cotangents in registers: 128 and 96 KB.
// X(dtype, type, d, dv, passing rows per tile, simdgroups)
#define MLX_ANVIL_ATTENTION_BACKWARD_GROUP_TILES(X) \
  X(float16, half, 64, 64, 96, 8)                   \
  X(float16, half, 128, 128, 64, 8)                 \
  X(bfloat16, bfloat, 64, 64, 96, 8)                \
  X(bfloat16, bfloat, 128, 128, 64, 8)

// Decode with matrix units. Per thread, a block of keys and one of values take 32 registers each, q
// takes d / 8 and the output d / 4.
// X(dtype, type, d, keys, simdgroups)
#define MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(X, dtype, type) \
  X(dtype, type, 64, 32, 4)                                     \
  X(dtype, type, 128, 16, 4)

// The same with quantized keys and values. Codes take fewer registers, so a block has more of them.
// X(pass, dtype, type, d, keys, simdgroups)
#define MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_MATRIX_TILES(X) \
  X(quantized_decode_matrix, float16, half, 64, 32, 8)       \
  X(quantized_decode_matrix, float16, half, 128, 32, 8)      \
  X(quantized_decode_matrix, bfloat16, bfloat, 64, 32, 8)    \
  X(quantized_decode_matrix, bfloat16, bfloat, 128, 32, 8)

// If keys or values have 8 bits. These take more instructions and registers in bfloat16.
#define MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_WIDE_TILES(X) \
  X(quantized_decode_matrix_wide, bfloat16, bfloat, 128, 16, 8)
