// How the rows that pass by reach threadgroup memory: tile by tile of two operands, keys and values
// or queries and the gradients of their outputs.
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/scores.h"

// What of a tile's loads is under way at once.
enum Staging {
  kStagesEach,      // a vector at a time
  kStagesTogether,  // all of both tiles, which wait in registers
  kStagesAhead,     // all of the next tiles, by copies that run by themselves (async_copy.h) to a
                    // second place, while these are computed with
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
  // Places for tiles, and the elements of one for each operand.
  enum { kPlaces = kStaging == kStagesAhead ? 2 : 1 };
  enum { kFirstSize = kTileRows * FirstShare::kStride };
  enum { kSecondSize = kTileRows * SecondShare::kStride };

  Rows<T> first;  // all of them
  Rows<T> second;
  threadgroup T* first_places;
  threadgroup T* second_places;
  uint thread_index;
  int turn = 0;  // 0 and 1, with every tile

  // Those that were taken last.
  METAL_FUNC threadgroup T* first_tile() const thread {
    return first_places + turn % kPlaces * kFirstSize;
  }
  METAL_FUNC threadgroup T* second_tile() const thread {
    return second_places + turn % kPlaces * kSecondSize;
  }

  // By all threads, before the first tiles, which begin there.
  METAL_FUNC void start(int begin) thread {
    if (kStaging == kStagesAhead) {
      // Others may still compute with the last tiles of the rows before these.
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      write(begin, 1 - turn);
    }
  }

  // By all threads, which then see the tiles that begin there. Rows from `end` on are not wanted.
  METAL_FUNC void take(int begin, int end) thread {
    turn = 1 - turn;
    if (kStaging == kStagesAhead) {
      wait_for_copies<0>();
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (begin + kTileRows < end) {
        write(begin + kTileRows, 1 - turn);
      }
    } else {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      write(begin, 0);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }

 private:
  METAL_FUNC void write(int begin, int place) const thread {
    threadgroup T* to_first = first_places + place * kFirstSize;
    threadgroup T* to_second = second_places + place * kSecondSize;
    const Rows<T> from_first = rows_from(first, begin), from_second = rows_from(second, begin);
    if (!rows_are_vectors || kStaging == kStagesEach) {
      copy_tile<T, kTileRows, kFirstColumns, kThreads>(to_first, from_first, rows_are_vectors,
                                                       thread_index);
      copy_tile<T, kTileRows, kSecondColumns, kThreads>(to_second, from_second, rows_are_vectors,
                                                        thread_index);
    } else if (kStaging == kStagesAhead) {
      FirstShare::start_copies(to_first, from_first, thread_index);
      SecondShare::start_copies(to_second, from_second, thread_index);
      end_copies();
    } else {
      FirstShare first_share;
      SecondShare second_share;
      first_share.load(from_first, thread_index);
      second_share.load(from_second, thread_index);
      first_share.store(to_first, thread_index);
      second_share.store(to_second, thread_index);
    }
  }
};
