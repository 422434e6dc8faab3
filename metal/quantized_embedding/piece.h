// A thread's share of a row of weights, and the row that an id chooses.
#pragma once

#include "metal/quantized_embedding/params.h"
#include "metal/quantized_matmul/dequant.h"

enum { kPiece = 8 };

// Returns the row of w for an id, in 32 bits: Apple's GPUs add and compare 64 in several
// instructions.
METAL_FUNC uint row_of_id(const device uint* id, constant QuantizedEmbeddingParams& params) {
  const uint low = id[0], rows = params.rows;
  const bool is_signed = params.ids_are_signed != 0;
  uint high = is_signed && (low >> 31) != 0 ? ~0u : 0u;
  if (params.words_per_id == 2) {
    high = id[1];
  }
  if (is_signed && (high >> 31) != 0) {
    const uint from_end = low + rows;  // overflows if it is a row
    return high == ~0u && from_end < rows ? from_end : 0u;
  }
  return high == 0 ? metal::min(low, rows - 1) : rows - 1;
}

template <typename T>
METAL_FUNC void store_piece(device T* to, uint at, const thread float* x) {
  if (rows_are_vectors) {
    enum { kSize = Pack<T>::kSize };
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPiece; i += kSize) {
      // Offsets in vectors fold into the store on Apple's GPUs.
      device uint4* vector = reinterpret_cast<device uint4*>(to) + (at / kSize + i / kSize);
      Pack<T>::store(reinterpret_cast<device T*>(vector), x + i);
    }
  } else {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      to[at + i] = static_cast<T>(x[i]);
    }
  }
}
