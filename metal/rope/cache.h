// Rotation of queries and keys that also writes keys and values into caches (rope_and_cache.metal).
#pragma once

#include "metal/rope/rope.h"

template <typename T>
struct CacheOperands {
  const device T *q, *k, *v;
  const device T* caches[2];  // before: read only if copied
  device T* q_out;
  device T* caches_out[2];
  RopeOperands<T> angles;  // offset and frequencies
};

// One head's row of queries, keys or values, and where it goes.
template <typename T>
struct CacheHead {
  const device T* in;
  device T* out;
  long stride;  // of columns
  bool rotates;
  bool exists;  // false if the cache has no such row
};

// Heads are counted over queries, keys and values.
template <typename T>
METAL_FUNC CacheHead<T> cache_head_at(const thread CacheOperands<T>& operands,
                                      constant RopeCacheParams& params,
                                      long batch,
                                      int head,
                                      int position,
                                      long row) {
  constant RopeParams& rope = params.rope;
  const int queries = rope.heads[0], keys = rope.heads[1];
  CacheHead<T> place;
  place.rotates = head < queries + keys;
  if (head < queries) {
    const constant int64_t* strides = rope.strides[0];
    place.in = operands.q + params.first[0] + batch * strides[0] + head * strides[1] +
               position * strides[2];
    place.out =
        operands.q_out + ((batch * queries + head) * rope.length + position) * rope.head_dim;
    place.stride = packs_are_aligned ? 1 : strides[3];
    place.exists = true;
    return place;
  }
  const long own = head - queries - (place.rotates ? 0 : keys);
  const constant int64_t* strides = place.rotates ? rope.strides[1] : params.value_strides;
  place.in = (place.rotates ? operands.k + params.first[1] : operands.v + params.first[2]) +
             batch * strides[0] + own * strides[1] + position * strides[2];
  place.out = (place.rotates ? operands.caches_out[0] : operands.caches_out[1]) +
              ((batch * keys + own) * params.capacity + row) * rope.head_dim;
  place.stride = packs_are_aligned ? 1 : strides[3];
  place.exists = row >= 0 && row < params.capacity;
  return place;
}

// Copies the rows of a cache that no token is written to. `from` to `to` are those that one is.
template <typename T>
METAL_FUNC void copy_cache(const device T* in,
                           device T* out,
                           constant RopeCacheParams& params,
                           long batch,
                           long begin,
                           long end,
                           int first) {
  // A thread takes every `copying`th pack. Its row and column advance without a division of 64
  // bits, which is slow on a GPU.
  const int pack = Pack<T>::kSize, columns = (params.rope.head_dim + pack - 1) / pack;
  const int capacity = metal::max(params.capacity, 1);
  const int rows_of_step = params.copying / columns;
  const int columns_of_step = params.copying - rows_of_step * columns;
  const long rows = long(params.rope.heads[1]) * params.capacity;
  long row = first / columns;
  int column = first % columns, place = int(row) % capacity;
  while (row < rows) {
    if (place < begin || place >= end) {
      const long at = (batch * rows + row) * params.rope.head_dim;
      copy_pack(in + at, 1, out + at, column * pack, params.rope.head_dim);
    }
    column += columns_of_step;
    const int step = rows_of_step + (column >= columns ? 1 : 0);
    column -= column >= columns ? columns : 0;
    row += step;
    place = int((uint(place) + uint(step)) % uint(capacity));
  }
}

template <typename T>
METAL_FUNC void rotate_and_write(const thread CacheOperands<T>& operands,
                                 constant RopeCacheParams& params,
                                 uint3 group,
                                 uint3 groups,
                                 uint thread_in_group,
                                 uint threads) {
  enum { kSize = Pack<T>::kSize };
  constant RopeParams& rope = params.rope;
  const int rotated = 2 * rope.pairs, packs = (rope.pairs + kSize - 1) / kSize;
  const int item = int(group.x * threads + thread_in_group);
  if (item >= params.rotating + params.copying) {
    return;
  }
  const int row_of_item = item / params.columns, column = item - row_of_item * params.columns;
  const int length = metal::max(rope.length, 1);
  const int chunk = row_of_item / length, position = row_of_item - chunk * length;
  const int heads = rope.heads[0] + 2 * rope.heads[1];
  const int begin = chunk * rope.chunk, end = metal::min(heads, begin + rope.chunk);
  const bool is_pair = column < packs;
  PairsOfThread<T> pairs;
  pairs.place(is_pair ? column * kSize : 0, rope);
  for (long batch = group.z; batch < rope.batch; batch += groups.z) {
    const long at = batch * rope.offset_step;
    const long offset = offsets_are_wide
                            ? reinterpret_cast<const device long*>(operands.angles.offset)[at]
                            : long(operands.angles.offset[at]);
    if (item >= params.rotating) {
      // Sums of far offsets overflow: they are no rows of a cache either way.
      const long first = offset, last = long(ulong(offset) + ulong(rope.length));
      const bool any = first < params.capacity && last > 0 && last >= first;
      const long from = any ? first : 0, to = any ? last : 0;
      if (params.copied[0] != 0) {
        copy_cache(operands.caches[0], operands.caches_out[0], params, batch, from, to,
                   item - params.rotating);
      }
      if (params.copied[1] != 0) {
        copy_cache(operands.caches[1], operands.caches_out[1], params, batch, from, to,
                   item - params.rotating);
      }
      continue;
    }
    const ulong place = ulong(offset) + ulong(position);
    if (is_pair && begin < rope.heads[0] + rope.heads[1]) {
      pairs.turn(operands.angles, column * kSize, place, rope);
    }
    for (int head = begin; head < end; ++head) {
      const CacheHead<T> own =
          cache_head_at<T>(operands, params, batch, head, position, long(place));
      if (!own.exists) {
        continue;
      }
      if (!is_pair) {
        copy_pack(own.in, own.stride, own.out, rotated + (column - packs) * kSize, rope.head_dim);
        continue;
      }
      if (!own.rotates) {
        copy_pack(own.in, own.stride, own.out, pairs.first[0], pairs.first[0] + pairs.own[0]);
        copy_pack(own.in, own.stride, own.out, pairs.first[1], pairs.first[1] + pairs.own[1]);
        continue;
      }
      float x[2 * kSize];
      pairs.load(own.in, own.stride, x);
      pairs.rotate(x, own.out);
    }
  }
}
