// Stages quantized keys and values in threadgroup memory, one tile at a time, as numbers of type T.
// What follows is the same as in the forward over plain ones (PassingRows).
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/quantized.h"

// Stores eight numbers at a multiple of 16 bytes.
template <typename T>
METAL_FUNC void store_eight(threadgroup T* to, const thread float* x) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 8; i += 4) {
    using Four = metal::vec<T, 4>;
    *reinterpret_cast<threadgroup Four*>(to + i) =
        Four(static_cast<T>(x[i]), static_cast<T>(x[i + 1]), static_cast<T>(x[i + 2]),
             static_cast<T>(x[i + 3]));
  }
}

// One thread's share of a tile of keys or values: eight codes at a time.
template <typename T, Operand kOperand, int kRows, int kColumns, int kThreads>
struct CodeShare {
  enum { kStride = TileRow<T, kColumns>::kStride, kUnits = kColumns / 8 };
  enum { kCount = (kRows * kUnits + kThreads - 1) / kThreads };
  using Chunk = CodeChunk<T, kOperand, 8>;

  Chunk chunks[kCount];

  METAL_FUNC void load(CodeRows<T> codes, int begin, uint thread_index) thread {
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      load_chunk(codes, begin, thread_index + j * kThreads, chunks[j]);
    }
  }

  METAL_FUNC void store(threadgroup T* to, int bits, uint thread_index) const thread {
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      if (kRows * kUnits % kThreads == 0 || thread_index + j * kThreads < kRows * kUnits) {
        store_chunk(chunks[j], to, bits, thread_index + j * kThreads);
      }
    }
  }

  // Loads and stores in one step, which takes fewer registers.
  METAL_FUNC static void copy(threadgroup T* to, CodeRows<T> codes, int begin, uint thread_index) {
    MLX_ANVIL_NO_UNROLL
    for (uint i = thread_index; i < kRows * kUnits; i += kThreads) {
      Chunk chunk;
      load_chunk(codes, begin, i, chunk);
      store_chunk(chunk, to, codes.bits, i);
    }
  }

 private:
  // Rows and columns past the last become zeros.
  METAL_FUNC static void load_chunk(CodeRows<T> codes, int begin, uint i, thread Chunk& chunk) {
    const int row = begin + int(i / kUnits), column = i % kUnits * 8;
    const int existing = existing_column<8>(column, codes.columns);
    chunk.load(codes.from(existing), metal::min(row, codes.rows - 1));
    chunk.clear_unless(row < codes.rows && column == existing);
  }

  METAL_FUNC static void store_chunk(const thread Chunk& chunk,
                                     threadgroup T* to,
                                     int bits,
                                     uint i) {
    float v[8];
    chunk.values_or_nan(0, bits, v);
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 8; ++e) {
      v[e] = metal::fma(Chunk::factor() * v[e], chunk.scale, chunk.bias);
    }
    store_eight(to + (i / kUnits * kStride + i % kUnits * 8), v);
  }
};

template <typename T, int kTileRows, int kFirstColumns, int kSecondColumns, int kThreads>
struct PassingCodes {
  using FirstShare = CodeShare<T, kOfKeys, kTileRows, kFirstColumns, kThreads>;
  using SecondShare = CodeShare<T, kOfValues, kTileRows, kSecondColumns, kThreads>;
  enum { kPlaces = 1, kTogether = FirstShare::kCount + SecondShare::kCount <= 4 };
  enum { kFirstSize = kTileRows * FirstShare::kStride };
  enum { kSecondSize = kTileRows * SecondShare::kStride };

  CodeRows<T> first;
  CodeRows<T> second;
  threadgroup T* first_places;
  threadgroup T* second_places;
  uint thread_index;

  METAL_FUNC threadgroup T* first_tile() const thread { return first_places; }
  METAL_FUNC threadgroup T* second_tile() const thread { return second_places; }

  METAL_FUNC void start(CodeRows<T> keys, CodeRows<T> values, int) thread {
    first = keys;
    second = values;
  }

  // Call with all threads. Afterwards all of them see the tiles that start at `begin`.
  METAL_FUNC void take(int begin, int) thread {
    if (kTogether) {
      FirstShare first_share;
      SecondShare second_share;
      first_share.load(first, begin, thread_index);
      second_share.load(second, begin, thread_index);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      first_share.store(first_places, first.bits, thread_index);
      second_share.store(second_places, second.bits, thread_index);
    } else {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      FirstShare::copy(first_places, first, begin, thread_index);
      SecondShare::copy(second_places, second, begin, thread_index);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
};
