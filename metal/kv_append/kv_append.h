// Rows of keys and values on their way into a cache: the place, the rotation, the quantization.
#pragma once

#include <metal_stdlib>

#include "metal/kv_append/params.h"
#include "metal/rope/rope.h"

enum { kColumns = 8 };  // per thread

template <typename T>
struct AppendOperands {
  const device T *k, *v;
  const device long *rows, *positions;
  const device float* freqs;
  const device ulong* turns;
};

// The columns of one thread.
struct AppendPlace {
  bool is_value;
  int head;
  int token;
  int first, count;  // columns; a count of 0 if the thread has none
};

METAL_FUNC AppendPlace append_place(constant KvAppendParams& params, uint3 group, uint thread_id) {
  AppendPlace place;
  const int item = int(group.x * 256 + thread_id);
  place.token = item / params.packs;
  place.first = (item - place.token * params.packs) * kColumns;
  place.is_value = int(group.y) >= params.heads;
  place.head = int(group.y) - (place.is_value ? params.heads : 0);
  const int columns = place.is_value ? params.columns[1] : params.columns[0];
  place.count = place.token < params.length ? metal::clamp(columns - place.first, 0, 8) : 0;
  place.token = metal::min(place.token, params.length - 1);
  return place;
}

// The row of the token among all rows of the caches, or -1 if none is written: a negative row, one
// that the cache lacks, or one that a later token writes.
METAL_FUNC long append_row(constant KvAppendParams& params,
                           const device long* rows,
                           thread const AppendPlace& place,
                           long batch) {
  const device long* const own = rows + batch * params.row_step;
  const long row =
      params.row_counts != 0 ? long(ulong(own[0]) + ulong(place.token)) : own[place.token];
  if (row < 0 || row >= long(params.pages) * params.page_size) {
    return -1;
  }
  for (int t = place.token + 1; params.distinct == 0 && t < params.length; ++t) {
    if (own[t] == row) {
      return -1;
    }
  }
  const long page = row / params.page_size, inside = row - page * params.page_size;
  return ((batch * params.pages + page) * params.heads + place.head) * params.page_size + inside;
}

// Loads the columns, rotated if they are a key's, and rounded to the dtype.
template <typename T>
METAL_FUNC void load_columns(thread const AppendOperands<T>& operands,
                             constant KvAppendParams& params,
                             thread const AppendPlace& place,
                             long batch,
                             thread float* x) {
  const constant int64_t* strides = place.is_value ? params.strides[1] : params.strides[0];
  const device T* const row = (place.is_value ? operands.v : operands.k) + batch * strides[0] +
                              place.head * strides[1] + place.token * strides[2];
  const int pairs = place.is_value ? 0 : params.rotation.pairs;
  ulong position = 0;
  if (pairs != 0) {
    const device long* const own = operands.positions + batch * params.position_step;
    position =
        params.position_counts != 0 ? ulong(own[0]) + ulong(place.token) : ulong(own[place.token]);
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    const int column = place.first + i;
    x[i] = i < place.count ? float(row[column * strides[3]]) : 0.0f;
    if (i < place.count && column < 2 * pairs) {
      const bool second = pairs_are_neighbours ? (column & 1) != 0 : column >= pairs;
      const int pair = pairs_are_neighbours ? column >> 1 : column - (second ? pairs : 0);
      const int other = pairs_are_neighbours ? column ^ 1 : pair + (second ? 0 : pairs);
      Frequency frequency = {0, 0.0f};
      if (frequencies_are_given) {
        frequency = frequency_of(operands.freqs[pair], params.rotation);
      } else {
        frequency.turns = operands.turns[pair];
      }
      const ulong turns = frequency.turns * position;
      const SinCos angle = sin_cos_of_turn(uint(turns >> 32));
      const float sin = params.rotation.direction * angle.sin + frequency.defect;
      const float cos = angle.cos + frequency.defect;
      const float y = float(row[other * strides[3]]);
      // The same roundings as in PairsOfThread::rotate().
      const float turned =
          second ? metal::fma(y, sin, x[i] * cos) : metal::fma(x[i], cos, -(y * sin));
      x[i] = float(T(turned));
    }
  }
}

// Quantizes the columns with those of the group's other threads, which are neighbours, as MLX's
// Metal kernel does: affine_quantize in mlx/backend/metal/kernels/quantized.h. All threads of the
// simdgroup take part.
template <typename T>
METAL_FUNC ulong quantized_columns(
    thread const float* x, int threads, int bits, thread float& scale, thread float& bias) {
  float low = x[0], high = 0.0f;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    low = metal::min(low, x[i]);
    high = metal::max(high, x[i]);
  }
  MLX_ANVIL_UNROLL
  for (ushort step = 1; step < 16; step *= 2) {
    const float other_low = metal::simd_shuffle_xor(low, step);
    const float other_high = metal::simd_shuffle_xor(high, step);
    low = step < threads ? metal::min(low, other_low) : low;
    high = step < threads ? metal::max(high, other_high) : high;
  }
  const float most = float((1 << bits) - 1);
  scale = metal::max((high - low) / most, 1e-7f);
  const bool is_low = metal::abs(low) > metal::abs(high);
  scale = is_low ? scale : -scale;
  const float edge = is_low ? low : high;
  const float code = metal::round(edge / scale);
  bias = code == 0.0f ? 0.0f : edge;
  scale = code == 0.0f ? scale : edge / code;
  ulong codes = 0;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    const float own = metal::clamp(metal::round((x[i] - bias) / scale), 0.0f, most);
    codes |= ulong(uint(own)) << (i * bits);
  }
  return codes;
}
