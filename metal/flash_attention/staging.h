// Stages the passing rows in threadgroup memory, one tile at a time. They are rows of two operands:
// keys and values, or queries and the gradients of their outputs.
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/scores.h"

// How much of a tile's loads is in flight at once.
enum Staging {
  kStagesEach,      // one vector per thread
  kStagesTogether,  // both tiles, through registers
  kStagesAhead,  // both tiles of the next step, by asynchronous copies (async_copy.h) into a second
                 // buffer
};

template <typename T,
          int kTileRows,
          int kFirstColumns,
          int kSecondColumns,
          int kThreads,
          Staging kStaging>
struct PassingRows {
  using FirstShare = TileShare<T, kTileRows, kFirstColumns, kThreads>;
  using SecondShare = TileShare<T, kTileRows, kSecondColumns, kThreads>;
  // Number of buffers, and elements per buffer for each operand.
  enum { kPlaces = kStaging == kStagesAhead ? 2 : 1 };
  enum { kFirstSize = kTileRows * FirstShare::kStride };
  enum { kSecondSize = kTileRows * SecondShare::kStride };

  Rows<T> first;  // from the next tile on
  Rows<T> second;
  threadgroup T* first_places;
  threadgroup T* second_places;
  uint thread_index;
  int turn = 0;  // buffer of the current tile, alternates between 0 and 1

  // The current tiles.
  METAL_FUNC threadgroup T* first_tile() const thread {
    return first_places + turn % kPlaces * kFirstSize;
  }
  METAL_FUNC threadgroup T* second_tile() const thread {
    return second_places + turn % kPlaces * kSecondSize;
  }

  // Call with all threads before the first take(), with the first tile's row of all rows of the
  // head.
  METAL_FUNC void start(Rows<T> all_first, Rows<T> all_second, int begin) thread {
    first = rows_from(all_first, begin);
    second = rows_from(all_second, begin);
    if (kStaging == kStagesAhead) {
      // Other threads may still read the last tiles of the previous head.
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      write(1 - turn);
    }
  }

  // Call with all threads. Afterwards all of them see the tiles that start at `begin`. Rows from
  // `end` on are not prefetched.
  METAL_FUNC void take(int begin, int end) thread {
    turn = 1 - turn;
    if (kStaging == kStagesAhead) {
      wait_for_copies<0>();
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (begin + kTileRows < end) {
        write(1 - turn);
      }
    } else {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      write(0);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }

 private:
  // Writes the next tiles.
  METAL_FUNC void write(int place) thread {
    threadgroup T* to_first = first_places + place * kFirstSize;
    threadgroup T* to_second = second_places + place * kSecondSize;
    if (!rows_are_vectors || kStaging == kStagesEach) {
      copy_tile<T, kTileRows, kFirstColumns, kThreads>(to_first, first, rows_are_vectors,
                                                       thread_index, heads_fill_tile);
      copy_tile<T, kTileRows, kSecondColumns, kThreads>(to_second, second, rows_are_vectors,
                                                        thread_index, heads_fill_tile);
    } else if (kStaging == kStagesAhead) {
      FirstShare::start_copies(to_first, first, thread_index);
      SecondShare::start_copies(to_second, second, thread_index);
      end_copies();
    } else {
      FirstShare first_share;
      SecondShare second_share;
      first_share.load(first, heads_fill_tile, thread_index);
      second_share.load(second, heads_fill_tile, thread_index);
      first_share.store(to_first, thread_index);
      second_share.store(to_second, thread_index);
    }
    advance<kTileRows>(first, rows_are_vectors);
    advance<kTileRows>(second, rows_are_vectors);
  }
};
