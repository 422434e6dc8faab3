// Arguments of rope's CPU kernels, as plain data (see common/isa.h).
//
//   angle(l, j) = (offset + l) * scale * base^(-j / pairs), or (offset + l) * scale / freqs[j]
//   (a, b) -> (a cos - b sin, a sin + b cos)
//
// for pair j of the row at position l. The pair is elements j and j + pairs, or 2 j and 2 j + 1 in
// the traditional order. Elements from 2 * pairs on are copied. The gradient is the rotation by
// -angle.
//
// Angles are counted in turns, as one integer product modulo 2^64: position times (turns per
// position times 2^64). Whole turns overflow, so the reduction is exact for every position.
#pragma once

#include <cstdint>

namespace mlx_anvil {

// Computes cosines and sines of adjacent positions: [count][2][padded pairs]. Frequencies and
// results use the element order of a block: for non-traditional bfloat16 pairs, the even and then
// the odd elements of each block (load_block() in simd.h).
struct RopeAngles {
  const uint64_t* turns;  // [padded]: turns per position times 2^64, modulo 2^64
  const float* defects;   // [padded]: NaN for invalid frequencies, else 0
  int64_t padded;         // pairs, rounded up to whole blocks
  uint64_t position;      // the first position, modulo 2^64
  int64_t count;
  bool inverse;
};

// Adjacent positions of a few heads. All heads of a position are rotated before the next position,
// so that their part of the table stays in L1.
struct RopeRows {
  const void* in;
  void* out;      // dense rows; may alias the input
  int64_t count;  // number of positions
  int64_t heads;
  int64_t head_step, row_step, column_step;  // of the input, in elements
  int64_t out_head_step;
  int64_t head_dim, pairs;
  bool traditional;
  bool stream;          // use streaming stores if the alignment permits
  const float* angles;  // the table of RopeAngles
  int64_t padded;
};

struct RopeKernels {
  int32_t block;  // elements
  void (*angles)(const RopeAngles& angles, float* to);
  void (*rotate_float32)(const RopeRows& rows);
  void (*rotate_float16)(const RopeRows& rows);
  void (*rotate_bfloat16)(const RopeRows& rows);
  void (*finish_streaming)();  // call it after a thread's last streamed rows
};

}  // namespace mlx_anvil
