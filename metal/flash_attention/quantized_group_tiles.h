// Tiles of quantized keys and values for products of four SIMD groups. A thread loads the codes of
// a tile one tile ahead, into registers. While products of earlier tiles run, it stores them as
// numbers of type T.
//
// Affine codes of 4 or 8 bits in groups of at least 32, in rows that are vectors.
#pragma once

#include "metal/flash_attention/forward_group.h"
#include "metal/flash_attention/quantized.h"
#include "metal/quantized_matmul/gemm_codes.h"

// One thread's share of a tile of keys or values: a quarter of the columns of a row. Lanes 0 to 7
// of a SIMD group have the same columns of adjacent rows, so that their stores have no bank
// conflicts.
template <typename T, Operand kOperand, int kRows, int kColumns, int kThreads>
struct GroupCodes {
  enum { kCodes = kColumns / 4, kPieces = kCodes / 8, kWords = 2 * kPieces };
  static_assert(kThreads == 4 * kRows, "a thread has a quarter of a row");
  static_assert(kCodes <= 32, "codes of one group");
  using Tile = SwizzledTile<T, kRows, kColumns>;
  using Chunk = CodeChunk<T, kOperand, kCodes>;

  uint words[kWords];  // with 4 bits the first half
  uint scale;          // pairs of equal elements
  uint bias;
  CodeRows<T> codes;
  int row;     // of the tile
  int column;  // the first, of the tile
  int next;    // row of the cache to load next
  bool exists;

  METAL_FUNC void start(CodeRows<T> all, int begin, uint thread_index) thread {
    const uint lane = thread_index % 32;
    row = thread_index / 32 * 8 + lane % 8;
    column = lane / 8 * kCodes;
    const int existing = existing_column<kCodes>(column, all.columns);
    exists = existing == column;
    codes = all.from(existing);
    next = begin + row;
  }

  // Loads the codes of the next tile. Those of rows and columns past the last become zeros. No
  // branch in a completed kernel.
  METAL_FUNC void load() thread {
    const int existing = metal::min(next, codes.rows - 1);
    const device uint* own = codes.words + near(codes.first_word, codes.word_stride, existing);
    if (Chunk::have_8_bits()) {
      load_words<kWords>(own, true, words);
    } else {
      load_words<kPieces>(own, true, words);
    }
    const uint at = near(codes.first_scale, codes.scale_stride, existing);
    const bool in_cache = exists && next < codes.rows;
    scale = in_cache ? pair_of(reinterpret_cast<const device T*>(codes.scales)[at]) : 0;
    bias = in_cache ? pair_of(codes.biases[at]) : 0;
    next += kRows;
  }

  // Stores what was loaded.
  METAL_FUNC void store(threadgroup T* tile) const thread {
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      uint pairs[4];
      if (Chunk::have_8_bits()) {
        unpack<8>(uint2(words[2 * piece], words[2 * piece + 1]), pairs);
      } else {
        unpack<4>(uint2(words[piece], 0), pairs);
      }
      *reinterpret_cast<threadgroup uint4*>(tile + Tile::unit_at(row, column + 8 * piece)) =
          uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

 private:
  template <int kBits>
  METAL_FUNC void unpack(uint2 piece, thread uint (&pairs)[4]) const thread {
    GemmFactors<T, AffineFormat<kBits>> by;
    by.scale = scale;
    by.bias = bias;
    gemm_weights(piece, by, uint(GemmMagic<T>::kBits), pairs);
  }
};

template <typename T, int kHeadDim, int kValueDim, int kKeys, int kThreads>
struct GroupCodeTiles : GroupPlaces<T, kHeadDim, kValueDim, kKeys> {
  GroupCodes<T, kOfKeys, kKeys, kHeadDim, kThreads> keys_ahead;
  GroupCodes<T, kOfValues, kKeys, kValueDim, kThreads> values_ahead;
  CodeRows<T> all_keys;
  CodeRows<T> all_values;
  uint thread_index;

  // Call with all threads. Stores the tile of keys that starts at `begin`, the first.
  METAL_FUNC void start(int begin) thread {
    keys_ahead.start(all_keys, begin, thread_index);
    values_ahead.start(all_values, begin, thread_index);
    this->turn = 1;
    keys_ahead.load();
    keys_ahead.store(this->free_keys());
    keys_ahead.load();
    values_ahead.load();
    this->wait();
  }

  // Stores values, and the keys of the tile after them. Loads those after these.
  METAL_FUNC void copy_next(bool) thread {
    keys_ahead.store(this->free_keys());
    keys_ahead.load();
    values_ahead.store(this->free_values());
    values_ahead.load();
  }
};
