// What the kernels share whose threads have columns of a token: packs of rows, and the places of a
// token's pairs.
#pragma once

#include "metal/common/strided_pack.h"
#include "metal/moe/lanes.h"
#include "metal/moe/params.h"

constant bool has_weights [[function_constant(1)]];  // otherwise all are 1
constant bool weights_are_float32 [[function_constant(2)]];
constant bool has_gate [[function_constant(5)]];
constant bool gate_is_float32 [[function_constant(6)]];

enum { kSlots = 4 };  // pairs of a token that a thread has at once

// The row of a pair's place, among all batches. No value of `inverse` reads other memory.
METAL_FUNC long row_of_pair(const device int* inverse,
                            long pair,
                            uint batch,
                            constant MoeRowParams& params) {
  const int place = metal::max(metal::min(inverse[pair], static_cast<int>(params.pairs) - 1), 0);
  return static_cast<long>(batch) * params.pairs + place;
}

METAL_FUNC uint batch_of(uint token, constant MoeRowParams& params) {
  return params.tokens == params.tokens_per_batch ? 0u : token / params.tokens_per_batch;
}

// One number of a token or a pair, of T or float32.
template <typename T>
METAL_FUNC float factor_at(const device uchar* factors, bool is_float32, long i) {
  return is_float32 ? reinterpret_cast<const device float*>(factors)[i]
                    : static_cast<float>(reinterpret_cast<const device T*>(factors)[i]);
}

template <typename T>
METAL_FUNC void store_factor(device uchar* to, bool is_float32, long i, float x) {
  if (is_float32) {
    reinterpret_cast<device float*>(to)[i] = x;
  } else {
    reinterpret_cast<device T*>(to)[i] = static_cast<T>(x);
  }
}

// load_pack and store_pack for a row's columns. If packs are aligned, every pack is whole.
template <typename T>
METAL_FUNC void load_columns(const device T* from, int count, thread float* x) {
  if (packs_are_aligned) {
    Pack<T>::load(from, x);
  } else {
    load_pack<T>(from, 1, count, x);
  }
}

template <typename T>
METAL_FUNC void store_columns(device T* to, int count, const thread float* x) {
  if (packs_are_aligned) {
    Pack<T>::store(to, x);
  } else {
    store_pack<T>(to, count, x);
  }
}
