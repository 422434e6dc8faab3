// What the CPU kernels of rope are given, in plain numbers and pointers (see common/isa.h for why).
//
//   angle(l, j) = (offset + l) * scale * base^(-j / pairs), or (offset + l) * scale / freqs[j]
//   (a, b) -> (a cos - b sin, a sin + b cos)
//
// for pair j of the elements of position l: elements j and j + pairs, or 2 j and 2 j + 1 in the
// traditional order. Elements from 2 * pairs on stay as they are. The gradient is the rotation by
// the negative angle.
//
// Angles are counted in turns: all that a position and a frequency have in common is one integer
// product, modulo 2^64, of the position and the turns per position times 2^64. Whole turns are what
// overflows, so that no position is too large to be reduced exactly.
#pragma once

#include <cstdint>

namespace mlx_anvil {

// Cosines and sines of a few neighbouring positions: [count][2][padded pairs]. Frequencies, and so
// these, are in the order of the elements that a block has them for: pairs of bfloat16 that are
// apart come as the even and then the odd ones of each block (load_block of simd.h).
struct RopeAngles {
  const uint64_t* turns;  // [padded]: turns per position times 2^64, modulo 2^64
  const float* defects;   // [padded]: NaN for frequencies that are none, else 0
  int64_t padded;         // pairs, rounded up to whole blocks
  uint64_t position;      // the first, modulo 2^64
  int64_t count;
  bool inverse;
};

// Neighbouring positions of a few heads, whose rows of a position follow each other, so that what
// they need of the table is in the nearest cache.
struct RopeRows {
  const void* in;
  void* out;      // dense rows; may be where the input is
  int64_t count;  // of positions
  int64_t heads;
  int64_t head_step, row_step, column_step;  // of the input, in elements
  int64_t out_head_step;
  int64_t head_dim, pairs;
  bool traditional;
  bool stream;          // write past the cache, where alignment allows it
  const float* angles;  // as above
  int64_t padded;
};

struct RopeKernels {
  int32_t block;  // elements
  void (*angles)(const RopeAngles& angles, float* to);
  void (*rotate_float32)(const RopeRows& rows);
  void (*rotate_float16)(const RopeRows& rows);
  void (*rotate_bfloat16)(const RopeRows& rows);
  void (*finish_streaming)();  // after the last rows that a thread has written past the cache
};

}  // namespace mlx_anvil
